"""The URL, id and pool a worker registers under."""

from __future__ import annotations

import ipaddress
from types import SimpleNamespace

import pytest

from vllm_pd.agent import identity, runtime
from vllm_pd.agent.identity import advertise_url, worker_id
from vllm_pd.agent.runtime import RuntimeConfig
from vllm_pd.errors import SettingsError


@pytest.mark.parametrize(
    ("host", "tls", "url"),
    [
        ("127.0.0.1", False, "http://127.0.0.1:8000"),
        ("localhost", False, "http://localhost:8000"),
        ("10.1.2.3", True, "https://10.1.2.3:8000"),
        ("::1", False, "http://[::1]:8000"),
        ("[fd00::5]", False, "http://[fd00::5]:8000"),
    ],
)
def test_a_bound_address_is_advertised_as_it_is(host: str, tls: bool, url: str) -> None:
    assert advertise_url(host, 8000, tls=tls) == url


@pytest.mark.parametrize("host", [None, "", "0.0.0.0", "::"])
def test_every_interface_becomes_one_address_of_this_machine(host: str | None) -> None:
    url = advertise_url(host, 8000)
    address = ipaddress.ip_address(url.removeprefix("http://").rpartition(":")[0].strip("[]"))
    assert not address.is_unspecified
    assert advertise_url(host, 8000, host_ip="10.9.8.7") == "http://10.9.8.7:8000"


def test_without_a_route_loopback_is_advertised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_PROBES", ())
    assert advertise_url(None, 8000) == "http://127.0.0.1:8000"


def test_an_explicit_url_wins() -> None:
    assert advertise_url("127.0.0.1", 8000, explicit="https://gpu-7.example:444/") == "https://gpu-7.example:444"
    assert advertise_url(None, 0, uds="/run/x.sock", explicit="http://h:1") == "http://h:1"


@pytest.mark.parametrize("explicit", ["gpu-7:8000", "ftp://h:1", "http://", "http://h:99999", "http://u:p@h:1"])
def test_a_malformed_explicit_url_names_the_flag_and_not_the_secret(explicit: str) -> None:
    with pytest.raises(SettingsError, match="--pd-advertise-url") as error:
        advertise_url("127.0.0.1", 8000, explicit=explicit)
    assert "u:p" not in str(error.value)


@pytest.mark.parametrize(("port", "uds"), [(0, None), (8000, "/run/x.sock")])
def test_a_server_without_a_url_of_its_own_asks_for_one(port: int, uds: str | None) -> None:
    with pytest.raises(SettingsError, match="--pd-advertise-url"):
        runtime.configure(RuntimeConfig(store="redis://h", namespace="n", port=port, uds=uds))


@pytest.mark.parametrize(
    ("url", "name"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://[::1]:8000", "[::1]:8000"),
        ("https://gpu.example", "gpu.example:443"),
        ("http://gateway/a/", "gateway:80/a"),
    ],
)
def test_the_worker_id_is_host_and_port(url: str, name: str) -> None:
    assert worker_id(url) == name


def test_the_pool_names_what_must_be_equal() -> None:
    def config(context_ranks: int = 1, **changes: object) -> SimpleNamespace:
        cache = {"cache_dtype": "auto", "block_size": 32, "prefix_caching_hash_algo": "sha256_cbor"} | changes
        return SimpleNamespace(
            model_config=SimpleNamespace(model="m", revision=None, dtype="torch.bfloat16"),
            cache_config=SimpleNamespace(kv_cache_layout=None, **cache),
            device_config=SimpleNamespace(device_type="cuda"),
            parallel_config=SimpleNamespace(decode_context_parallel_size=context_ranks),
        )

    spec = identity.pool_spec(config(), "0.32.0")
    assert (spec.revision, spec.dtype, spec.kv_dtype, spec.kv_layout) == ("main", "bfloat16", "bfloat16", "cuda/auto")
    assert spec.id == identity.pool_spec(config(cache_dtype="bfloat16"), "0.32.0").id
    assert spec.id != identity.pool_spec(config(cache_dtype="fp8"), "0.32.0").id
    assert spec.id != identity.pool_spec(config(block_size=64), "0.32.0").id
    assert spec.id != identity.pool_spec(config(), "0.33.0").id
    assert spec.id != identity.pool_spec(config(), "0.32.0", "17").id
    # Hashes are made over what all context-parallel ranks hold together.
    assert identity.pool_spec(config(context_ranks=2), "0.32.0").block_size == 64


def test_without_a_store_nothing_is_configured() -> None:
    runtime.configure(RuntimeConfig(store="", namespace="n"))
    assert runtime.configured() is None
