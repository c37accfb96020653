"""The flags of `vllm serve`: what they turn into, and what each wrong combination gets."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_pd.errors import SettingsError
from vllm_pd.settings import WorkerSettings, from_extra_config
from vllm_pd.state.base import Role

pytestmark = pytest.mark.vllm

Make = Callable[..., Any]
ErrorOf = Callable[..., str]

WANTED = WorkerSettings(
    role=Role.PREFILL, store="redis://127.0.0.1:6379", namespace="blue", cpu_gib=2.0, advertise_url="http://h:1"
)


def settings_of(args: Any) -> WorkerSettings:
    assert args.kv_transfer_config.kv_connector == "pd"
    return from_extra_config(args.kv_transfer_config.kv_connector_extra_config)


def by_flags(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    return make(
        "--kv-connector=pd", "--role=prefill", "--pd-store=redis://127.0.0.1:6379", "--pd-namespace=blue",
        "--pd-cpu-gib=2", "--pd-advertise-url=http://h:1/",
    )  # fmt: skip


def by_environment(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    values = {
        "KV_CONNECTOR": "pd", "ROLE": "prefill", "STORE": "redis://127.0.0.1:6379", "NAMESPACE": "blue",
        "CPU_GIB": "2", "ADVERTISE_URL": "http://h:1",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(f"VLLM_PD_{name}", value)
    return make()


def by_file(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    file = tmp_path / "pd.yaml"
    file.write_text(
        "kv-connector: pd\nrole: prefill\nstore: redis://127.0.0.1:6379\npd-namespace: blue\ncpu_gib: 2\n"
        "advertise-url: http://h:1\n"
    )
    return make("--pd-config", str(file))


def by_json(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    extra = {"store": "redis://127.0.0.1:6379", "namespace": "blue", "cpu_gib": 2, "advertise_url": "http://h:1"}
    config = {"kv_connector": "pd", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    return make("--kv-transfer-config", json.dumps(config))


@pytest.mark.parametrize("way", [by_flags, by_environment, by_file, by_json])
def test_the_four_ways_of_configuring_agree(
    way: Callable[..., Any], engine_args: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = way(engine_args, tmp_path, monkeypatch)
    assert settings_of(made) == WANTED
    config = made.kv_transfer_config
    assert (config.kv_role, config.kv_load_failure_policy) == ("kv_both", "recompute")
    assert made.prefix_caching_hash_algo == "sha256_cbor"
    assert made.scheduling_policy == "priority"
    assert config.has_connector("NixlConnector") and config.has_connector("OffloadingConnector")


def test_a_flag_wins_over_the_environment_which_wins_over_the_file(
    engine_args: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pd.yaml"
    file.write_text("role: prefill\nnamespace: from-file\ncpu_gib: 1\n")
    monkeypatch.setenv("VLLM_PD_NAMESPACE", "from-env")
    monkeypatch.setenv("VLLM_PD_CPU_GIB", "2")
    made = settings_of(engine_args("--kv-connector", "pd", "--pd-config", str(file), "--pd-cpu-gib", "3"))
    assert (made.role, made.namespace, made.cpu_gib) == (Role.PREFILL, "from-env", 3.0)


@pytest.mark.parametrize(
    ("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer"), (None, "kv_both")]
)
def test_another_registered_connector_is_sugar_for_the_json(role: str | None, kv_role: str, engine_args: Make) -> None:
    made = engine_args("--kv-connector", "ExampleConnector", *(["--role", role] if role else []))
    config = made.kv_transfer_config
    assert (config.kv_connector, config.kv_role) == ("ExampleConnector", kv_role)
    assert made.prefix_caching_hash_algo != "sha256_cbor"
    assert made.scheduling_policy == "fcfs"


def test_environment_without_a_connector_changes_nothing(engine_args: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PD_STORE", "redis://127.0.0.1:6379")
    monkeypatch.setenv("VLLM_PD_ROLE", "prefill")
    assert engine_args().kv_transfer_config is None


@pytest.mark.parametrize(
    ("argv", "seconds"),
    [
        ([], 0),
        (["--kv-connector", "NixlConnector"], 0),
        (["--kv-connector", "pd"], 30),
        (['--kv-transfer-config={"kv_connector":"pd","kv_role":"kv_both"}'], 30),
        (["--kv-connector", "pd", "--shutdown-timeout", "0"], 0),
        (["--kv-connector", "pd", "--shutdown-timeout", "7"], 7),
    ],
)
def test_a_pd_worker_drains_when_it_is_stopped_unless_the_user_says_otherwise(
    argv: list[str], seconds: int, engine_args: Make
) -> None:
    made = engine_args(*argv).shutdown_timeout
    assert (made, type(made)) == (seconds, int)


def test_further_api_servers_drain_alike(serve_parser: Any) -> None:
    """They get the arguments of the process that spawned them, and turn them into engine arguments again."""
    from vllm import AsyncEngineArgs

    args = serve_parser.parse_args(["m", "--kv-connector", "pd"])
    assert pickle.loads(pickle.dumps(args)).shutdown_timeout == 0  # noqa: S301
    AsyncEngineArgs.from_cli_args(args)
    again = pickle.loads(pickle.dumps(args))  # noqa: S301
    assert AsyncEngineArgs.from_cli_args(again).shutdown_timeout == 30


def test_the_password_of_the_store_is_not_in_what_vllm_logs(serve_parser: Any, engine_args: Make) -> None:
    flags = ["--kv-connector", "pd", "--pd-store", "redis://user:hunter2@127.0.0.1:1"]
    assert "hunter2" not in repr(serve_parser.parse_args(["m", *flags]))
    extra = json.dumps({"pd-store": flags[-1]})
    as_json = f'--kv-transfer-config={{"kv_connector":"pd","kv_role":"kv_both","kv_connector_extra_config":{extra}}}'
    assert "hunter2" not in repr(serve_parser.parse_args(["m", as_json]))
    assert settings_of(engine_args(as_json)).store == flags[-1]
    made = engine_args(*flags)
    assert "hunter2" not in repr(made) and settings_of(made).store == "redis://user:hunter2@127.0.0.1:1"


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--kv-connector=pd", "--role=prefil"], ["--role", "prefill, decode, both", "did you mean 'prefill'"]),
        (["--role=decode"], ["--role", "add --kv-connector pd"]),
        (["--pd-cpu-gib=1"], ["--pd-cpu-gib", "add --kv-connector pd"]),
        (["--kv-connector=pdd"], ["pdd", "did you mean 'pd'"]),
        (
            ["--kv-connector=pd", '--kv-transfer-config={"kv_connector":"NixlConnector","kv_role":"kv_both"}'],
            ["--kv-connector pd", "--kv-transfer-config", "keep one"],
        ),
        (
            ["--role=prefill", '--kv-transfer-config={"kv_connector":"pd","kv_role":"kv_both"}'],
            ["--role", "kv_connector_extra_config"],
        ),
        (["--kv-connector=pd", "--pd-ssd-gib=10"], ["--pd-ssd-gib", "add --pd-ssd-path"]),
        (["--kv-connector=pd", "--pd-ssd-path=x"], ["--pd-ssd-path", "add --pd-ssd-gib"]),
        (["--kv-connector=pd", "--pd-ssd-path=x", "--pd-ssd-gib=1"], ["add --pd-cpu-gib"]),
        (["--kv-connector=pd", "--pd-cpu-gib=-1"], ["--pd-cpu-gib", "at least 0", "-1"]),
        (["--kv-connector=pd", "--pd-store=http://x"], ["--pd-store", "redis://"]),
        (["--kv-connector="], ["--kv-connector", "empty"]),
        (["--kv-connector=pd", "--pd-config=/"], ["/", "Is a directory", "--pd-config"]),
        (["--kv-connector=pd", "--pd-advertise-url=http://u:p@h:1"], ["--pd-advertise-url", "without a user", "***"]),
        (["--kv-connector=pd", "--pd-namespace=a b"], ["--pd-namespace", "letters"]),
        (["--kv-connector=pd", "--pd-advertise-url=h:1"], ["--pd-advertise-url", "http://HOST:PORT"]),
        (["--kv-connector=pd", "--pd-config=/none/such"], ["/none/such", "--pd-config"]),
        (["--kv-connector=pd", "--no-enable-prefix-caching"], ["drop --no-enable-prefix-caching"]),
        (["--kv-connector=pd", "--kv-offloading-size=1"], ["--kv-offloading-size", "--pd-cpu-gib"]),
        (["--kv-connector=ExampleConnector", "--pd-cpu-gib=1"], ["--pd-cpu-gib", "ExampleConnector"]),
        (
            ['--kv-transfer-config={"kv_connector":"pd","kv_role":"kv_both","kv_connector_extra_config":{"cpu_gb":1}}'],
            ["'cpu_gb'", "did you mean 'cpu_gib'"],
        ),
    ],
)
def test_a_wrong_combination_ends_with_one_sentence(argv: list[str], words: list[str], error_of: ErrorOf) -> None:
    sentence = error_of(*argv)
    assert sentence.startswith("vllm-pd: error: ") and sentence.endswith(".")
    for word in words:
        assert word in sentence


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("kv_connector: [pd]", ["kv_connector", "name of a connector"]),
        ("kv_connector: pd\nkv-connector: pd", ["twice"]),
        ("role: [prefill]", ["role", "prefill, decode, both"]),
        ("role: {prefill: 1}", ["role", "prefill, decode, both"]),
        ("cpu_gib: yes", ["cpu_gib", "number"]),
        ("cpu_gib: .inf", ["cpu_gib", "number"]),
        ("lease_s: .nan", ["lease_s", "number"]),
        ("ssd_path: 5", ["ssd_path", "text"]),
        ("nixl: 3", ["nixl", "mapping"]),
        ("- role", ["keys and values"]),
        ("1: 2", ["unknown key 1"]),
        ("role: 'prefill", ["not valid YAML"]),
        ("role: \udcff", ["not valid YAML"]),
    ],
)
def test_a_file_with_values_of_a_wrong_type_ends_with_one_sentence(
    content: str, words: list[str], error_of: ErrorOf, tmp_path: Path
) -> None:
    file = tmp_path / "pd.yaml"
    file.write_bytes(content.encode("utf-8", "surrogateescape"))
    sentence = error_of(f"--pd-config={file}", *(["--kv-connector=pd"] if "connector" not in content else []))
    assert sentence.startswith("vllm-pd: error: ") and sentence.endswith(".")
    for word in (*words, str(file)):
        assert word in sentence


@pytest.mark.parametrize("content", ["kv-connector: pd\npd-cpu-gib: 2", "kv_connector: pd\npd_cpu_gib: 2.0"])
def test_vllms_own_configuration_file_takes_our_flags(engine_args: Make, tmp_path: Path, content: str) -> None:
    file = tmp_path / "vllm.yaml"
    file.write_text(f"{content}\nrole: prefill\nmax-model-len: 128\n")
    made = engine_args("--config", str(file), "--pd-namespace", "blue")
    assert made.max_model_len == 128
    settings = settings_of(made)
    assert (settings.role, settings.cpu_gib, settings.namespace) == (Role.PREFILL, 2.0, "blue")


def test_a_connector_of_the_environment_gives_way_to_a_flag(engine_args: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PD_KV_CONNECTOR", "pd")
    monkeypatch.setenv("VLLM_PD_CPU_GIB", "2")
    monkeypatch.setenv("VLLM_PD_ROLE", "decode")
    config = engine_args("--kv-connector", "NixlConnector").kv_transfer_config
    assert (config.kv_connector, config.kv_role, config.kv_connector_extra_config) == (
        "NixlConnector", "kv_consumer", {},
    )  # fmt: skip


def test_json_that_agrees_with_the_environment_is_taken(engine_args: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PD_KV_CONNECTOR", "pd")
    monkeypatch.setenv("VLLM_PD_ROLE", "prefill")
    made = engine_args('--kv-transfer-config={"kv_connector":"pd","kv_role":"kv_consumer"}')
    assert settings_of(made).role is Role.DECODE


def test_json_that_disagrees_with_the_environment_is_refused(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_PD_KV_CONNECTOR", "pd")
    sentence = error_of('--kv-transfer-config={"kv_connector":"ExampleConnector","kv_role":"kv_both"}')
    assert "VLLM_PD_KV_CONNECTOR=pd" in sentence


def test_an_engine_made_in_python_gets_what_the_flags_make(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    given = KVTransferConfig(
        kv_connector="pd", kv_role="kv_consumer", engine_id="e", kv_connector_extra_config={"cpu_gib": 1}
    )
    args = EngineArgs(model=str(tiny_model), kv_transfer_config=given)
    for made in (args.create_engine_config(), args.create_engine_config()):
        config = made.kv_transfer_config
        assert config.has_connector("NixlConnector") and config.has_connector("OffloadingConnector")
        assert (config.engine_id, config.kv_role, config.kv_load_failure_policy) == ("e", "kv_both", "recompute")
        assert settings_of(made).role is Role.DECODE
        assert made.cache_config.prefix_caching_hash_algo == "sha256_cbor"


def test_a_wrong_setting_in_python_is_an_exception(tiny_model: Path) -> None:
    from vllm import EngineArgs
    from vllm.config import KVTransferConfig

    given = KVTransferConfig(kv_connector="pd", kv_role="kv_both", kv_connector_extra_config={"cpu_gb": 1})
    with pytest.raises(SettingsError, match="did you mean 'cpu_gib'"):
        EngineArgs(model=str(tiny_model), kv_transfer_config=given).create_engine_config()


def test_an_unknown_key_of_the_file_names_the_nearest(error_of: ErrorOf, tmp_path: Path) -> None:
    file = tmp_path / "pd.yaml"
    file.write_text("rol: prefill\n")
    assert "did you mean 'role'" in error_of("--kv-connector=pd", f"--pd-config={file}")


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_without_nixl_a_role_that_needs_it_is_refused(
    role: str, error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd.transfer_config.nixl_installed", lambda: False)
    assert "pip install 'vllm-pd[nixl]'" in error_of("--kv-connector=pd", f"--role={role}")


def test_without_nixl_both_with_tiers_works_and_says_that_hand_off_is_off(
    engine_args: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_pd.transfer_config.nixl_installed", lambda: False)
    monkeypatch.setattr("vllm_pd.worker_setup.nixl_installed", lambda: False)
    monkeypatch.setattr("logging.Logger.propagate", True, raising=False)
    import logging

    logging.getLogger("vllm").addHandler(caplog.handler)
    try:
        made = engine_args("--kv-connector=pd", "--pd-cpu-gib=1")
    finally:
        logging.getLogger("vllm").removeHandler(caplog.handler)
    config = made.kv_transfer_config
    assert config.has_connector("OffloadingConnector") and not config.has_connector("NixlConnector")
    assert "hand-off is off" in caplog.text


def test_without_nixl_and_without_tiers_there_is_nothing_to_run(
    error_of: ErrorOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd.transfer_config.nixl_installed", lambda: False)
    assert "nothing to do" in error_of("--kv-connector=pd")


def test_help_lists_the_group(serve_parser: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        serve_parser.parse_args(["--help=vllm-pd"])
    shown = capsys.readouterr().out
    for flag in ("--kv-connector", "--role", "--pd-store", "--pd-namespace", "--pd-advertise-url", "--pd-cpu-gib",
                 "--pd-ssd-path", "--pd-ssd-gib", "--pd-config"):  # fmt: skip
        assert flag in shown
