import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("core", "demo", "msa", "models", "engine", "eval", "serve")


@pytest.fixture
def package(tmp_path):
    """An empty package with the project's layers, beside a copy of its contracts."""
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    for name in ("", *PACKAGES):
        folder = tmp_path / "tandem" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "__init__.py").touch()
    (tmp_path / "tandem" / "cli.py").touch()
    return tmp_path


def lint(folder):
    program = Path(sys.executable).parent / "lint-imports"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    return subprocess.run(
        [program, "--no-cache"], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_imports_along_the_direction_are_kept(package):
    (package / "tandem" / "engine" / "__init__.py").write_text("import tandem.models\nimport tandem.core\n")
    done = lint(package)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("importer", "imported"), [("msa", "models"), ("models", "engine"), ("engine", "eval"), ("eval", "cli")]
)
def test_an_import_against_the_direction_is_refused_by_name(package, importer, imported):
    (package / "tandem" / importer / "__init__.py").write_text(f"import tandem.{imported}\n")
    done = lint(package)
    assert done.returncode == 1
    assert f"tandem.{importer} is not allowed to import tandem.{imported}" in done.stdout


def test_a_package_without_a_place_in_the_order_is_refused(package):
    (package / "tandem" / "extra").mkdir()
    (package / "tandem" / "extra" / "__init__.py").touch()
    done = lint(package)
    assert done.returncode == 1
    assert "extra" in done.stdout
