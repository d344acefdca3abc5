"""The scheduler's steady decode step beside a plain Python version of the same work.

Both plan one step of R decode rows behind a step in flight and take the result of that one: look-ahead pages, the
plan's columns, token histories, the length limit, full pages into a prefix index, one event per row. The arms run in
turns, A B C C B A: the plain version, the extension called from Python with all columns of the plan read, and, if its
path is given, the C++ loop of `sched_bench`. Times are processor times of the thread.

    python -m tools.perf.sched_baseline [--rows 256] [--bench build/release/cpp/bench/sched_bench]
"""

import argparse
import json
import random
import statistics
import subprocess
import time
from dataclasses import dataclass, field

import numpy as np

from tandem.core import sched

PAGE = 128
DRAFTS = 3
MAX_LENGTH = 16384
PROMPT = 400
REACH = max(DRAFTS + 1, 2 * DRAFTS)
NUM_RESULTS = 64
COLUMNS = ("seq_id", "epoch", "seat", "kind", "first_index", "query_len", "write_from", "num_drafts", "max_length")


@dataclass
class Round:
    """One step's result, as lists and as arrays."""

    num_tokens: list[int]
    num_accepted: list[int]
    tokens: list[int]
    finish: list[int]
    arrays: tuple[np.ndarray, ...] = ()

    def __post_init__(self) -> None:
        self.arrays = tuple(
            np.array(values, dtype=np.int32)
            for values in (self.num_tokens, self.num_accepted, self.tokens, self.finish)
        )


def rounds(num_rows: int, seed: int = 7) -> list[Round]:
    rng = random.Random(seed)
    out = []
    for _ in range(NUM_RESULTS):
        accepted = [rng.randint(0, DRAFTS) for _ in range(num_rows)]
        tokens = [rng.randrange(200000) for _ in range(sum(accepted) + num_rows)]
        out.append(Round([a + 1 for a in accepted], accepted, tokens, [0] * num_rows))
    return out


@dataclass(slots=True)
class Sequence:
    """What the plain version keeps of a request."""

    seq_id: int
    seat: int
    tokens: list[int]
    pages: list[int]
    max_length: int = MAX_LENGTH
    epoch: int = 0
    valid: int = PROMPT
    planned: int = PROMPT
    listed: int = 0
    in_flight: int = 0
    parent: int = 0
    committed: int = 0


@dataclass(slots=True)
class PlainPlan:
    """The columns of a step, as lists."""

    rows: list[Sequence] = field(default_factory=list)
    columns: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    table_changes: list[tuple[int, int, int]] = field(default_factory=list)


class PlainScheduler:
    """Decode rows only, without the cases that the benchmark never meets: no admission, preemption, turns or aborts."""

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.free = list(range(num_slots))
        self.index: dict[tuple[int, int], int] = {}
        self.running = [
            Sequence(i, i, list(range(i, i + PROMPT + 1)), [self.free.pop() for _ in range(PROMPT // PAGE + 1)])
            for i in range(num_rows)
        ]
        self.in_flight: list[PlainPlan] = []

    def plan(self) -> PlainPlan:
        plan = PlainPlan()
        columns = plan.columns
        for s in self.running:
            if len(s.tokens) + s.in_flight >= s.max_length:
                continue
            needed = min(s.planned + REACH + 1, s.max_length)
            while len(s.pages) * PAGE < needed:
                s.pages.append(self.free.pop())
            for page in range(s.listed, len(s.pages)):
                plan.table_changes.append((s.seat, page, s.pages[page]))
            s.listed = len(s.pages)
            columns["seq_id"].append(s.seq_id)
            columns["epoch"].append(s.epoch)
            columns["seat"].append(s.seat)
            columns["kind"].append(1)
            columns["first_index"].append(min(s.planned, s.max_length))
            columns["query_len"].append(1 + DRAFTS)
            columns["write_from"].append(s.valid)
            columns["num_drafts"].append(DRAFTS)
            columns["max_length"].append(s.max_length)
            plan.rows.append(s)
            s.planned += 1 + DRAFTS
            s.in_flight += 1
        self.in_flight.append(plan)
        return plan

    def complete(self, result: Round) -> list[tuple[int, int, int]]:
        plan = self.in_flight.pop(0)
        if len(result.num_tokens) != len(plan.rows) or sum(result.num_tokens) != len(result.tokens):
            raise ValueError("the result does not fit the step")
        events = []
        at = 0
        for i, s in enumerate(plan.rows):
            num_tokens, accepted = result.num_tokens[i], result.num_accepted[i]
            if plan.columns["epoch"][i] != s.epoch:
                at += num_tokens
                continue
            if not (0 <= accepted <= DRAFTS and num_tokens == accepted + 1):
                raise ValueError("a row that the step cannot have produced")
            kept = min(num_tokens, s.max_length - len(s.tokens))
            s.tokens.extend(result.tokens[at : at + kept])
            at += num_tokens
            s.in_flight -= 1
            s.valid += 1 + min(accepted, kept)
            s.planned += kept - (1 + DRAFTS)
            while (s.committed + 1) * PAGE <= s.valid:
                key = (s.parent, hash(tuple(s.tokens[s.committed * PAGE : (s.committed + 1) * PAGE])))
                s.parent = self.index.setdefault(key, s.pages[s.committed])
                s.committed += 1
            events.append((s.seq_id, kept, result.finish[i]))
        return events


class PlainArm:
    name = "plain Python"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.restart()

    def restart(self) -> None:
        self.scheduler = PlainScheduler(self.num_rows, self.num_rows * (MAX_LENGTH // PAGE))
        self.scheduler.plan()

    def step(self, result: Round) -> None:
        self.scheduler.plan()
        self.scheduler.complete(result)

    def known_length(self) -> int:
        return len(self.scheduler.running[0].tokens)


class CoreArm:
    name = "extension, from Python"

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.restart()

    def restart(self) -> None:
        self.scheduler = sched.Scheduler(
            sched.SchedulerConfig(
                num_slots=self.num_rows * (MAX_LENGTH // PAGE) + 64,
                tokens_per_page=PAGE,
                max_seats=self.num_rows,
                max_tokens_per_step=self.num_rows * PROMPT,
                max_model_len=MAX_LENGTH,
                draft_len=DRAFTS,
                has_drafter=True,
            )
        )
        for i in range(self.num_rows):
            prompt = np.arange(i, i + PROMPT, dtype=np.int32)
            self.scheduler.submit(sched.RequestSpec(prompt, max_tokens=MAX_LENGTH))
        one, none = np.ones(self.num_rows, dtype=np.int32), np.zeros(self.num_rows, dtype=np.int32)
        self.scheduler.plan()
        self.scheduler.complete(sched.StepResult(0, one, none, one, none))
        self.oldest = 1
        self.scheduler.plan()

    def step(self, result: Round) -> None:
        plan = self.scheduler.plan()
        for name in (*COLUMNS, "samples", "fresh", "token_offsets", "token_ids", "table_changes"):
            getattr(plan, name)
        events = self.scheduler.complete(sched.StepResult(self.oldest, *result.arrays))
        self.oldest += 1
        events.num_tokens, events.finish, events.terminals  # noqa: B018

    def known_length(self) -> int:
        return len(self.scheduler.known_tokens(0))


def measure(arm: PlainArm | CoreArm, results: list[Round], num_steps: int) -> list[float]:
    """Processor seconds of each step; the token count of the first sequence is checked at the end."""
    times = []
    arm.restart()
    expected = PROMPT + 1
    for i in range(num_steps):
        result = results[i % NUM_RESULTS]
        start = time.thread_time()
        arm.step(result)
        times.append(time.thread_time() - start)
        expected += result.num_tokens[0]
    if arm.known_length() != expected:
        raise AssertionError(f"{arm.name}: {arm.known_length()} tokens, expected {expected}")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1500, help="timed steps of each arm and block")
    parser.add_argument("--bench", help="path of sched_bench")
    args = parser.parse_args()

    results = rounds(args.rows)
    arms = (PlainArm(args.rows), CoreArm(args.rows))
    times: dict[str, list[float]] = {arm.name: [] for arm in arms}
    native: list[dict[str, float]] = []

    def run_bench() -> None:
        if args.bench:
            name = f"BM_PlanAndComplete/rows:{args.rows}/drafts:{DRAFTS}/overlap:1/mib_between:0/"
            command = [args.bench, f"--benchmark_filter={name}", "--benchmark_format=json", "--benchmark_min_time=0.3"]
            out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            native.append(json.loads(out)["benchmarks"][0])

    for order in (arms, arms[::-1]):
        if order is not arms:
            run_bench()
        for arm in order:
            times[arm.name] += measure(arm, results, args.steps)
        if order is arms:
            run_bench()

    plain = statistics.median(times["plain Python"])
    for name, values in times.items():
        values.sort()
        p50, p99 = statistics.median(values), values[int(0.99 * len(values))]
        print(f"{name:24s} p50 {p50 * 1e6:8.1f} us  p99 {p99 * 1e6:8.1f} us  {plain / p50:6.1f}x")
    for bench in native:
        print(
            f"{'C++':24s} p50 {bench['p50_us']:8.1f} us  p99 {bench['p99_us']:8.1f} us  "
            f"{plain * 1e6 / bench['p50_us']:6.1f}x"
        )


if __name__ == "__main__":
    main()
