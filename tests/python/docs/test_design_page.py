import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "design.md").read_text()
INVARIANTS = PAGE[PAGE.index("## Invariants") :]


def rows():
    """(invariant, tests) of each row of the invariants' table."""
    cells = [line.strip("|").split("|") for line in INVARIANTS.splitlines() if line.startswith("|")]
    return [(row[0].strip(), re.findall(r"`([^`]+)`", row[1])) for row in cells[2:]]


def test_every_invariant_names_at_least_one_test():
    assert len(rows()) >= 10
    assert [invariant for invariant, tests in rows() if not tests] == []


@pytest.mark.parametrize("name", sorted({name for _, tests in rows() for name in tests}))
def test_a_test_file_that_the_page_names_exists(name):
    assert (ROOT / name).is_file()


@pytest.mark.parametrize("document", ["docs/design.md", "README.md", "CONTRIBUTING.md"])
def test_the_paths_that_a_document_names_exist(document):
    text = (ROOT / document).read_text()
    top = r"(?:cpp|ci|docs|python|tests|tools)"
    paths = set(re.findall(rf"`({top}/[\w./-]+)`", text))
    assert paths
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []
