"""Store URLs: what each says, and one sentence without secrets for those that say nothing useful."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd.errors import SettingsError
from vllm_pd.parsers import store_url
from vllm_pd.state.redis_client import make_client
from vllm_pd.state.store_url import StoreUrl, Topology, parse_store_url


@pytest.fixture
def pem(tmp_path: Path) -> Path:
    """A file for the options that name one."""
    path = tmp_path / "a.pem"
    path.touch()
    return path


@pytest.mark.parametrize(
    "url, topology, hosts",
    [
        ("redis://h", Topology.SERVER, (("h", 6379),)),
        ("redis://h:1/2", Topology.SERVER, (("h", 1),)),
        ("rediss://[::1]:1", Topology.SERVER, (("::1", 1),)),
        ("redis://[::1]", Topology.SERVER, (("::1", 6379),)),
        ("redis+sentinel://a,b:1/main", Topology.SENTINEL, (("a", 26379), ("b", 1))),
        ("rediss+sentinel://[fe80::1]:2,b/main/3", Topology.SENTINEL, (("fe80::1", 2), ("b", 26379))),
        ("redis+cluster://a:1,b,[::1]", Topology.CLUSTER, (("a", 1), ("b", 6379), ("::1", 6379))),
        ("rediss+cluster://a", Topology.CLUSTER, (("a", 6379),)),
        ("unix:///run/redis.sock?db=1", Topology.SOCKET, ()),
    ],
)
def test_a_url_names_its_hosts(url: str, topology: Topology, hosts: tuple[tuple[str, int], ...]) -> None:
    parsed = parse_store_url(url)
    assert (parsed.topology, parsed.hosts) == (topology, hosts)
    assert (parsed.tls is not None) is url.startswith("rediss")
    make_client(parsed, timeout_s=1, longest_s=1)


def test_databases_sockets_and_primaries_are_found() -> None:
    assert parse_store_url("redis://h/7").db == parse_store_url("redis://h?db=7").db == 7
    assert parse_store_url("redis+sentinel://h/my%2Fname/7").db == 7
    assert parse_store_url("redis+sentinel://h/my%2Fname").primary == "my/name"
    assert parse_store_url("unix:///run/a%40b.sock").path == "/run/a@b.sock"
    assert parse_store_url("unix://u:p@/run/r.sock").username == "u"


@given(st.text(min_size=1), st.text(min_size=1))
def test_any_user_and_password_can_be_given_percent_encoded(user: str, password: str) -> None:
    from urllib.parse import quote

    def quoted(text: str) -> str:
        return quote(text.encode(errors="surrogatepass"), safe="")

    text = "".join(c for c in user if not "\ud800" <= c <= "\udfff")
    secret = "".join(c for c in password if not "\ud800" <= c <= "\udfff")
    parsed = parse_store_url(
        f"redis+sentinel://{quoted(text)}:{quoted(secret)}@h1,h2/p?sentinel_password={quoted(secret)}"
    )
    assert (parsed.username, parsed.password, parsed.sentinel_password) == (text, secret, secret)


def test_no_secret_is_shown(pem: Path) -> None:
    url = "rediss+sentinel://me:s3cret@h1,h2:1/p?sentinel_username=them&sentinel_password=0ther"
    parsed = parse_store_url(url)
    assert parsed.address == "rediss+sentinel://me:***@h1,h2:1/p"
    for shown in (repr(parsed), str(parsed), repr(store_url(url))):
        assert "s3cret" not in shown
        assert "0ther" not in shown


def test_options_of_tls_are_taken_over(pem: Path) -> None:
    files = f"ssl_ca_certs={pem}&ssl_certfile={pem}&ssl_keyfile={pem}"
    tls = parse_store_url(f"rediss+cluster://h?{files}&ssl_check_hostname=no").tls
    names = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")
    assert tls == {**dict.fromkeys(names, str(pem)), "ssl_check_hostname": False}
    assert parse_store_url("rediss://h?ssl_cert_reqs=none").tls == {
        "ssl_cert_reqs": "none",
        "ssl_check_hostname": False,
    }


WRONG = {
    "localhost:6379": "must begin with",
    "reddis://u:s3cret@h": "did you mean 'redis",
    "redis+sentinl://h/p": "did you mean 'redis\\+sentinel'",
    "redis://": "malformed",
    "redis://:s3/cret@h:1": "malformed",
    "redis://u:s3cret@h:port": "malformed",
    "redis://u:s3cret@h:0": "malformed",
    "redis://u:s3cret@h:65536": "malformed",
    "redis://:s3cret@h/one": "number of a database",
    "redis://[::1": "malformed",
    "redis://[::1]6379": "malformed",
    "redis://a,b": "names 2 servers",
    "redis+sentinel://u:s3cret@h": "does not name the primary",
    "redis+sentinel://h,/p": "malformed",
    "redis+cluster://u:s3cret@h/1": "only number 0",
    "unix://run/redis.sock": "names no socket",
    "redis://h?no_such_option=s3cret": "the options are db",
    "redis://h?pasword=s3cret": "did you mean 'password'",
    "redis://u:s3c?ret@h": "option that is unknown",
    "redis://h?db=1&db=2": "twice",
    "redis://h?ssl_ca_certs=/ca.pem": "begin it with rediss",
    "redis://h?sentinel_password=s3cret": "only Sentinels",
    "rediss://h?ssl_ca_certs=/no/such.pem": "/no/such.pem, which is no file here",
    "rediss://h?ssl_check_hostname=maybe": "ssl_check_hostname that must be true or false",
    "rediss://h?ssl_cert_reqs=s3cret": "none of required, optional, none",
}


@pytest.mark.parametrize("url", WRONG)
def test_a_wrong_url_is_refused_in_one_sentence(url: str) -> None:
    with pytest.raises(SettingsError, match=WRONG[url]) as error:
        parse_store_url(url)
    for piece in ("s3cret", "s3", "s3c", "cret@"):
        assert piece not in str(error.value)
    assert str(error.value).endswith(".")
    assert error.value.__cause__ is None
    with pytest.raises(ValueError, match=r"^cannot be used: the store URL"):
        store_url(url)


def test_a_key_needs_its_certificate(pem: Path) -> None:
    with pytest.raises(SettingsError, match="ssl_keyfile without ssl_certfile"):
        parse_store_url(f"rediss://h?ssl_keyfile={pem}")


def test_a_parsed_url_is_a_value() -> None:
    assert parse_store_url("redis://h") == StoreUrl(Topology.SERVER, "redis://h", (("h", 6379),))
