"""Secrets of URLs, as they appear in messages and logs."""

from __future__ import annotations

import copy

import pytest

from vllm_pd.layered import SecretUrl, redact


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:1/0", "redis://h:1/0"),
        ("redis://u:s3cret@h:1/0", "redis://u:***@h:1/0"),
        ("redis://:s3cret@h:1", "redis://:***@h:1"),
        ("redis://u@h:1", "redis://u@h:1"),
        ("redis://u:s3@cret@h:1", "redis://u:***@h:1"),
        ("u:s3cret@h:1", "u:***@h:1"),
        ("redis://h:1?password=s3cret&db=1", "redis://h:1?password=***&db=1"),
        ("redis://h:1?db=1&PASSWORD=s3@cret", "redis://h:1?db=1&PASSWORD=***"),
        ("rediss://h:1?ssl_password=s3cret", "rediss://h:1?ssl_password=***"),
        ("/some/folder", "/some/folder"),
    ],
)
def test_passwords_are_hidden_wherever_they_stand(url: str, shown: str) -> None:
    assert redact(url) == shown


def test_a_secret_url_hides_its_password_only_when_shown() -> None:
    url = SecretUrl("redis://u:s3cret@h:1")
    assert url == "redis://u:s3cret@h:1"
    assert repr(copy.deepcopy({"store": url})) == "{'store': 'redis://u:***@h:1'}"
