"""From a graph to commands and environments, without starting anything."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from vllm_pd.errors import GraphError
from vllm_pd.graph import processes
from vllm_pd.graph.check import check
from vllm_pd.graph.machine import Machine, Place, computes_bfloat16, even_place, free_place
from vllm_pd.graph.model import Decode, Frontend, Graph, Link, Planner, Prefill, Router, Store, Worker
from vllm_pd.graph.processes import Launch, Spot, Surroundings

STORE = "redis://:hunter2@10.0.0.2:6379"
ENVIRON = {"PATH": "/bin", "VLLM_PD_ROLE": "both", "API_KEY": "k", "VLLM_PD_ROUTER_API_KEY": "secret"}
AROUND = Surroundings(Path("/programs"), ENVIRON, Path("/run/g"), "0123", STORE, Path("/bin/valkey-server"))
GPU = Place(gpus=("3",))


def launched(graph: Graph, name: str, spot: Spot = Spot(0, 1234, GPU), around: Surroundings = AROUND) -> Launch:  # noqa: B008
    component = check(graph).component(name)
    assert component is not None
    return processes.launch(graph, component, spot, around)


def following(launch: Launch, flag: str) -> str:
    return launch.command[launch.command.index(flag) + 1]


def whole(**kinds: object) -> Graph:
    decode, prefill = kinds.get("decode", Decode()), kinds.get("prefill", Prefill())
    router, frontend = kinds.get("router", Router()), kinds.get("frontend", Frontend())
    assert isinstance(decode, Decode) and isinstance(prefill, Prefill)
    assert isinstance(router, Router) and isinstance(frontend, Frontend)
    return frontend.link(router).link(decode).link(prefill).beside(Planner(), Store()).graph("g", model="m")


def test_what_is_needed_is_started_first() -> None:
    waves = [[c.label for c in wave] for wave in processes.order(whole())]
    assert waves == [["store"], ["decode", "prefill"], ["frontend", "planner"]]


def test_a_store_of_ones_own_is_not_started() -> None:
    graph = Frontend().link(Router()).link(Worker()).beside(Store(url=STORE)).graph("g", model="m")
    assert [[c.label for c in wave] for wave in processes.order(graph)] == [["worker"], ["frontend"]]


def test_a_worker_is_told_its_role_and_store_and_only_its_own_gpu() -> None:
    launch = launched(whole(prefill=Prefill(settings={"cpu_gib": 4}, env={"X": "1"})), "prefill")
    assert launch.command[:3] == ("/programs/vllm", "serve", "m")
    assert following(launch, "--role") == "prefill"
    assert following(launch, "--pd-cpu-gib") == "4"
    assert launch.env["CUDA_VISIBLE_DEVICES"] == "3"
    assert (launch.env["VLLM_PD_STORE"], launch.env["VLLM_PD_NAMESPACE"], launch.env["X"]) == (STORE, "default", "1")
    assert "VLLM_PD_ROLE" not in launch.env
    # Arguments can be read by everybody on the machine.
    assert "hunter2" not in " ".join(launch.command)
    assert "--enforce-eager" not in launch.command
    assert launch.ready == launch.alive == "http://127.0.0.1:1234/health"


def test_a_worker_without_a_gpu_is_made_small() -> None:
    launch = launched(whole(decode=Decode(kv_blocks=32)), "decode", Spot(1, 9, Place(cores=(0, 3))))
    assert launch.env["VLLM_CPU_OMP_THREADS_BIND"] == "0,3"
    assert launch.env["MALLOC_MMAP_THRESHOLD_"] == str(32 << 20)
    assert following(launch, "--max-model-len") == "1024"
    assert following(launch, "--num-gpu-blocks-override") == "32"
    assert "CUDA_VISIBLE_DEVICES" not in launch.env


def test_what_the_environment_says_about_memory_holds() -> None:
    around = dataclasses.replace(AROUND, environ=ENVIRON | {"MALLOC_TRIM_THRESHOLD_": "5"})
    launch = launched(whole(decode=Decode(kv_blocks=32)), "decode", Spot(1, 9, Place(cores=(0, 3))), around)
    assert launch.env["MALLOC_TRIM_THRESHOLD_"] == "5"


@pytest.mark.parametrize(
    ("cpuinfo", "fast"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx2 fma\n", False),
        ("processor\t: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16\n", True),
        ("processor\t: 0\nFeatures\t: fp asimd bf16\n", True),
        ("", True),
    ],
)
def test_a_worker_on_cores_that_only_emulate_bfloat16_computes_in_float32(cpuinfo: str, fast: bool) -> None:
    assert computes_bfloat16(cpuinfo) is fast
    cores = Machine((4, 5), has_bfloat16=fast)
    place = free_place(cores, [], gpus=1, cores=1)
    assert place.dtype == even_place(cores, 0, 1).dtype == ("" if fast else "float32")
    command = launched(whole(decode=Decode(args=("--dtype", "half"))), "decode", Spot(1, 9, place)).command
    given = [command[at + 1] for at, word in enumerate(command) if word == "--dtype"]
    # vLLM takes the last one: what the graph says holds.
    assert given == (["half"] if fast else ["float32", "half"])


def test_several_gpus_make_a_worker_tensor_parallel_unless_it_is_split_otherwise() -> None:
    two = Spot(0, 1, Place(gpus=("0", "1")))
    assert following(launched(whole(decode=Decode(gpus=2)), "decode", two), "--tensor-parallel-size") == "2"
    piped = launched(whole(decode=Decode(gpus=2, args=("-pp", "2"))), "decode", two)
    assert "--tensor-parallel-size" not in piped.command


def test_a_shared_gpu_is_shared_in_its_memory() -> None:
    half = Spot(0, 1, Place(gpus=("0",), share=0.5))
    assert following(launched(whole(decode=Decode(gpus=0.5)), "decode", half), "--gpu-memory-utilization") == "0.40"


def test_settings_without_a_flag_are_given_as_json() -> None:
    launch = launched(whole(decode=Decode(settings={"nixl": {"backends": ["UCX"]}, "cpu_gib": 2})), "decode")
    config = json.loads(following(launch, "--kv-transfer-config"))
    assert config["kv_connector"] == "pd"
    assert config["kv_connector_extra_config"] == {"role": "decode", "nixl": {"backends": ["UCX"]}, "cpu_gib": 2}
    assert "--role" not in launch.command


def test_frontend_and_router_are_one_program_with_the_settings_of_both() -> None:
    router = Router(
        settings={"policy": "prefix", "disagg_options": {"max_wait": 3}, "index": False, "require_prefill": True},
        secrets=("VLLM_PD_ROUTER_API_KEY",),
    )
    frontend = Frontend(count=2, host="0.0.0.0", settings={"idle_timeout": 5, "worker_api_key": "geheim"})
    launch = launched(whole(frontend=frontend, router=router), "frontend")
    assert following(launch, "--policy") == "prefix"
    assert following(launch, "--disagg-option") == "max_wait=3"
    assert following(launch, "--index") == "off"
    assert following(launch, "--idle-timeout") == "5"
    assert "--require-prefill" in launch.command
    assert "geheim" not in " ".join(launch.command)
    assert (launch.env["VLLM_PD_WORKER_API_KEY"], launch.env["VLLM_PD_ROUTER_API_KEY"]) == ("geheim", "secret")
    assert following(launch, "--host") == "0.0.0.0"
    assert launch.url == "http://127.0.0.1:1234"
    assert launch.ready == "http://127.0.0.1:1234/ready"


def test_a_store_is_told_yes_and_no_in_its_own_words() -> None:
    store = Store(settings={"appendonly": True, "maxmemory": "1gb"})
    graph = Frontend().link(Router()).link(Worker()).beside(store).graph("g", model="m")
    launch = launched(graph, "store")
    assert following(launch, "--appendonly") == "yes"
    assert following(launch, "--maxmemory") == "1gb"


def test_a_setting_without_a_value_is_not_given() -> None:
    frontend = Frontend(settings={"shutdown_grace": None})
    assert launched(whole(frontend=frontend), "frontend").grace_s == launched(whole(), "frontend").grace_s


@pytest.mark.parametrize(
    ("host", "asked"), [("0.0.0.0", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("fd00::1", "[fd00::1]")]
)
def test_a_planner_is_asked_where_its_metrics_are(host: str, asked: str) -> None:
    planner = Planner(settings={"metrics_host": host}, args=("--metrics-port=9100",))
    graph = Frontend().link(Router()).link(Worker()).beside(planner).graph("g", model="m")
    assert launched(graph, "planner").ready == f"http://{asked}:9100/metrics"
    assert launched(whole(), "planner").ready == ""


def test_a_planner_is_told_which_workers_it_may_start_and_end() -> None:
    graph = whole()
    assert launched(graph, "planner").env["PD_GRAPH_PLANS"] == "decode,prefill"
    linked = dataclasses.replace(graph, links=(*graph.links, Link("planner", "decode")))
    assert launched(linked, "planner").env["PD_GRAPH_PLANS"] == "decode"


def test_a_frontend_without_a_router_balances_by_load() -> None:
    launch = launched(Frontend().link(Worker()).graph("g", model="m"), "frontend")
    assert following(launch, "--policy") == "least-loaded"


def test_the_end_of_a_worker_waits_for_what_it_may_finish() -> None:
    assert launched(whole(), "decode").grace_s == 45
    assert launched(whole(decode=Decode(args=("--shutdown-timeout=100",))), "decode").grace_s == 115


def test_commands_are_shown_without_passwords() -> None:
    launch = launched(whole(decode=Decode(args=("--x", "http://u:geheim@h"))), "decode")
    assert "geheim" not in processes.shown(launch)


@pytest.mark.parametrize(
    ("taken", "gpus", "place"),
    [
        ([], 1, Place(gpus=("0",))),
        ([Place(gpus=("0",))], 2, Place(gpus=("1", "2"))),
        ([Place(gpus=("0",), share=0.5)], 0.5, Place(gpus=("0",), share=0.5)),
        ([Place(gpus=("0",), share=0.5)], 0.75, Place(gpus=("1",), share=0.75)),
        ([Place(gpus=("0",), share=1 / 3)] * 2, 1 / 3, Place(gpus=("0",), share=1 / 3)),
        ([Place(gpus=("0",), share=0.25)], 1, Place(gpus=("1",))),
    ],
)
def test_a_worker_gets_gpus_that_are_free(taken: list[Place], gpus: float, place: Place) -> None:
    assert free_place(Machine((0,), ("0", "1", "2")), taken, gpus=gpus, cores=1) == place


def test_cores_are_shared_when_they_run_out_and_gpus_are_not() -> None:
    cpu = Machine((4, 5))
    first = free_place(cpu, [], gpus=1, cores=1)
    second = free_place(cpu, [first], gpus=1, cores=1)
    third = free_place(cpu, [first, second], gpus=1, cores=1)
    assert [p.cores for p in (first, second, third)] == [(4,), (5,), (4,)]
    with pytest.raises(GraphError, match="it wants 3 cores and this machine has 2"):
        free_place(cpu, [], gpus=1, cores=3)
    with pytest.raises(GraphError, match=r"it wants 2 GPU\(s\), and 1 of 2 are free"):
        free_place(Machine((0,), ("0", "1")), [Place(gpus=("1",))], gpus=2, cores=1)
