"""A real Prometheus with the project's own configuration, which finds the workers through the router."""

from __future__ import annotations

import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import yaml

from deploy.grafana import build
from scripts.prometheus import Programs
from vllm_pd.graph.ports import LOOPBACK, free_port
from vllm_pd.graph.process import ManagedProcess, ProcessSpec

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SCRAPE_S = 1
START_DEADLINE_S = 600.0
_POLL_S = 0.5
_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Prometheus:
    """Runs while entered.

    Args:
        addresses: what stands where the configuration names a service, `router:8080` and the like.
    """

    def __init__(self, programs: Programs, folder: Path, addresses: Mapping[str, str]) -> None:
        text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
        for service, address in addresses.items():
            assert service in text, f"prometheus.yml does not name {service}"
            text = text.replace(service, address)
        config: dict[str, Any] = yaml.safe_load(text)
        config["global"] = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config["rule_files"] = [str(DEPLOY / "prometheus" / "alerts.yml")]
        file = folder / "prometheus.yml"
        file.write_text(yaml.safe_dump(config))
        self._url = f"http://{LOOPBACK}:{free_port()}"
        command = [str(programs.prometheus), f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address={self._url.removeprefix('http://')}", "--log.level=warn"]
        self._process = ManagedProcess(ProcessSpec("prometheus", command, folder / "prometheus.log", {}))

    def __enter__(self) -> Prometheus:
        self._process.start().wait_ready(f"{self._url}/-/ready", deadline_s=START_DEADLINE_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.stop()

    def ask(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises AssertionError with Prometheus' words."""
        query = urllib.parse.urlencode({"query": expr})
        try:
            with _direct.open(f"{self._url}/api/v1/query?{query}", timeout=120) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{expr}: {e.read().decode(errors='replace')}") from None
        return list(found["data"]["result"])

    def numbers(self, expr: str) -> list[float]:
        """Its values that are numbers: a rate without events divides 0 by 0."""
        return [value for each in self.ask(expr) if math.isfinite(value := float(each["value"][1]))]

    def rules(self) -> list[dict[str, Any]]:
        """All rules, as Prometheus evaluates them."""
        with _direct.open(f"{self._url}/api/v1/rules", timeout=120) as answer:
            return [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]


def answered(
    prometheus: Prometheus, queries: Mapping[str, str], seconds: float, meanwhile: Callable[[], object]
) -> dict[str, str]:
    """Ask until each has given a number once. Returns those that have not, by what they are for."""
    left = dict(queries)
    deadline = time.monotonic() + seconds
    while left and time.monotonic() < deadline:
        meanwhile()
        for title, expr in list(left.items()):
            if prometheus.numbers(expr):
                del left[title]
        time.sleep(_POLL_S)
    return left


def dashboard_queries(span: str) -> dict[str, str]:
    """Of all panels, by panel and letter, with what Grafana fills in; `span` is its interval of rates."""
    found = {}
    dashboard = build.build()
    for panel in (each for row in dashboard["panels"] for each in (row, *row.get("panels", []))):
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", span).replace("$pool", ".*").replace("$worker", ".*")
            found[f"{panel['title']} {target['refId']}"] = expr
    return found
