"""Every alert can be read, fires at its fault and only then, and has a section in the operator's handbook."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.promql import INFERENCE
from scripts.prometheus import Programs
from tests.unit.deploy.alert_cases import BEGIN, CALM, CASES, END, HEALTHY, MORE

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "prometheus"

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def run(programs: Programs, *arguments: str) -> None:
    done = subprocess.run(
        [str(programs.promtool), *arguments], capture_output=True, text=True, timeout=1200, check=False, cwd=FOLDER
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_takes_configuration_and_rules(programs: Programs) -> None:
    run(programs, "check", "config", "prometheus.yml")


def scene(series: dict[str, str], firing: dict[int, str]) -> dict[str, Any]:
    """Only the named alert fires in each of these minutes; none where the name is empty."""
    checks = []
    for at, name in firing.items():
        sample = {"labels": f'{{alertname="{name}"}}', "value": 1} if name else {"labels": "{}", "value": 0}
        query = 'group by (alertname) (ALERTS{alertstate="firing"})'
        checks.append(
            {"expr": f"{query} or (vector(0) unless on () {query})", "eval_time": f"{at}m", "exp_samples": [sample]}
        )
    inputs = [{"series": each, "values": values} for each, values in (HEALTHY | series).items()]
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}


def test_every_alert_fires_at_its_fault_and_no_other_and_none_in_a_healthy_cluster(
    alerts: list[dict[str, Any]], programs: Programs, tmp_path: Path
) -> None:
    assert set(CASES) == {rule["alert"] for rule in alerts}
    scenes = [scene(series, {1: "", BEGIN: "", END: ""}) for series in ({}, *CALM)]
    cases = [*CASES.items(), *MORE]
    scenes += [scene(case.series, {BEGIN - 1: "", BEGIN + case.minutes: name}) for name, case in cases]
    file = tmp_path / "scenes.yml"
    rules = {"rule_files": [str(FOLDER / "alerts.yml")], "evaluation_interval": "1m", "tests": scenes}
    file.write_text(yaml.safe_dump(rules))
    run(programs, "test", "rules", str(file))


def test_the_alert_on_errors_is_about_the_requests_that_the_dashboard_shows(alerts: list[dict[str, Any]]) -> None:
    (errors,) = (rule["expr"] for rule in alerts if rule["alert"] == "VllmPdErrors")
    assert errors.count(INFERENCE) == 2


def test_every_alert_says_what_happened_and_where_to_read_on(alerts: list[dict[str, Any]]) -> None:
    handbook = (ROOT / "docs" / "operations.md").read_text()
    headings = set(re.findall(r"^#{2,4} (VllmPd\w+)$", handbook, re.MULTILINE))
    assert headings == {rule["alert"] for rule in alerts}
    for rule in alerts:
        notes = rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert notes["summary"] and notes["description"].endswith(".")
        assert notes["runbook"] == f"docs/operations.md#{rule['alert'].lower()}"
