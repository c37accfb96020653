"""Manifests of graphs: accepted by a strict API server, with nothing secret in them, and as the committed ones."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kubernetes", reason="needs the extra [kubernetes]")

from tests.conformance.actuator import WHY
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.objects import Object, StatusError, validate
from tests.kubernetes.world import KubernetesWorld
from vllm_pd import cli
from vllm_pd.errors import SettingsError
from vllm_pd.graph import read
from vllm_pd.graph.check import check
from vllm_pd.graph.kubernetes import render
from vllm_pd.graph.kubernetes_check import is_credential
from vllm_pd.graph.model import Graph
from vllm_pd.planner.model import AddAction, RemoveAction
from vllm_pd.state import Role

ROOT = Path(__file__).resolve().parents[3]
DEPLOY = ROOT / "deploy" / "kubernetes"
SECRET = "hunter2"


def graph_of(path: Path) -> Graph:
    return check(read.from_mapping(yaml.safe_load(path.read_text()), path.name))


def with_options(**options: Any) -> Graph:
    graph = graph_of(DEPLOY / "graph.yaml")
    return dataclasses.replace(graph, kubernetes={**graph.kubernetes, **options})


def of(manifests: list[Object], kind: str, name: str) -> Object:
    return next(each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))


def container(deployment: Object) -> Object:
    found: Object = deployment["spec"]["template"]["spec"]["containers"][0]
    return found


def test_the_committed_manifests_are_those_of_the_committed_graph() -> None:
    committed = list(yaml.safe_load_all((DEPLOY / "cluster.yaml").read_text()))
    assert committed == json.loads(json.dumps(render(graph_of(DEPLOY / "graph.yaml"))))


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_graph_of_the_project_is_rendered_into_what_kubernetes_knows(path: Path) -> None:
    manifests = render(graph_of(path))
    for manifest in manifests:
        validate(manifest)
    names = [(each["kind"], each["metadata"]["name"]) for each in manifests]
    assert len(set(names)) == len(names)
    # What it selects must be what it makes.
    for each in manifests:
        if each["kind"] == "Deployment":
            wanted = each["spec"]["selector"]["matchLabels"].items()
            assert wanted <= each["spec"]["template"]["metadata"]["labels"].items()
    # Rendering is pure: twice the same, and plain values only.
    assert json.loads(json.dumps(manifests)) == render(graph_of(path))


def test_the_test_server_refuses_what_kubernetes_does_not_know() -> None:
    manifest = of(render(graph_of(DEPLOY / "graph.yaml")), "Deployment", "pd-decode")
    container(manifest)["resourcez"] = {}
    with pytest.raises(StatusError, match="resourcez"):
        validate(manifest)


def test_a_pod_gets_longer_to_end_than_its_requests_do() -> None:
    manifests = render(with_options(drain_s=300))
    for name in ("pd-decode", "pd-prefill"):
        deployment = of(manifests, "Deployment", name)
        command = container(deployment)["command"]
        assert command[command.index("--shutdown-timeout") + 1] == "300"
        assert deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 300
        # A model may take longer to load than what Kubernetes waits for by itself.
        assert deployment["spec"]["progressDeadlineSeconds"] > 900
    router = of(manifests, "Deployment", "pd-frontend")
    # What is still sent to a pod that is going is taken, too.
    (pause, seconds) = container(router)["lifecycle"]["preStop"]["exec"]["command"]
    assert pause == "sleep"
    assert router["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > 300 + int(seconds)


def planner_of(settings: dict[str, Any], *args: str) -> tuple[Object, list[Object]]:
    """The planner's container, and the rules of its Role."""
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["planner"] |= {"settings": settings, "args": list(args)}
    manifests = render(check(read.from_mapping(data, "graph")))
    return container(of(manifests, "Deployment", "pd-planner")), of(manifests, "Role", "pd-planner")["rules"]


@pytest.mark.parametrize(
    ("settings", "args", "port"),
    [
        ({}, (), 9090),
        ({"metrics_port": 9200}, (), 9200),
        ({"metrics_host": "127.0.0.1"}, ("--metrics-port=9300", "--actuator=kubernetes=llm"), 9300),
        ({"metrics_port": 0}, (), 9090),
    ],
)
def test_the_page_of_the_planner_is_where_its_probe_asks(
    settings: dict[str, Any], args: tuple[str, ...], port: int
) -> None:
    told, _ = planner_of(settings, *args)
    assert told["ports"] == [{"name": "metrics", "containerPort": port}]
    read_back = cli._parser().parse_args(told["command"][1:])
    assert (read_back.planner_metrics_host, read_back.planner_metrics_port) == ("0.0.0.0", str(port))
    assert len(read_back.planner_actuators) == 1


def test_a_planner_that_only_moves_roles_may_scale_nothing() -> None:
    resources = {what for rule in planner_of({"mode": "fixed"})[1] for what in rule["resources"]}
    assert resources == {"deployments", "statefulsets", "pods"}
    scaling = [rule for rule in planner_of({"mode": "scale"})[1] if rule["resources"] == ["deployments/scale"]]
    assert [rule["resourceNames"] for rule in scaling] == [["pd-decode", "pd-prefill"]]


def test_a_planner_scales_only_what_it_is_linked_to() -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["planner"]["links"] = ["decode"]
    manifests = render(check(read.from_mapping(data, "graph")))
    (scale,) = (r for r in of(manifests, "Role", "pd-planner")["rules"] if r["resources"] == ["deployments/scale"])
    assert scale["resourceNames"] == ["pd-decode"]
    assert "vllm-pd/hold" not in of(manifests, "Deployment", "pd-decode")["metadata"]["annotations"]
    assert of(manifests, "Deployment", "pd-prefill")["metadata"]["annotations"]["vllm-pd/hold"] == "true"


def test_a_planner_that_would_start_processes_is_refused() -> None:
    with pytest.raises(SettingsError, match="the actuator processes, which starts workers on one machine"):
        planner_of({"mode": "scale", "actuators": ["processes"]})


def test_a_variable_that_frontend_and_router_name_is_there_once() -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["router"]["env"] = {"A": "router", "B": "router"}
    data["components"]["frontend"]["env"] = {"A": "frontend"}
    env = container(of(render(read.from_mapping(data, "graph")), "Deployment", "pd-frontend"))["env"]
    assert [each["value"] for each in env if each["name"] == "A"] == ["frontend"]
    assert len({each["name"] for each in env}) == len(env)


def test_workers_get_gpus_memory_for_their_tiers_and_the_address_they_are_reached_at() -> None:
    deployment = of(render(with_options(node_selector={"gpu": "h100"})), "Deployment", "pd-decode")
    spec = deployment["spec"]["template"]["spec"]
    told = container(deployment)
    assert told["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert told["resources"]["requests"] == {"cpu": "8", "memory": "64Gi"}
    volumes = {each["name"]: each for each in spec["volumes"]}
    # The CPU tier of 32 GiB is in shared memory.
    assert volumes["shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "36Gi"}
    assert volumes["ssd"]["emptyDir"]["sizeLimit"] == "221Gi"
    assert {"name": "ssd", "mountPath": "/ssd"} in told["volumeMounts"]
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "models"}
    assert spec["nodeSelector"] == {"gpu": "h100"}
    env = {each["name"]: each for each in told["env"]}
    assert env["VLLM_HOST_IP"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
    assert told["command"][:6] == ["vllm", "serve", "Qwen/Qwen3-8B", "--host", "0.0.0.0", "--port"]
    assert "--role" in told["command"]
    assert deployment["metadata"]["annotations"]["vllm-pd/max-replicas"] == "6"


def test_a_cluster_without_gpus_is_told_cores() -> None:
    told = container(of(render(with_options(gpu_resource="", resources={})), "Deployment", "pd-decode"))
    assert told["resources"] == {"requests": {"cpu": "1"}}
    assert "--enforce-eager" in told["command"]


def test_several_gpus_split_the_model() -> None:
    graph = graph_of(DEPLOY / "graph.yaml")
    components = tuple(
        dataclasses.replace(each, gpus=4) if each.label == "decode" else each  # type: ignore[call-arg]
        for each in graph.components
    )
    told = container(of(render(dataclasses.replace(graph, components=components)), "Deployment", "pd-decode"))
    assert told["command"][told["command"].index("--tensor-parallel-size") + 1] == "4"
    assert told["resources"]["limits"] == {"nvidia.com/gpu": "4"}


def test_a_graph_without_a_store_gets_one_because_pods_come_and_go() -> None:
    manifests = render(graph_of(ROOT / "configs" / "agg.yaml"))
    name = manifests[0]["metadata"]["name"]
    assert name.endswith("-store")
    assert any(each["kind"] == "Service" and each["metadata"]["name"] == name for each in manifests)


def test_secrets_are_referred_to_and_never_written() -> None:
    text = yaml.safe_dump_all(render(graph_of(DEPLOY / "graph.yaml")))
    assert "kind: Secret" not in text
    env = {
        each["name"]: each for each in container(of(list(yaml.safe_load_all(text)), "Deployment", "pd-frontend"))["env"]
    }
    for name, key in (("STORE_PASSWORD", "STORE_PASSWORD"), ("VLLM_PD_ROUTER_API_KEY", "VLLM_PD_ROUTER_API_KEY")):
        assert env[name]["valueFrom"]["secretKeyRef"] == {"name": "pd-secrets", "key": key}
    # Kubernetes puts a variable into another one only if it stands before it.
    names = list(env)
    assert names.index("STORE_PASSWORD") < names.index("VLLM_PD_STORE")
    assert env["VLLM_PD_STORE"]["value"] == "redis://:$(STORE_PASSWORD)@pd-store:6379"


def test_a_secret_in_the_graph_is_refused() -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["router"] = {"links": ["decode"], "settings": {"api_key": SECRET}}
    with pytest.raises(SettingsError, match="VLLM_PD_ROUTER_API_KEY in its secrets") as refused:
        render(read.from_mapping(data, "graph"))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [f"rediss://:{SECRET}@redis.example.com:6379", f"redis+sentinel://a:1,b:2/main?sentinel_password={SECRET}"],
)
def test_the_password_of_a_store_of_ones_own_stays_out_of_the_manifests(url: str) -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["store"] = {"url": url}
    manifests = render(read.from_mapping(data, "graph"))
    assert SECRET not in json.dumps(manifests)
    env = {each["name"]: each for each in container(of(manifests, "Deployment", "pd-decode"))["env"]}
    assert env["VLLM_PD_STORE"]["valueFrom"]["secretKeyRef"]["key"] == "STORE_URL"
    assert not any(each["metadata"]["name"] == "pd-store" for each in manifests)


def test_the_store_starts_with_its_password_in_a_file_that_others_cannot_read(tmp_path: Path) -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    odd = "O'Neill's 100% \\n $HOME"
    data["components"]["store"] = {"settings": {"proc-title-template": odd, "lazyfree-lazy-eviction": True}}
    command = container(of(render(read.from_mapping(data, "graph")), "Deployment", "pd-store"))["command"]
    server = tmp_path / "valkey-server"
    server.write_text('#!/bin/sh\nstat -c %a "$1"; cat "$1"\n')
    server.chmod(0o755)
    script = command[2].replace("/tmp/", f"{tmp_path}/")
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "STORE_PASSWORD": SECRET}
    done = subprocess.run(
        ["sh", "-c", script, *command[3:]], env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[0] == "600"
    assert {'save ""', "appendonly no", "maxmemory-policy noeviction", f"requirepass {SECRET}"} <= set(lines)
    assert {f"proc-title-template {odd}", "lazyfree-lazy-eviction yes"} <= set(lines)


def test_network_policies_let_in_who_needs_to_and_nobody_else() -> None:
    manifests = render(graph_of(DEPLOY / "graph.yaml"))
    store = of(manifests, "NetworkPolicy", "pd-store")
    allowed = {each["podSelector"]["matchLabels"]["vllm-pd/component"] for each in store["spec"]["ingress"][0]["from"]}
    assert allowed == {"frontend", "planner", "decode", "prefill"}
    assert not any(each["kind"] == "NetworkPolicy" for each in render(with_options(network_policy=False)))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drian_s": 5}, "did you mean 'drain_s'"),
        ({"drain_s": 0}, "drain_s in the section kubernetes must be"),
        ({"service_type": "Loadbalancer"}, "LoadBalancer"),
        ({"resources": {"decoder": {"cpu": 1}}}, "decoder"),
        ({"resources": {"decode": {"memory": "lots"}}}, "16Gi"),
        ({"ssd_volume": {}}, "one source of a volume"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        render(with_options(**options))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"graph": "4gpus"}, "4gpus-frontend is to be the name of a Service, too: it must begin with a letter"),
        ({"graph": "g" * 40, "components": {"p" * 40: {"kind": "prefill"}}}, "have at most 63 of them"),
        ({"components": {"prefill": {"env": {"HF_TOKEN": SECRET}}}}, "env of prefill holds HF_TOKEN, which would be"),
    ],
)
def test_names_and_variables_that_must_not_be_so_on_kubernetes_are_refused(change: dict[str, Any], said: str) -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data = {**data, **change, "components": {**data["components"], **change.get("components", {})}}
    with pytest.raises(SettingsError, match=said) as refused:
        render(read.from_mapping(data, "graph"))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    ("told", "where"),
    [
        ({"env": {"AWS_SECRET_ACCESS_KEY": SECRET}}, "env of prefill holds AWS_SECRET_ACCESS_KEY"),
        ({"env": {"HUB": "hf_" + "aB3" * 12}}, "HUB in env of prefill looks like a password or key"),
        ({"env": {"https_proxy": f"http://me:{SECRET}@proxy:3128"}}, "https_proxy in env of prefill"),
        ({"env": {"HEADERS": "Authorization: Bearer " + SECRET * 3}}, "HEADERS in env of prefill"),
        ({"args": ["--otlp-traces-endpoint", f"grpc://me:{SECRET}@collector:4317"]}, "args of prefill hold what looks"),
    ],
)
def test_what_shows_itself_to_be_a_secret_is_refused_wherever_it_stands(told: dict[str, Any], where: str) -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["prefill"] = {**data["components"]["prefill"], **told}
    with pytest.raises(SettingsError, match=where) as refused:
        render(read.from_mapping(data, "graph"))
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "sk-" + "a1" * 20,
        "ghp_" + "Z9" * 18,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJl",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_credentials_are_known_by_how_they_begin(text: str) -> None:
    assert is_credential(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Qwen/Qwen3-8B",
        "hf_transfer",
        "task-decoding-with-a-long-name",
        "redis://host:6379/0",
        "http://me@host/x",
        "-----BEGIN CERTIFICATE-----",
        "float16",
        "a@b:c",
        "risk-averse-scheduling-policy",
        "Basic usage of a long nameless",
    ],
)
def test_what_is_no_secret_is_not_taken_for_one(text: str) -> None:
    assert not is_credential(text)


def test_a_fraction_of_a_gpu_is_refused() -> None:
    data = yaml.safe_load((DEPLOY / "graph.yaml").read_text())
    data["components"]["decode"]["gpus"] = 0.5
    with pytest.raises(SettingsError, match="whole GPUs"):
        render(read.from_mapping(data, "graph"))


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    async with ApiServer() as server:
        yield server


async def test_the_planner_may_do_what_it_has_to_and_finds_the_workloads(server: ApiServer) -> None:
    """The rendered Role, on the rendered workloads, enforced."""
    manifests = render(graph_of(DEPLOY / "graph.yaml"))
    server.rules = of(manifests, "Role", "pd-planner")["rules"]
    world = KubernetesWorld(server)
    server.create(manifests)
    started = [pod for pod in world.pods() if "vllm-pd/starts-as" in pod["metadata"]["labels"]]
    world.forget_others()
    await world.settle()
    workers = await world.workers()
    assert len(workers) == len(started) == 4
    assert await world.actuator.starting(world.pool) == []
    assert (await world.actuator.act(world.pool, AddAction(Role.PREFILL, 1, WHY))).ok
    assert server.replicas("Deployment", "pd-prefill") == 3
    id, (epoch, _) = next((id, each) for id, each in sorted(workers.items()) if each[1] is Role.DECODE)
    outcome = await world.actuator.act(world.pool, RemoveAction(id, epoch, WHY))
    assert outcome.ok, outcome.detail
    assert "150 s" in outcome.detail
    assert id not in await world.workers()
    # Its service account may nothing beyond that.
    server.rules = [rule for rule in server.rules if "pods" not in rule["resources"]]
    assert not (await world.actuator.act(world.pool, AddAction(Role.DECODE, 1, WHY))).ok
    await world.close()
