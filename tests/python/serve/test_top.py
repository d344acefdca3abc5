"""`tandem top`: what it computes from two readings, what it shows, and that it reads names that exist."""

import http.server
import threading
from collections.abc import Iterator

import pytest
from rich.console import Console

from tandem import cli
from tandem.serve.metrics_snapshot import COLD, PREFIX_HIT, AlarmState, Rounds
from tandem.serve.top import Change, Reading, TopError, render
from tests.python.serve.full_metrics import full_metrics


def reading(at: float = 0.0, text: bytes | None = None, **changes: object) -> Reading:
    return Reading.parse((text or full_metrics(**changes).render()).decode(), at)


def shown(change: Change, problem: str | None = None) -> str:
    console = Console(width=120, record=True, file=None, color_system=None)
    with console.capture() as capture:
        console.print(render(change, "http://there", problem))
    return capture.get()


def row(text: str, first: str) -> list[str]:
    """The cells of the line that begins with this one."""
    lines = [line.split() for line in text.splitlines() if line.strip().startswith(first)]
    assert len(lines) == 1
    return lines[0]


def test_figures_are_those_of_the_interval_between_two_readings() -> None:
    before = reading(10.0)
    rounds = {
        COLD: Rounds(num_rounds=20, drafted=[20, 19, 18], accepted=[16, 12, 8]),
        PREFIX_HIT: Rounds(num_rounds=2, drafted=[2, 2, 2], accepted=[2, 1, 0]),
    }
    now = reading(
        12.0, generated_tokens=277, prompt_tokens=1200, cached_tokens=306, steps=54, rounds=rounds,
        step_seconds={"plan": 0.254, "model": 2.52}, finished={"stop": 5, "abort": 1},
    )  # fmt: skip
    text = shown(Change(now, before))
    assert "over 2.0 s" in text
    assert "100" in row(text, "running")[-1]
    assert row(text, "ended:")[-2:] == ["prompt", "100"]
    assert "stop 2  abort 0" in text
    assert row(text, "preempted")[-1] == "25.0%"
    assert row(text, COLD) == [COLD, "10", "60.0%", "2.80", "80.0%", "60.0%", "40.0%", "10.0%"]
    assert row(text, PREFIX_HIT) == [PREFIX_HIT, "0", "-", "-", "-", "-", "-", "150.0%"]
    assert "1.00 ms" in text
    assert "5.00 ms" in text


def test_a_single_reading_shows_figures_since_the_start_and_no_rates() -> None:
    text = shown(Change(reading()))
    assert "since the start" in text
    assert row(text, "running") == ["running", "3", "waiting", "2", "generated", "-"]
    assert row(text, COLD)[1:3] == ["10", "66.7%"]
    assert row(text, "first")[-6:] == ["375.00", "ms", "487.50", "ms", "497.50", "ms"]


def test_places_at_which_nothing_was_drafted_have_no_column() -> None:
    rounds = {COLD: Rounds(num_rounds=9, drafted=[9, 8, 0, 0], accepted=[6, 4, 0, 0])}
    text = shown(Change(reading(rounds=rounds)))
    assert "draft 2" in text
    assert "draft 3" not in text


def test_an_alarm_a_failed_canary_and_a_lost_server_are_written_large() -> None:
    quiet = {COLD: AlarmState(raised=False, evidence=0.1, num_raised=3)}
    metrics = full_metrics(alarms=quiet)
    before = reading(text=metrics.render())
    assert "no alarm, canary as expected in 1 answers" in shown(Change(before))
    metrics.count_canary(COLD, failed=True)
    metrics.show_failing_canaries({COLD: 1})
    for change in (Change(reading(1.0, metrics.render()), before), Change(reading(1.0, metrics.render()))):
        assert "canary fails on route cold: 1 of its prompts" in shown(change)
    metrics.show_failing_canaries({COLD: 0})
    assert "no alarm, canary as expected in 1 answers" in shown(Change(reading(2.0, metrics.render())))
    text = shown(Change(reading()), problem="http://there/metrics cannot be read")
    assert "acceptance alarm on route prefix_hit" in text
    assert "alarm on route cold" not in text
    assert "cannot be read" in text


def test_pages_fill_the_bar_in_their_proportion() -> None:
    line = next(line for line in shown(Change(reading())).splitlines() if "█" in line)
    assert line.count("█") == 40
    assert line.split()[-4:] == ["20", "5", "5", "10"]


def test_a_counter_that_fell_has_begun_again() -> None:
    change = Change(reading(1.0, generated_tokens=5), reading(0.0))
    assert change.count("generation_tokens_total") == 5


def test_quantiles_lie_in_the_bucket_of_their_rank() -> None:
    metrics = full_metrics()
    name = "time_to_first_token_seconds"
    assert Change(reading(text=metrics.render())).quantile(name, 0.5) == pytest.approx(0.375)
    assert Change(reading(text=metrics.render()), reading(text=metrics.render())).quantile(name, 0.5) is None
    assert Change(reading(text=metrics.render())).quantile("no_such_seconds", 0.5) is None


def test_every_name_that_is_read_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    used = set[str]()
    total, values = Reading.total, Reading.values

    def recording_total(self: Reading, name: str, **labels: str) -> float:
        used.add(name)
        return total(self, name, **labels)

    def recording_values(self: Reading, name: str, label: str) -> list[str]:
        used.add(name)
        return values(self, name, label)

    monkeypatch.setattr(Reading, "total", recording_total)
    monkeypatch.setattr(Reading, "values", recording_values)
    shown(Change(reading(1.0, steps=60), reading(0.0)))
    exist = {name for name, _ in reading().samples}
    assert len(used) > 20
    assert used <= exist


@pytest.fixture
def server() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A web server with the given pages; its address."""
    pages = {"/metrics": full_metrics().render()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = pages.get(self.path)
            self.send_response(404 if body is None else 200)
            self.end_headers()
            self.wfile.write(body or b"")

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}", pages
        running.shutdown()
        thread.join()


def test_the_command_shows_a_server_once(
    server: tuple[str, dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, _ = server
    assert cli.main(["top", "--url", url, "--once"]) == 0
    out = capsys.readouterr().out
    assert url in out
    assert "prefix_hit" in out


@pytest.mark.parametrize(
    ("page", "path", "message"),
    [
        (b"hello", "", "Prometheus' text format"),
        (b"# EOF\n", "", "begins with tandem:"),
        (None, "", "HTTP Error 404"),
        (b"\xff", "", "cannot be read"),
    ],
)
def test_what_is_no_server_of_ours_is_one_line(
    server: tuple[str, dict[str, bytes]],
    capsys: pytest.CaptureFixture[str],
    page: bytes | None,
    path: str,
    message: str,
) -> None:
    url, pages = server
    del pages["/metrics"]
    if page is not None:
        pages["/metrics"] = page
    assert cli.main(["top", "--url", url + path, "--once"]) == cli.EXIT_MISTAKE
    assert message in capsys.readouterr().err


def test_a_wrong_address_or_interval_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--url", "localhost:1", "--once"]) == cli.EXIT_MISTAKE
    assert "url='localhost:1' is not allowed" in capsys.readouterr().err
    assert cli.main(["top", "--url", "http://127.0.0.1:1", "--once"]) == cli.EXIT_MISTAKE
    assert "127.0.0.1:1/metrics cannot be read" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["top", "--interval", "0"])
    assert "0.05 to 3600" in capsys.readouterr().err
    with pytest.raises(TopError, match="text format"):
        Reading.parse("a b c d\n", 0.0)
