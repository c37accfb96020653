from __future__ import annotations

from pathlib import Path

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.layered import settings_of
from vllm_pd.router.settings import RouterSettings, load
from vllm_pd.router.static_probe import StaticWorker
from vllm_pd.settings_file import read_file
from vllm_pd.state import Role

STORE = {"store": "redis://h:6379"}


def test_each_layer_goes_before_the_next() -> None:
    file = {"port": 1, **STORE}
    environ = {"VLLM_PD_ROUTER_PORT": "2"}
    assert load(flags={"port": "3"}, environ=environ, file=file).value.port == 3
    assert load(environ=environ, file=file).value.port == 2
    assert load(file=file).value.port == 1
    resolved = load(file=STORE)
    assert (resolved.value.port, resolved.source["port"]) == (8080, "default")


def test_every_setting_has_a_flag_a_variable_and_help() -> None:
    specs = settings_of(RouterSettings).values()
    assert all(spec.flag.startswith("--") and spec.env.startswith("VLLM_PD_") and spec.help for spec in specs)
    assert len({spec.flag for spec in specs}) == len({spec.env for spec in specs}) == len(specs)


@pytest.mark.parametrize(
    "raw",
    [
        ["http://a:1=prefill", "https://b:2/=decode"],
        "http://a:1=prefill,https://b:2=decode",
        "http://a:1=prefill https://b:2=decode",
        {"http://a:1": "prefill", "https://b:2": "decode"},
    ],
)
def test_workers_are_read_from_flags_variables_and_files(raw: object) -> None:
    assert load(file={"workers": raw}).value.workers == (
        StaticWorker("http://a:1", Role.PREFILL),
        StaticWorker("https://b:2", Role.DECODE),
    )


@pytest.mark.parametrize("raw", [["work=2", "disturbance=0"], "work=2, disturbance=0", {"work": 2, "disturbance": 0}])
def test_weights_are_read_from_flags_variables_and_files(raw: object) -> None:
    assert load(file={"weights": raw, **STORE}).value.weights == (("work", 2.0), ("disturbance", 0.0))


def test_index_is_switched_by_words_or_by_yaml() -> None:
    assert load(flags={"index": "off", **STORE}).value.index is False
    assert load(file={"index": False, "session-header": "X-User", **STORE}).value.session_header == "x-user"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "no way to find workers"),
        ({"store": "http://h"}, "must begin with one of redis://"),
        ({**STORE, "port": "99999"}, "--port must be a number at least 0 and at most"),
        ({**STORE, "port": "1.5"}, "whole number"),
        ({**STORE, "namespace": "a b"}, "letters, digits"),
        ({**STORE, "prefill_timeout": "0"}, "must be a number above 0"),
        ({**STORE, "log_level": "loud"}, "must be one of debug, info"),
        ({**STORE, "worker_api_key": "has space"}, "printable ASCII"),
        ({**STORE, "worker_ca": "x", "worker_insecure": True}, "contradict"),
        ({**STORE, "policy": "predict"}, "did you mean 'predicted'"),
        ({**STORE, "weights": ["work=x"]}, "must be NAME=VALUE"),
        ({**STORE, "weights": ["work"]}, "must be NAME=VALUE"),
        ({**STORE, "weights": "work=-1"}, "must be NAME=VALUE with values of at least 0"),
        ({**STORE, "weights": "magic=1"}, "has no weight 'magic'; it has"),
        ({**STORE, "temperature": "-1"}, "--temperature must be a number at least 0"),
        ({**STORE, "seed": "1.5"}, "whole number"),
        ({**STORE, "session_header": "x y"}, "must be the name of a header"),
        ({**STORE, "tokenizer": "/no/such/path"}, "must be a file or folder that exists"),
        ({**STORE, "index": "perhaps"}, "must be true or false"),
        ({**STORE, "max_local_prefill_tokens": "-1"}, "must be a number at least 0"),
        ({"workers": ["http://a:1"]}, "must be URL=role"),
        ({"workers": ["http://a:1=decod"]}, "did you mean 'decode'"),
        ({"workers": ["a:1=decode"]}, "must be URL=role"),
        ({"workers": ["http://u:hunter2@a:1=decode"]}, "must not hold a user or password"),
        ({"workers": ["http://a:1=decode", "http://a:1=prefill"]}, "twice"),
    ],
)
def test_each_mistake_is_one_sentence_that_says_what_to_change(values: dict[str, object], words: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(flags=values)
    assert words in str(caught.value)
    assert str(caught.value).endswith(".")
    assert "hunter2" not in str(caught.value)


def test_unknown_key_in_the_file_names_the_nearest() -> None:
    with pytest.raises(SettingsError, match="did you mean 'prefill_timeout'"):
        load(file={"prefil_timeout": 3, **STORE})


def test_secrets_are_hidden_when_settings_are_shown() -> None:
    resolved = load(file={"store": "redis://u:hunter2@h", "api_key": "hunter2", "worker-api-key": "hunter2"})
    assert "hunter2" not in str(resolved.describe())


@pytest.mark.parametrize(("text", "words"), [("- a\n", "keys and values"), ("a: [", "not valid YAML")])
def test_unusable_file_says_why(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "router.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_file(str(path), flag="--config", example="port: 8080")
    path.unlink()
    with pytest.raises(SettingsError, match="cannot be read"):
        read_file(str(path), flag="--config", example="port: 8080")
