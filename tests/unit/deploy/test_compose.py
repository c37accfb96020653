"""The compose file starts what there is, with flags that exist, open to this machine only. No container is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_pd import cli
from vllm_pd.router.cli import build_parser

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
OURS = {"vllm-pd-router": build_parser, "vllm-pd": cli._parser}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return dict(yaml.safe_load((DEPLOY / "compose.yaml").read_text()))


def services(compose: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield from compose["services"].items()


def test_commands_of_this_project_are_understood(compose: dict[str, Any]) -> None:
    found = [service["command"] for _, service in services(compose) if service.get("command", [""])[0] in OURS]
    assert len(found) == 3
    for program, *arguments in found:
        OURS[program]().parse_args(arguments)


def test_what_is_mounted_is_there(compose: dict[str, Any]) -> None:
    for name, service in services(compose):
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (DEPLOY / source).exists(), f"{name}: {source}"


def test_images_of_others_have_a_version_and_ours_are_built_here(compose: dict[str, Any]) -> None:
    targets = {line.split()[-1] for line in (DEPLOY / "Dockerfile").read_text().splitlines() if " AS " in line}
    for name, service in services(compose):
        if "build" in service:
            build = service["build"]
            assert (DEPLOY / build["context"] / build["dockerfile"]).exists() and build["target"] in targets, name
        else:
            tag = service["image"].partition(":")[2]
            assert tag and tag != "latest", name


def test_nothing_listens_for_other_hosts_unless_that_is_asked_for(compose: dict[str, Any]) -> None:
    for name, service in services(compose):
        for port in service.get("ports", []):
            assert port.startswith(("127.0.0.1:", "${BIND:-127.0.0.1}:")), f"{name}: {port}"


def test_prometheus_scrapes_and_grafana_asks_services_that_are_started(compose: dict[str, Any]) -> None:
    names = {name for name, service in services(compose) if "profiles" not in service}
    jobs = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    static = [each for job in jobs for each in job.get("static_configs", [])]
    assert {target.partition(":")[0] for each in static for target in each["targets"]} <= names
    (sources,) = (DEPLOY / "grafana" / "provisioning" / "datasources").iterdir()
    (source,) = yaml.safe_load(sources.read_text())["datasources"]
    assert source["type"] == "prometheus" and source["url"].removeprefix("http://").partition(":")[0] in names


def test_grafana_finds_the_dashboard_where_it_looks_for_it(compose: dict[str, Any]) -> None:
    grafana = compose["services"]["grafana"]
    (file,) = (DEPLOY / "grafana" / "provisioning" / "dashboards").iterdir()
    (provider,) = yaml.safe_load(file.read_text())["providers"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home.startswith(f"{provider['options']['path']}/")
    assert any(volume.split(":")[1] == home for volume in grafana["volumes"])


def test_services_are_waited_for_and_come_back(compose: dict[str, Any]) -> None:
    for name, service in services(compose):
        assert service["restart"] == "unless-stopped", name
        assert set(service.get("depends_on", ())) <= set(compose["services"]), name
    assert "healthcheck" in compose["services"]["redis"]
