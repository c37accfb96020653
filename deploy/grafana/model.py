"""Grafana's dashboard JSON from few, readable values. Pure: no I/O, the same values give the same JSON.

What is written is the classic schema (`schemaVersion` 39), which Grafana 10 and later read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

COLUMNS = 24
SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Kind(StrEnum):
    """What a panel looks like, by Grafana's name."""

    LINES = "timeseries"
    NUMBER = "stat"
    STATES = "state-timeline"
    TABLE = "table"


@dataclass(frozen=True, slots=True)
class Query:
    """A PromQL expression. `legend` is a template over its labels; right: on an axis of its own."""

    expr: str
    legend: str = ""
    dashed: bool = False
    """A target or limit, drawn as such."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture.

    Attributes:
        text: what it shows and what to do about it, for somebody who was just woken.
        unit: by Grafana's name.
        steps: colour from a value on, besides green; only lines with limits and numbers have them.
        names: text for a value, with its colour.
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: Kind = Kind.LINES
    width: int = 8
    stacked: bool = False
    steps: tuple[tuple[float, str], ...] = ()
    base: str = "green"
    names: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    low: float | None = 0.0
    high: float | None = None
    decimals: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Panels of one subject, from left to right, in lines of 24 columns."""

    title: str
    panels: tuple[Panel, ...]
    height: int = 8
    collapsed: bool = False


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice at the top: the values of a label of a metric."""

    name: str
    title: str
    query: str


def dashboard(
    *,
    uid: str,
    title: str,
    text: str,
    rows: tuple[Row, ...],
    variables: tuple[Variable, ...],
    events: tuple[Query, ...],
) -> dict[str, Any]:
    """The whole dashboard.

    Args:
        events: drawn as marks over all panels, wherever the expression is above 0.
    """
    return {
        "annotations": {"list": [_BUILT_IN, *map(_event, events)]},
        "description": text,
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": list(_panels(rows)),
        "refresh": "10s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["vllm", "vllm-pd"],
        "templating": {"list": [_DATASOURCE_VARIABLE, *map(_variable, variables)]},
        "time": {"from": "now-1h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": title,
        "uid": uid,
        "version": 1,
        "weekStart": "",
    }


def _panels(rows: tuple[Row, ...]) -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in rows:
        header = {"collapsed": row.collapsed, "gridPos": _at(0, top, COLUMNS, 1), "id": number, "panels": []}
        header |= {"title": row.title, "type": "row"}
        number, top, left, inside = number + 1, top + 1, 0, []
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + row.height
            inside.append(_panel(panel, number, _at(left, top, panel.width, row.height)))
            number, left = number + 1, left + panel.width
        top += row.height
        yield header | {"panels": inside if row.collapsed else []}
        if not row.collapsed:
            yield from inside


def _at(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"h": h, "w": w, "x": x, "y": y}


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "datasource": _DATASOURCE,
        "description": panel.text,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": list(_overrides(panel))},
        "gridPos": place,
        "id": number,
        "options": _options(panel),
        "targets": [_target(panel, query, place) for place, query in enumerate(panel.queries)],
        "title": panel.title,
        "type": str(panel.kind),
    }


def _target(panel: Panel, query: Query, place: int) -> dict[str, Any]:
    target: dict[str, Any] = {"datasource": _DATASOURCE, "editorMode": "code", "expr": query.expr}
    once = panel.kind in (Kind.TABLE, Kind.NUMBER)
    target |= {"format": "table" if panel.kind is Kind.TABLE else "time_series", "instant": once, "range": not once}
    return target | {"legendFormat": query.legend or "__auto", "refId": chr(ord("A") + place)}


def _defaults(panel: Panel) -> dict[str, Any]:
    steps = [{"color": panel.base, "value": None}, *({"color": color, "value": value} for value, color in panel.steps)]
    coloured = panel.kind is not Kind.LINES
    found: dict[str, Any] = {
        "color": {"mode": "thresholds" if coloured else "palette-classic"},
        "mappings": [_mapping(panel.names)] if panel.names else [],
        "thresholds": {"mode": "absolute", "steps": steps},
        "unit": panel.unit,
    }
    if panel.kind is Kind.LINES:
        found["custom"] = {
            "drawStyle": "line",
            "fillOpacity": 40 if panel.stacked else 8,
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if panel.stacked else "none"},
        }
    for key, value in (("min", panel.low), ("max", panel.high), ("decimals", panel.decimals)):
        if value is not None and panel.kind in (Kind.LINES, Kind.NUMBER):
            found[key] = value
    return found


def _mapping(names: Mapping[int, tuple[str, str]]) -> dict[str, Any]:
    options = {
        str(value): {"color": color, "index": place, "text": text}
        for place, (value, (text, color)) in enumerate(names.items())
    }
    return {"options": options, "type": "value"}


def _overrides(panel: Panel) -> Iterator[dict[str, Any]]:
    for query in panel.queries:
        if query.dashed:
            properties = [
                {"id": "custom.lineStyle", "value": {"dash": [8, 8], "fill": "dash"}},
                {"id": "custom.fillOpacity", "value": 0},
                {"id": "custom.stacking", "value": {"group": "B", "mode": "none"}},
                {"id": "color", "value": {"fixedColor": "red", "mode": "fixed"}},
            ]
            yield {"matcher": {"id": "byName", "options": query.legend}, "properties": properties}


def _options(panel: Panel) -> dict[str, Any]:
    match panel.kind:
        case Kind.LINES:
            return {
                "legend": {
                    "calcs": ["lastNotNull", "max"],
                    "displayMode": "table",
                    "placement": "bottom",
                    "showLegend": True,
                },
                "tooltip": {"mode": "multi", "sort": "desc"},
            }
        case Kind.NUMBER:
            return {
                "colorMode": "background",
                "graphMode": "none",
                "justifyMode": "auto",
                "orientation": "auto",
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                "textMode": "value_and_name" if len(panel.queries) > 1 else "auto",
                "wideLayout": True,
            }
        case Kind.STATES:
            return {
                "alignValue": "left",
                "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
                "mergeValues": True,
                "rowHeight": 0.8,
                "showValue": "auto",
                "tooltip": {"mode": "single", "sort": "none"},
            }
        case Kind.TABLE:
            return {"cellHeight": "sm", "footer": {"show": False, "reducer": ["sum"]}, "showHeader": True}


_BUILT_IN = {
    "builtIn": 1,
    "datasource": {"type": "grafana", "uid": "-- Grafana --"},
    "enable": True,
    "hide": True,
    "iconColor": "rgba(0, 211, 255, 1)",
    "name": "Annotations & Alerts",
    "type": "dashboard",
}
_DATASOURCE_VARIABLE = {
    "current": {},
    "hide": 0,
    "includeAll": False,
    "label": "Prometheus",
    "multi": False,
    "name": "datasource",
    "options": [],
    "query": "prometheus",
    "refresh": 1,
    "regex": "",
    "skipUrlSync": False,
    "type": "datasource",
}


def _variable(variable: Variable) -> dict[str, Any]:
    return {
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "datasource": _DATASOURCE,
        "definition": variable.query,
        "hide": 0,
        "includeAll": True,
        "label": variable.title,
        "multi": True,
        "name": variable.name,
        "options": [],
        "query": {"qryType": 1, "query": variable.query, "refId": "PrometheusVariableQueryEditor-VariableQuery"},
        "refresh": 2,
        "regex": "",
        "skipUrlSync": False,
        "sort": 1,
        "type": "query",
    }


def _event(query: Query) -> dict[str, Any]:
    return {
        "datasource": _DATASOURCE,
        "enable": True,
        "expr": query.expr,
        "iconColor": "orange",
        "name": query.legend,
        "step": "15s",
        "titleFormat": query.legend,
        "useValueForTime": False,
    }
