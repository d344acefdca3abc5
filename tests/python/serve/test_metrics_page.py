"""docs/metrics.md lists the metrics as they are."""

import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from tests.python.serve.full_metrics import full_metrics

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text()


def test_the_page_lists_every_metric_with_its_type_labels_and_meaning() -> None:
    listed = {}
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name := re.fullmatch(r"`(tandem:\w+)`", cells[0]):
            listed[name[1]] = (cells[1], set(re.findall(r"`(\w+)`", cells[2])), cells[3])
    shown = {}
    for family in text_string_to_metric_families(full_metrics().render().decode()):
        if not family.name.endswith("_created"):
            labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "le"}
            name = f"{family.name}_total" if family.type == "counter" else family.name
            shown[name] = (family.type, labels, family.documentation)
    assert listed == shown
