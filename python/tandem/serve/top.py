"""`tandem top`: a live view of a server in the terminal, from the numbers that it shows at `/metrics`."""

from __future__ import annotations

import argparse
import math
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

PREFIX = "tandem:"
TIMEOUT_S = 5.0
_MAX_BYTES = 8 * 2**20
_BAR_CHARS = 40
_PAGE_STYLES = {"held": "green", "leased": "magenta", "cached": "blue", "free": "bright_black"}

Labels = tuple[tuple[str, str], ...]


class TopError(ValueError):
    """The server cannot be reached, or what answers is no server of ours."""


@dataclass(frozen=True)
class Reading:
    """All samples of one scrape; ``at`` is when, in seconds of a clock that only goes forward."""

    at: float
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str, at: float) -> Reading:
        """Reads the text format. Raises `TopError` where it is none, or has none of our names."""
        from prometheus_client.parser import text_string_to_metric_families

        try:
            samples = {
                (sample.name.removeprefix(PREFIX), tuple(sorted(sample.labels.items()))): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith(PREFIX)
            }
        except ValueError as error:
            raise TopError(f"the answer is not in Prometheus' text format: {error}") from error
        if not samples:
            raise TopError(f"the answer holds no metric whose name begins with {PREFIX}")
        return cls(at, samples)

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that bear these labels; 0 where there are none."""
        wanted = set(labels.items())
        return sum(value for (own, had), value in self.samples.items() if own == name and wanted <= set(had))

    def values(self, name: str, label: str) -> list[str]:
        """The values that a label takes in a metric, in the order of the text."""
        found = (dict(had).get(label) for own, had in self.samples if own == name)
        return list(dict.fromkeys(value for value in found if value is not None))


@dataclass(frozen=True)
class Change:
    """What happened between two readings, or since the start where there is no earlier one."""

    now: Reading
    before: Reading | None = None

    @property
    def seconds(self) -> float | None:
        """Of the interval; None where its beginning is not known."""
        return None if self.before is None else max(self.now.at - self.before.at, 1e-9)

    def count(self, name: str, **labels: str) -> float:
        """By how much a counter grew. One that fell has begun again: the server was restarted."""
        now = self.now.total(name, **labels)
        before = 0.0 if self.before is None else self.before.total(name, **labels)
        return now - before if now >= before else now

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth per second."""
        return None if self.seconds is None else self.count(name, **labels) / self.seconds

    def share(self, part: str, whole: str, **labels: str) -> float | None:
        """Growth of one counter over that of another; None where the other did not grow."""
        counted = self.count(whole, **labels)
        return self.count(part, **labels) / counted if counted > 0 else None

    def quantile(self, name: str, q: float) -> float | None:
        """A quantile of a histogram, interpolated within its bucket as PromQL's `histogram_quantile` does."""
        bounds = sorted(self.now.values(f"{name}_bucket", "le"), key=float)
        counts = [self.count(f"{name}_bucket", le=bound) for bound in bounds]
        if not counts or counts[-1] <= 0:
            return None
        rank = q * counts[-1]
        place = next(i for i, count in enumerate(counts) if count >= rank)
        low, below = (float(bounds[place - 1]), counts[place - 1]) if place else (0.0, 0.0)
        high = float(bounds[place])
        if math.isinf(high):
            return low
        return low + (high - low) * (rank - below) / max(counts[place] - below, 1e-9)


def render(change: Change, url: str, problem: str | None = None) -> RenderableType:
    """The whole view; ``problem`` says why the newest reading is old."""
    from rich.console import Group
    from rich.text import Text

    interval = "since the start" if change.seconds is None else f"over {change.seconds:.1f} s"
    parts: list[RenderableType] = [Text.assemble(("tandem top", "bold"), f"  {url}  {interval}")]
    if problem is not None:
        parts.append(Text(problem, style="bold red"))
    parts += [_alarms(change), _traffic(change), _latency(change), _pages(change), _steps(change), _speculation(change)]
    return Group(*parts)


def _alarms(change: Change) -> RenderableType:
    from rich.text import Text

    now = change.now
    raised = [r for r in now.values("acceptance_alarm", "route") if now.total("acceptance_alarm", route=r) > 0]
    failing = {route: now.total("canary_failing", route=route) for route in now.values("canary_failing", "route")}
    lines = [f"acceptance alarm on route {route}" for route in raised]
    lines += [f"canary fails on route {route}: {count:.0f} of its prompts" for route, count in failing.items() if count]
    if lines:
        return Text("\n".join(lines), style="bold white on red")
    passed = now.total("canary_runs_total") - now.total("canary_failures_total")
    compared = f", canary as expected in {passed:.0f} answers" if failing else ""
    return Text(f"no alarm{compared}", style="green")


def _traffic(change: Change) -> Table:
    now = change.now
    running, waiting = now.total("num_requests_running"), now.total("num_requests_waiting")
    ended = "  ".join(
        f"{reason} {change.count('request_success_total', finished_reason=reason):.0f}"
        for reason in now.values("request_success_total", "finished_reason")
    )
    cached = change.share("prompt_tokens_cached_total", "prompt_tokens_total")
    table = _table("requests", "tokens", "per second")
    table.add_row(
        f"running {running:.0f}  waiting {waiting:.0f}", "generated", _per_s(change, "generation_tokens_total")
    )
    table.add_row(f"ended: {ended}" if ended else "ended: none", "prompt", _per_s(change, "prompt_tokens_total"))
    table.add_row(
        f"preempted {change.count('num_preemptions_total'):.0f}  refused {change.count('requests_refused_total'):.0f}",
        "of these cached",
        _percent(cached),
    )
    return table


def _latency(change: Change) -> Table:
    table = _table("latency", "median", "95 %", "99 %")
    for label, name in (
        ("queue", "request_queue_time_seconds"),
        ("first token", "time_to_first_token_seconds"),
        ("per token", "time_per_output_token_seconds"),
        ("whole request", "e2e_request_latency_seconds"),
    ):
        table.add_row(label, *(_duration(change.quantile(name, q)) for q in (0.5, 0.95, 0.99)))
    return table


def _pages(change: Change) -> Table:
    from rich.text import Text

    counts = {state: change.now.total("kv_cache_pages", state=state) for state in _PAGE_STYLES}
    total = max(sum(counts.values()), 1)
    bar, done, drawn = Text(), 0.0, 0
    for state, style in _PAGE_STYLES.items():
        done += counts[state]
        end = round(_BAR_CHARS * done / total)
        bar.append("█" * (end - drawn), style=style)
        drawn = end
    table = _table("pages", *counts)
    table.add_row(bar, *(f"{count:.0f}" for count in counts.values()))
    return table


def _steps(change: Change) -> Table:
    parts = change.now.values("engine_step_seconds_total", "part")
    steps = change.count("engine_steps_total")
    each = [change.count("engine_step_seconds_total", part=part) / steps if steps else None for part in parts]
    table = _table("steps per second", "rows a step", *parts)
    rows = change.count("engine_step_rows_total") / steps if steps else None
    table.add_row(_per_s(change, "engine_steps_total"), _number(rows), *(_duration(seconds) for seconds in each))
    return table


def _speculation(change: Change) -> Table:
    now = change.now
    drafted = "spec_decode_num_draft_tokens_per_pos_total"
    places = [place for place in now.values(drafted, "position") if now.total(drafted, position=place) > 0]
    table = _table(
        "route", "rounds", "accepted", "mean length", *(f"draft {int(place) + 1}" for place in places), "alarm"
    )
    for route in now.values("spec_decode_num_drafts_total", "route"):
        rounds = change.count("spec_decode_num_drafts_total", route=route)
        accepted = change.count("spec_decode_num_accepted_tokens_total", route=route)
        by_place = [
            change.share("spec_decode_num_accepted_tokens_per_pos_total", drafted, route=route, position=place)
            for place in places
        ]
        table.add_row(
            route,
            f"{rounds:.0f}",
            _percent(
                change.share("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total", route=route)
            ),
            _number(1 + accepted / rounds if rounds else None),
            *(_percent(share) for share in by_place),
            _percent(now.total("acceptance_alarm_evidence", route=route)),
        )
    return table


def _table(*headings: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="left" if place == 0 else "right", no_wrap=True)
    return table


def _per_s(change: Change, name: str) -> str:
    return _number(change.rate(name))


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.2f} ms"


def read(url: str) -> Reading:
    """Scrapes a server. Raises `TopError` where that fails."""
    if not url.startswith(("http://", "https://")):
        raise TopError(f"url={url!r} is not allowed: http://HOST:PORT or https://HOST:PORT")
    address = f"{url.rstrip('/')}/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
            text = answer.read(_MAX_BYTES).decode("utf-8")
    except (urllib.error.URLError, TimeoutError, ConnectionError, UnicodeDecodeError) as error:
        raise TopError(f"{address} cannot be read: {error}") from error
    return Reading.parse(text, time.monotonic())


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `top`; it sets `run`: parsed arguments in, exit code out. Loads nothing heavy."""
    parser = subparsers.add_parser("top", help="a live view of a server", description=run.__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default %(default)s)")
    parser.add_argument(
        "--interval", type=_interval, default=1.0, help="seconds between readings (default %(default)g)"
    )
    parser.add_argument("--once", action="store_true", help="print the figures since the start, and end")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show what a server does, anew after each interval, until interrupted."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ModuleNotFoundError as error:
        raise TopError(f"tandem top needs {error.name}: pip install 'tandem-serve[serve]'") from error

    change = Change(read(arguments.url))
    console = Console()
    if arguments.once:
        console.print(render(change, arguments.url))
        return 0
    with Live(render(change, arguments.url), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        while True:
            time.sleep(arguments.interval)
            problem = None
            try:
                change = Change(read(arguments.url), change.now)
            except TopError as error:
                problem = str(error)
            live.update(render(change, arguments.url, problem), refresh=True)


def _interval(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not allowed, it must be 0.05 to 3600 seconds")
    return value
