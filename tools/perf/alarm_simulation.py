"""False alarms and delay of the acceptance alarm, by simulation.

Many servers at once, as arrays: on each route a number of prompts runs side by side and reports every `REPORT` rounds.
A prompt's acceptance rate is drawn from a beta distribution; given it, drafts are accepted one after the other with one
probability until the first that is not. `Servers` decides as `tandem.serve.alarm` does (a test compares them report
by report).

    python -m tools.perf.alarm_simulation [--servers 1000] [--rounds 1e8] [--seed 1]
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tandem.serve import alarm

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]

DRAFT_LEN = 3
REPORT = 16
_RATES = np.linspace(0.0, 1.0, 2001)


def _chance_of(rates: Floats) -> Floats:
    """The chance of one draft, given that those before it were accepted, for which the mean share is the rate."""
    low, high = np.zeros_like(rates), np.ones_like(rates)
    for _ in range(50):
        middle = (low + high) / 2
        below = sum(middle**place for place in range(1, DRAFT_LEN + 1)) / DRAFT_LEN < rates
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


_CHANCES = _chance_of(_RATES)


def accepted_shares(rng: np.random.Generator, rates: Floats, rounds: Ints) -> Floats:
    """Sums of the accepted shares of some rounds of prompts with these rates."""
    chance = np.interp(rates, _RATES, _CHANCES)
    by_count = [chance**n * (1 - chance) for n in range(DRAFT_LEN)] + [chance**DRAFT_LEN]
    drawn = rng.multinomial(rounds, np.stack(by_count, axis=-1))
    return np.asarray(drawn @ np.arange(DRAFT_LEN + 1) / DRAFT_LEN, dtype=np.float64)


@dataclass(frozen=True)
class Mix:
    """Traffic. ``prompt_rounds`` is the mean number of rounds of a prompt, whose distribution is geometric."""

    rate: float = 0.83
    prompt_sd: float = 0.03
    prompt_rounds: float = 50.0
    concurrency: int = 1

    def baseline(self) -> alarm.Baseline:
        return alarm.Baseline(self.rate, max(self.prompt_sd, alarm.MIN_SD), alarm.round_sd(self.rate, DRAFT_LEN))


@dataclass(frozen=True)
class Report:
    """Of one place of every server: the prompt's rounds before, the new ones, and whether it ends with them."""

    place: int
    before: Ints
    shares_before: Floats
    rounds: Ints
    shares: Floats
    ends: Mask


class Stream:
    """One route of many servers. ``shift`` lowers the rate of every round from now on."""

    def __init__(self, rng: np.random.Generator, mix: Mix, num_servers: int) -> None:
        self.mix = mix
        self.shift = 0.0
        self._rng = rng
        shape = (mix.concurrency, num_servers)
        self._rates = self._draw_rates(shape)
        # Prompts are met in the middle.
        self._left = np.ceil(self._draw_rounds(shape) * rng.random(shape)).astype(np.int64)
        self._rounds = np.zeros(shape, dtype=np.int64)
        self._shares = np.zeros(shape)
        self._turn = 0

    def _draw_rates(self, shape: int | tuple[int, int]) -> Floats:
        mean, sd = self.mix.rate, self.mix.prompt_sd
        if sd == 0.0:
            return np.full(shape, mean)
        size = mean * (1 - mean) / sd**2 - 1
        return self._rng.beta(mean * size, (1 - mean) * size, shape)

    def _draw_rounds(self, shape: int | tuple[int, int]) -> Ints:
        return self._rng.geometric(1 / self.mix.prompt_rounds, shape)

    def report(self) -> Report:
        """The next place's report, in turn."""
        place = self._turn % self.mix.concurrency
        self._turn += 1
        rounds = np.minimum(self._left[place], REPORT)
        shares = accepted_shares(self._rng, np.clip(self._rates[place] - self.shift, 0.0, 1.0), rounds)
        before, shares_before = self._rounds[place].copy(), self._shares[place].copy()
        ends = self._left[place] == rounds
        self._rounds[place] = np.where(ends, 0, before + rounds)
        self._shares[place] = np.where(ends, 0.0, shares_before + shares)
        self._left[place] -= rounds
        ended = int(ends.sum())
        self._rates[place][ends] = self._draw_rates(ended)
        self._left[place][ends] = self._draw_rounds(ended)
        return Report(place, before, shares_before, rounds, shares, ends)


class _Windows:
    """As `tandem.serve.alarm` keeps a window, for every server. ``_sums`` are those of the prompts that ended in it."""

    def __init__(self, concurrency: int, num_servers: int) -> None:
        self._rounds = np.zeros((concurrency, num_servers), dtype=np.int64)
        self._shares = np.zeros((concurrency, num_servers))
        self._sums = np.zeros((6, num_servers))

    def add(self, report: Report, active: Mask, baselines: "Baselines") -> None:
        rounds, shares = self._rounds[report.place], self._shares[report.place]
        rounds += np.where(active, report.rounds, 0)
        shares += np.where(active, report.shares, 0.0)
        folded = np.flatnonzero(report.ends & (rounds > 0))
        self._sums[:, folded] += _weigh(rounds[folded], shares[folded], baselines, folded)
        rounds[report.ends] = 0
        shares[report.ends] = 0.0

    def clear(self, servers: Mask) -> None:
        for kept in (self._rounds, self._shares, self._sums):
            kept[:, servers] = 0

    def mean(self, servers: Ints, baselines: "Baselines") -> tuple[Floats, Floats, Ints]:
        """(mean, its variance, prompts) of some servers."""
        still_open = _weigh(self._rounds[:, servers], self._shares[:, servers], baselines, servers)
        count, weight, weighted, squared, squared_mean, squared_square = self._sums[:, servers] + still_open.sum(1)
        safe = np.where(weight > 0, weight, 1.0)
        mean = weighted / safe
        spread = squared_square - 2 * mean * squared_mean + mean**2 * squared
        return mean, np.maximum(1 / safe, spread / safe**2), count.astype(np.int64)


def _weigh(rounds: Ints, shares: Floats, baselines: "Baselines", servers: Ints) -> Floats:
    """What each prompt adds to a window's sums, first axis 6; 0 for those without rounds."""
    some = np.maximum(rounds, 1)
    weight = 1 / (baselines.prompt_sd[servers] ** 2 + baselines.round_var[servers] / some)
    mean, square = shares / some, weight**2
    sums = np.stack([np.ones_like(mean), weight, weight * mean, square, square * mean, square * mean**2])
    return np.where(rounds > 0, sums, 0.0)


class Baselines:
    """One baseline per server, given or learned; ``known`` where there is one."""

    def __init__(self, given: alarm.Baseline | None, num_servers: int) -> None:
        self.given = given
        self.known = np.full(num_servers, given is not None)
        self.rate = np.full(num_servers, given.rate if given else 0.5)
        self.prompt_sd = np.full(num_servers, given.prompt_sd if given else 0.1)
        self.round_var = np.full(num_servers, given.round_sd**2 if given else 0.1)
        self._sums = np.zeros((5, num_servers))

    def variance(self, rounds: Ints) -> Floats:
        return np.asarray(self.prompt_sd**2 + self.round_var / rounds)

    def evidence(self, rounds: Ints, shares: Floats, sign: int = 1) -> Floats:
        some = np.maximum(rounds, 1)
        deviation = np.sqrt(self.variance(some))
        score = sign * np.clip((self.rate - shares / some) / deviation, -alarm.MAX_SCORE, alarm.MAX_SCORE)
        fall = alarm.FALL / deviation
        return np.where(rounds > 0, fall * (score - fall / 2), 0.0)

    def learn(self, cold: Report) -> None:
        """As `tandem.serve.alarm.Learner`."""
        if self.given is not None:
            return
        rounds, shares = cold.before + cold.rounds, cold.shares_before + cold.shares
        added = np.stack([np.ones_like(shares), rounds, rounds**2, shares, shares**2 / rounds])
        self._sums += np.where(cold.ends, added, 0.0)
        prompts = self._sums[0]
        due = cold.ends & (prompts % alarm.REFINE_PROMPTS == 0) & (prompts >= alarm.MIN_LEARN_PROMPTS)
        if due.any():
            self._estimate(np.flatnonzero(due))

    def _estimate(self, due: Ints) -> None:
        prompts, rounds, rounds_squared, shares, squares = self._sums[:, due]
        rate = shares / rounds
        within = np.array([alarm.round_sd(float(each), DRAFT_LEN) for each in rate])
        between = squares - rounds * rate**2 - (prompts - 1) * within**2
        prompt_var = between / (rounds - rounds_squared / rounds)
        self.rate[due] = rate
        self.prompt_sd[due] = np.clip(np.sqrt(np.maximum(prompt_var, 0.0)), alarm.MIN_SD, 0.5)
        self.round_var[due] = np.clip(within, alarm.MIN_SD, 0.5) ** 2
        self.known[due] = True

    def forget(self, servers: Mask) -> None:
        self.known[servers] = False
        self._sums[:, servers] = 0.0


class Servers:
    """Many servers with a cold route and another one.

    ``raised`` tells whose alarm is raised on the other route; a raised alarm stays until `forget_alarms`.
    """

    def __init__(self, given: alarm.Baseline | None, mix: Mix, num_servers: int) -> None:
        self.baselines = Baselines(given, num_servers)
        self.fall, self.cold_fall, self.cold_rise = (np.zeros(num_servers) for _ in range(3))
        self.raised = np.zeros(num_servers, dtype=bool)
        self.num_relearned = 0
        self._window = _Windows(mix.concurrency, num_servers)
        self._cold_window = _Windows(mix.concurrency, num_servers)

    def take(self, report: Report) -> None:
        """A report of the other route."""
        known = self.baselines.known
        self.fall = np.where(known, np.maximum(0.0, self.fall + self._step(report)), self.fall)
        self._window.add(report, known.copy(), self.baselines)
        self._decide()

    def take_cold(self, report: Report) -> None:
        """A report of the cold route."""
        known = self.baselines.known.copy()
        self._cold_window.add(report, known, self.baselines)
        self.cold_fall = np.maximum(0.0, self.cold_fall + np.where(known, self._step(report), 0.0))
        self.cold_rise = np.maximum(0.0, self.cold_rise + np.where(known, self._step(report, -1), 0.0))
        if self.baselines.given is None:
            moved = np.maximum(self.cold_fall, self.cold_rise) >= alarm.THRESHOLD
            if moved.any():
                self.num_relearned += int(moved.sum())
                self.baselines.forget(moved)
                self._begin_again(moved)
                for sums in (self.cold_fall, self.cold_rise):
                    sums[moved] = 0.0
        self.baselines.learn(report)

    def forget_alarms(self) -> None:
        self._begin_again(self.raised.copy())
        self.raised[:] = False

    def _step(self, report: Report, sign: int = 1) -> Floats:
        after = self.baselines.evidence(report.before + report.rounds, report.shares_before + report.shares, sign)
        return after - self.baselines.evidence(report.before, report.shares_before, sign)

    def _begin_again(self, servers: Mask) -> None:
        self.fall[servers] = 0.0
        self._window.clear(servers)
        self._cold_window.clear(servers)

    def _decide(self) -> None:
        crossed = np.flatnonzero((self.fall >= alarm.THRESHOLD) & ~self.raised)
        if len(crossed):
            mean, variance, prompts = self._window.mean(crossed, self.baselines)
            cold_mean, cold_variance, cold_prompts = self._cold_window.mean(crossed, self.baselines)
            evidence = alarm.FALL * (cold_mean - mean - alarm.FALL / 2) / (variance + cold_variance)
            confirmed = (prompts >= alarm.MIN_PROMPTS) & (evidence >= alarm.CONFIRM_THRESHOLD)
            alone = (prompts >= alarm.QUIET_PROMPTS) & (self.baselines.given is not None)
            self.raised[crossed] = np.where(cold_prompts < alarm.MIN_PROMPTS, alone, confirmed)
        at_zero = (self.fall == 0.0) & ~self.raised
        if at_zero.any():
            self._begin_again(at_zero)


@dataclass
class World:
    """Servers and their traffic; ``cold_share`` cold reports come with each report of the other route."""

    servers: Servers
    stream: Stream
    cold: Stream
    cold_share: int

    def run(self, num_reports: int) -> Iterator[Ints]:
        """Rounds of the other route, per server, report by report."""
        for _ in range(num_reports):
            for _ in range(self.cold_share):
                self.servers.take_cold(self.cold.report())
            report = self.stream.report()
            self.servers.take(report)
            yield report.rounds


def make_world(mix: Mix, num_servers: int, seed: int, *, learned: bool, cold_share: int = 1) -> World:
    """Servers that know their baseline, after some traffic."""
    rng = np.random.default_rng(seed)
    servers = Servers(None if learned else mix.baseline(), mix, num_servers)
    world = World(servers, Stream(rng, mix, num_servers), Stream(rng, mix, num_servers), cold_share)
    reports_per_prompt = mix.prompt_rounds / REPORT + 0.5
    settle = int(2 * mix.concurrency * reports_per_prompt)
    if learned:
        settle += int(1.3 * alarm.MIN_LEARN_PROMPTS * reports_per_prompt / cold_share)
    for _ in world.run(settle):
        pass
    servers.forget_alarms()
    return world


def false_alarms(world: World, num_rounds: float) -> tuple[int, float]:
    """(alarms, rounds of the tested route) on traffic that does not change; an alarm is cleared at once."""
    alarms, rounds = 0, 0.0
    while rounds < num_rounds:
        for reported in world.run(64):
            rounds += float(reported.sum())
            if world.servers.raised.any():
                alarms += int(world.servers.raised.sum())
                world.servers.forget_alarms()
    return alarms, rounds


def delays(world: World, fall: float, longest: int = 40_000) -> Floats:
    """Rounds of the tested route, per server, from a fall on that route until the alarm; infinite beyond `longest`."""
    world.stream.shift = fall
    passed, found = np.zeros(len(world.servers.raised)), np.full(len(world.servers.raised), np.inf)
    while passed.min() < longest and np.isinf(found).any():
        for reported in world.run(16):
            passed += reported
            found[world.servers.raised & np.isinf(found)] = passed[world.servers.raised & np.isinf(found)]
    return found


def change_of_traffic(world: World, rate: float, num_reports: int) -> float:
    """Share of servers whose alarm is raised when prompts of another rate begin to come, on both routes alike."""
    for stream in (world.stream, world.cold):
        stream.mix = Mix(rate, stream.mix.prompt_sd, stream.mix.prompt_rounds, stream.mix.concurrency)
    for _ in world.run(num_reports):
        pass
    return float(world.servers.raised.mean())


MIXES = (
    Mix(),
    Mix(prompt_sd=0.05),
    Mix(prompt_sd=0.1),
    Mix(prompt_rounds=25),
    Mix(prompt_rounds=100),
    Mix(prompt_rounds=400),
    Mix(concurrency=16),
    Mix(prompt_sd=0.05, concurrency=16),
    Mix(prompt_rounds=400, concurrency=16),
    Mix(rate=0.57, prompt_sd=0.05),
)


def row(mix: Mix, *, learned: bool, num_servers: int, num_rounds: float, seed: int) -> str:
    """One line of the table."""
    quiet = make_world(mix, num_servers, seed, learned=learned)
    alarms, rounds = false_alarms(quiet, num_rounds)
    cells = [f"{mix.rate:.2f}", f"{mix.prompt_sd:.2f}", f"{mix.prompt_rounds:.0f}", f"{mix.concurrency}"]
    cells += ["learned" if learned else "given", f"{alarms} in {rounds / 1e6:.0f} M"]
    for number, fall in enumerate((0.05, 0.2), start=1):
        found = delays(make_world(mix, num_servers, seed + number, learned=learned), fall)
        median, late = np.percentile(found, [50, 95], method="higher")
        cells.append(f"{median:,.0f} / {late:,.0f}" if np.isfinite(late) else f"{median:,.0f} / over 40,000")
    other = 0.57 if mix.rate > 0.7 else 0.83
    world = make_world(mix, num_servers, seed + 3, learned=learned)
    cells.append(f"{change_of_traffic(world, other, 1000 + 125 * mix.concurrency):.1%}")
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1000, help="servers simulated at once (default %(default)s)")
    parser.add_argument("--rounds", type=float, default=1e8, help="rounds for false alarms (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(
        "| rate | between prompts | rounds a prompt | side by side | baseline | false alarms "
        "| fall of 0.05 found after, median / 95 % | fall of 0.20 | change of traffic taken for a fault |"
    )
    print("|" + " --- |" * 9)
    for mix in MIXES:
        for learned in (False, True):
            line = row(
                mix,
                learned=learned,
                num_servers=arguments.servers,
                num_rounds=arguments.rounds,
                seed=arguments.seed,
            )
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
