import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ci import run_suites

ROOT = Path(__file__).resolve().parents[3]
RUNNER = ROOT / "ci" / "run_suites.py"


def write_budget(path, suites, group_budget_s=60):
    lines = ["margin = 1.5", "hard_stop = 100.0", f"[groups.test]\nbudget_s = {group_budget_s}"]
    for name, code, budget_s in suites:
        command = f"{{python}} -c '{code}'"
        lines.append(f'[[suite]]\nname = "{name}"\ncommand = "{command}"\nbudget_s = {budget_s}\ngroups = ["test"]')
    path.write_text("\n".join(lines))
    return path


def run(budget, *options):
    command = [sys.executable, str(RUNNER), "test", "--budget", str(budget), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_all_suites_run_and_the_table_names_each_with_its_budget(tmp_path):
    done = run(write_budget(tmp_path / "b.toml", [("one", "print(11)", 30), ("two", "print(22)", 20)]))
    assert done.returncode == 0
    assert "11" in done.stdout
    table = done.stdout[done.stdout.index("verdict") :]
    assert [line.split()[0] for line in table.splitlines()[1:4]] == ["one", "two", "all"]
    assert "30  ok" in table
    assert "20  ok" in table


def test_a_failing_suite_fails_the_run_but_the_later_ones_still_run(tmp_path):
    done = run(write_budget(tmp_path / "b.toml", [("bad", "exit(3)", 30), ("good", "print(22)", 30)]))
    assert done.returncode == 1
    assert "failed: exit code 3" in done.stdout
    assert "22\n" in done.stdout


def test_a_suite_past_its_budget_and_margin_fails(tmp_path):
    done = run(write_budget(tmp_path / "b.toml", [("slow", "import time; time.sleep(0.5)", 0.25)]))
    assert done.returncode == 1
    assert "over budget" in done.stdout


def test_a_suite_past_the_hard_stop_is_ended(tmp_path):
    done = run(write_budget(tmp_path / "b.toml", [("stuck", "import time; time.sleep(600)", 0.02)]))
    assert done.returncode == 1
    assert "ended: ran past the hard stop" in done.stdout


def test_ending_the_runner_ends_the_suite_that_runs(tmp_path):
    program = tmp_path / "stuck.py"
    program.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    budget = tmp_path / "b.toml"
    budget.write_text(
        "margin = 1.5\nhard_stop = 3.0\n[groups.test]\nbudget_s = 600\n"
        f'[[suite]]\nname = "stuck"\ncommand = "{{python}} {program}"\nbudget_s = 600\ngroups = ["test"]\n'
    )
    command = [sys.executable, str(RUNNER), "test", "--budget", str(budget)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as runner:
        pid = int(next(line for line in runner.stdout if line.strip().isdecimal()))
        runner.terminate()
        assert runner.wait(timeout=30) == 128 + signal.SIGTERM
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}").exists()


def test_the_groups_own_budget_counts(tmp_path):
    budget = write_budget(tmp_path / "b.toml", [("one", "import time; time.sleep(0.3)", 30)], group_budget_s=0.1)
    done = run(budget)
    assert done.returncode == 1
    assert "over budget" in done.stdout


def test_only_runs_the_named_suite_and_refuses_an_unknown_one(tmp_path):
    budget = write_budget(tmp_path / "b.toml", [("one", "print(11)", 30), ("two", "print(22)", 30)])
    assert "22" not in run(budget, "--only", "one").stdout
    done = run(budget, "--only", "three")
    assert done.returncode == 2
    assert "three" in done.stderr


@pytest.mark.parametrize("group", ["check", "test", "soak"])
def test_the_budgets_of_each_groups_suites_fit_into_the_budget_of_the_group(group):
    suites, group_budget_s, _ = run_suites.load(ROOT / "ci" / "budget.toml", group)
    assert suites
    assert sum(suite.budget_s for suite in suites) <= group_budget_s
