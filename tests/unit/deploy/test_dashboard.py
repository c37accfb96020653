"""The dashboard is what its source says, and what Grafana takes. Its queries run in tests/e2e/test_dashboard.py."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana import build
from deploy.grafana.model import COLUMNS
from scripts.prometheus import Programs

UNITS = {"short", "s", "bytes", "Bps", "ops", "cps", "reqps", "percentunit"}
"""Of those that Grafana knows."""

pytestmark = pytest.mark.timeout(1500)


def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows and what is in them, also in those that are folded."""
    return [each for panel in dashboard["panels"] for each in (panel, *panel.get("panels", []))]


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return dict(json.loads(build.FILE.read_text()))


@pytest.fixture(scope="module")
def shown(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in panels(dashboard) if panel["type"] != "row"]


def test_the_file_is_made_from_its_source() -> None:
    assert build.main(["--check"]) == 0, "run python -m deploy.grafana.build"


def test_ids_are_unique_and_the_dashboard_has_a_fixed_address(dashboard: dict[str, Any]) -> None:
    assert [n for n, count in Counter(panel["id"] for panel in panels(dashboard)).items() if count > 1] == []
    assert dashboard["uid"] == "vllm-pd"
    assert dashboard["id"] is None, "an id of one Grafana would overwrite another one's dashboard"


def test_no_panel_covers_another_or_leaves_the_grid(dashboard: dict[str, Any]) -> None:
    places = [(panel["title"], panel["gridPos"]) for panel in dashboard["panels"]]
    for title, at in places:
        assert at["x"] >= 0 and at["w"] > 0 and at["h"] > 0 and at["x"] + at["w"] <= COLUMNS, title
    for (one, a), (other, b) in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, f"{one} and {other}"


def test_every_panel_says_what_it_shows_in_which_unit_and_from_the_chosen_datasource(
    shown: list[dict[str, Any]],
) -> None:
    for panel in shown:
        assert panel["title"] and panel["description"].endswith((".", "?")), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        for holder in (panel, *panel["targets"]):
            assert holder["datasource"] == {"type": "prometheus", "uid": "${datasource}"}, panel["title"]
    assert [t for t, count in Counter(panel["title"] for panel in shown).items() if count > 1] == []


def test_every_query_of_several_lines_has_a_legend(shown: list[dict[str, Any]]) -> None:
    for panel in shown:
        targets = panel["targets"]
        assert targets and len({target["refId"] for target in targets}) == len(targets)
        if panel["type"] in ("timeseries", "state-timeline") and (len(targets) > 1 or " by (" in targets[0]["expr"]):
            legends = [target["legendFormat"] for target in targets]
            assert "__auto" not in legends and len(set(legends)) == len(legends), panel["title"]


def test_variables_that_queries_use_are_those_that_can_be_chosen(dashboard: dict[str, Any]) -> None:
    names = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert names == {"datasource", "pool", "worker"}
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            used = set(target["expr"].split("$")[1:])
            assert all(word.startswith(("pool", "worker", "__rate_interval")) for word in used), target["expr"]


def expressions(dashboard: dict[str, Any]) -> Iterator[str]:
    for panel in panels(dashboard):
        for target in panel.get("targets", []):
            yield target["expr"].replace("$__rate_interval", "1m")
    for event in dashboard["annotations"]["list"]:
        if "expr" in event:
            yield event["expr"]


def test_prometheus_can_read_every_query(dashboard: dict[str, Any], programs: Programs, tmp_path: Path) -> None:
    rules = [{"record": f"q{n}", "expr": expr} for n, expr in enumerate(dict.fromkeys(expressions(dashboard)))]
    file = tmp_path / "queries.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(
        [str(programs.promtool), "check", "rules", str(file)], capture_output=True, text=True, timeout=1200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
