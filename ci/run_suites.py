"""Runs the suites of one group of ci/budget.toml and prints what each took beside its budget.

All suites run even after one failed, so that one run shows every fault. Standard library only.
"""

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Suite:
    """One command and its limits, in seconds of wall time."""

    name: str
    command: tuple[str, ...]
    budget_s: float
    fails_after_s: float
    ended_after_s: float


@dataclass(frozen=True)
class Outcome:
    """What one suite did; `verdict` is "ok", or says why the suite counts as failed."""

    suite: Suite
    seconds: float
    verdict: str


def load(path: Path, group: str) -> tuple[list[Suite], float, float]:
    """The suites of `group`, the budget of the whole group, and the margin on it; KeyError for an unknown group."""
    table = tomllib.loads(path.read_text())
    margin, hard_stop = float(table["margin"]), float(table["hard_stop"])
    group_budget_s = float(table["groups"][group]["budget_s"])
    suites = []
    for entry in table["suite"]:
        unknown = set(entry["groups"]) - set(table["groups"])
        if unknown:
            raise KeyError(f"suite {entry['name']!r} names groups that do not exist: {sorted(unknown)}")
        if group in entry["groups"]:
            command = tuple(sys.executable if word == "{python}" else word for word in shlex.split(entry["command"]))
            budget_s = float(entry["budget_s"])
            suites.append(Suite(entry["name"], command, budget_s, budget_s * margin, budget_s * hard_stop))
    return suites, group_budget_s, margin


def run(suite: Suite) -> Outcome:
    """Runs the suite with its output on ours; its whole process group is ended past the hard stop."""
    print(f"\n=== {suite.name}: {shlex.join(suite.command)}", flush=True)
    start = time.monotonic()
    process = subprocess.Popen(suite.command, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        code = process.wait(timeout=suite.ended_after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return Outcome(suite, time.monotonic() - start, "ended: ran past the hard stop")
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    seconds = time.monotonic() - start
    if code != 0:
        return Outcome(suite, seconds, f"failed: exit code {code}")
    if seconds > suite.fails_after_s:
        return Outcome(suite, seconds, f"over budget: more than {suite.fails_after_s:.0f} s")
    return Outcome(suite, seconds, "ok")


def report(outcomes: list[Outcome], group_budget_s: float, margin: float) -> tuple[str, bool]:
    """The closing table, and whether everything was right, the group's own budget included."""
    total = sum(outcome.seconds for outcome in outcomes)
    width = max(len("suite"), *(len(outcome.suite.name) for outcome in outcomes))
    lines = [f"{'suite':<{width}}  {'took s':>8}  {'budget s':>8}  verdict"]
    lines += [f"{o.suite.name:<{width}}  {o.seconds:8.1f}  {o.suite.budget_s:8.0f}  {o.verdict}" for o in outcomes]
    in_time = total <= group_budget_s * margin
    verdict = "ok" if in_time else f"over budget: more than {group_budget_s * margin:.0f} s"
    lines.append(f"{'all':<{width}}  {total:8.1f}  {group_budget_s:8.0f}  {verdict}")
    return "\n".join(lines), in_time and all(outcome.verdict == "ok" for outcome in outcomes)


def main() -> int:
    """Exit code 0 when every suite passed inside its budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("group")
    parser.add_argument("--budget", type=Path, default=ROOT / "ci" / "budget.toml")
    parser.add_argument("--only", action="append", default=[], metavar="SUITE", help="run just this suite; repeatable")
    arguments = parser.parse_args()
    # Being asked to stop must end the running suite too, which a process that just dies would leave behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    suites, group_budget_s, margin = load(arguments.budget, arguments.group)
    unknown = set(arguments.only) - {suite.name for suite in suites}
    if unknown:
        parser.error(f"no suite {sorted(unknown)} in group {arguments.group!r}: {[suite.name for suite in suites]}")
    chosen = [suite for suite in suites if not arguments.only or suite.name in arguments.only]
    outcomes = [run(suite) for suite in chosen]
    table, right = report(outcomes, group_budget_s, margin)
    print(f"\n{table}\n(a suite may take {margin} times its budget before it fails)", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
