import zipfile
from pathlib import Path

import pytest

from ci import check_wheel
from tools import stubs

EXTENSION = "tandem/core/_core.cpython-311-x86_64-linux-gnu.so"
ROOT = Path(__file__).resolve().parents[3]


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


GOOD = {EXTENSION: b"\x7fELF", "tandem/__init__.py": b"", "tandem_serve-0.1.0.dist-info/METADATA": b""}


def test_a_whole_wheel_has_no_faults(tmp_path):
    assert check_wheel.faults_of_contents(wheel(tmp_path / "a.whl", GOOD), ["tandem/__init__.py"]) == []


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({EXTENSION: None}, "not the one"),
        ({"tandem/core/_core.cpython-39-stale.so": b"\x7fELF"}, "not the one"),
        ({EXTENSION: check_wheel.STALE}, "stale"),
        ({"tandem/__init__.py": None}, "tandem/__init__.py is missing"),
        ({"tests/conftest.py": b""}, "tests does not belong"),
        ({"tandem/demo/model.safetensors": bytes(check_wheel.MAX_DEMO_BYTES + 1)}, "demo model takes"),
    ],
)
def test_what_a_wheel_lacks_or_has_too_much_is_named(tmp_path, change, word):
    files = {name: data for name, data in (GOOD | change).items() if data is not None}
    (fault,) = check_wheel.faults_of_contents(wheel(tmp_path / "a.whl", files), ["tandem/__init__.py"])
    assert word in fault


def test_stale_stubs_show_what_would_change():
    committed = {"kv.pyi": "def a(): ...\n", "old.pyi": "x: int\n"}
    fresh = {"kv.pyi": "def b(): ...\n", "new.pyi": "y: int\n"}
    found = stubs.differences(committed, fresh)
    assert [line for line in found if line.startswith(("+d", "-d", "+y", "-x"))] == [
        "-def a(): ...",
        "+def b(): ...",
        "+y: int",
        "-x: int",
    ]
    assert stubs.differences(fresh, fresh) == []


def test_every_pin_gives_one_exact_version():
    lines = [line.split("#")[0].strip() for line in (ROOT / "ci" / "constraints.txt").read_text().splitlines()]
    pins = [line for line in lines if line]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len({pin.split("==")[0] for pin in pins}) == len(pins)
