import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "bootstrap" / "bootstrap.sh"


@pytest.fixture
def bare_path(tmp_path):
    """A search path with little more than a shell's helpers: no package manager, no Python, no compiler."""
    for name in ("bash", "dirname", "id"):
        (tmp_path / name).symlink_to(shutil.which(name))
    return tmp_path


def bootstrap(action, path):
    command = [str(path / "bash"), str(SCRIPT), action]
    return subprocess.run(command, env={"PATH": str(path)}, capture_output=True, text=True, check=False)


def add_program(path, name, script):
    program = path / name
    program.write_text(f"#!{path}/bash\n{script}\n")
    program.chmod(0o755)


def test_missing_test_packages_are_named_in_one_line_where_they_may_not_be_installed(bare_path):
    done = bootstrap("tests", bare_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    for package in ("libgtest-dev", "libgmock-dev", "libbenchmark-dev"):
        assert package in line


def test_a_machine_without_python_is_told_what_to_install(bare_path):
    done = bootstrap("venv", bare_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "Python 3.11+" in line
    assert "python3-venv" in line


def test_packages_that_are_there_are_left_alone(bare_path):
    add_program(bare_path, "c++", "exit 0")
    done = bootstrap("tests", bare_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_root_with_a_package_manager_installs_what_is_missing(bare_path):
    (bare_path / "id").unlink()
    add_program(bare_path, "id", "echo 0")
    add_program(bare_path, "env", 'shift; "$@"')
    add_program(bare_path, "apt-get", 'echo "apt-get $*"')
    done = bootstrap("tests", bare_path)
    assert done.returncode == 0
    assert "libgtest-dev libgmock-dev libbenchmark-dev" in done.stdout.splitlines()[-1]


def test_an_unknown_action_is_refused(bare_path):
    assert bootstrap("everything", bare_path).returncode == 2
