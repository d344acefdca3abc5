"""The Grafana dashboard: every name and label that it asks for exists, and every panel has a place of its own."""

import itertools
import json
import re
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tandem.serve.metrics import ENGINE_METRICS, PREFIX
from tests.python.serve.full_metrics import full_metrics

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs" / "grafana.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]


def expressions() -> list[str]:
    return [target["expr"] for panel in PANELS for target in panel.get("targets", [])]


def labels_of_samples() -> dict[str, set[str]]:
    families = text_string_to_metric_families(full_metrics().render().decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_name_and_label_that_the_dashboard_uses_exists() -> None:
    exist = labels_of_samples()
    assert len(expressions()) > 30
    for expression in expressions():
        names = re.findall(rf"{PREFIX}\w+", expression)
        assert names
        for name in names:
            assert name in exist, f"{name} of {expression}"
        assert set(re.findall(r'(\w+)=~?"', expression)) == {"model_name"}
        groups = re.findall(rf"by \(([^)]*)\) \((?:\w+\()?({PREFIX}\w+)", expression)
        assert len(groups) == expression.count("by (")
        for labels, name in groups:
            assert set(labels.split(", ")) <= exist[name]


def test_every_legend_names_a_label_that_its_expression_keeps() -> None:
    for panel in PANELS:
        for target in panel.get("targets", []):
            kept = {label for found in re.findall(r"by \(([^)]*)\)", target["expr"]) for label in found.split(", ")}
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) == kept - {"le"}


def test_every_metric_of_the_engine_is_on_the_dashboard() -> None:
    used = " ".join(expressions())
    missing = [metric.name for metric in ENGINE_METRICS if not re.search(rf"{PREFIX}{metric.name}(_total)?\b", used)]
    assert missing == []


def test_panels_have_numbers_of_their_own_and_do_not_overlap() -> None:
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    for one, other in itertools.combinations((panel["gridPos"] for panel in PANELS), 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in PANELS)


def test_brackets_are_balanced() -> None:
    for expression in expressions():
        assert all(expression.count(left) == expression.count(right) for left, right in ("()", "{}", "[]"))
