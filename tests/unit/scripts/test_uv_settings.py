"""uv is told what pip is configured with, or is not asked."""

from __future__ import annotations

import pytest

from scripts.uv_settings import UnknownToUv, uv_settings

BEST = {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_nothing_configured_needs_only_that_all_indexes_count() -> None:
    assert uv_settings("") == BEST


def test_a_mirror_wheels_constraints_and_the_network_are_told() -> None:
    config = r"""
:env:.default-timeout='180'
:env:.find-links='/wheels /more'
global.cert='/etc/ca.crt'
global.constraint='/etc/a.txt /etc/b.txt'
global.disable-pip-version-check='true'
global.extra-index-url='\nhttps://one/simple\nhttps://two/simple'
global.index-url='https://me:secret@mirror/simple'
global.proxy='http://proxy:8080'
global.trusted-host='mirror'
"""
    assert uv_settings(config) == {
        **BEST,
        "UV_HTTP_TIMEOUT": "180",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/etc/ca.crt",
        "UV_CONSTRAINT": "/etc/a.txt /etc/b.txt",
        "UV_EXTRA_INDEX_URL": "https://one/simple https://two/simple",
        "UV_DEFAULT_INDEX": "https://me:secret@mirror/simple",
        "ALL_PROXY": "http://proxy:8080",
        "UV_INSECURE_HOST": "mirror",
    }


def test_a_variable_counts_for_more_than_a_file_and_other_commands_for_nothing() -> None:
    config = "install.index-url='https://b'\n:env:.index-url='https://c'\nglobal.index-url='https://a'\nfreeze.user='1'"
    assert uv_settings(config)["UV_DEFAULT_INDEX"] == "https://c"


@pytest.mark.parametrize("line", ["global.no-binary=':all:'", ":env:.target='/x'", "global.no_index='true'"])
def test_a_setting_that_uv_does_not_know_is_named(line: str) -> None:
    with pytest.raises(UnknownToUv, match=line.split("=")[0].split(".")[-1].replace("_", "-")):
        uv_settings(line)
