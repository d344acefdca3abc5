"""Whatever goes wrong in a stream is its last event, and the generations behind it are ended."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from tandem.serve.answers import EventStream, event
from tandem.serve.engine_client import EngineClient, Job
from tandem.serve.errors import ApiError, bad_request


class Aborts:
    """An engine's client that notes which generations are to end."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def abort(self, request_ids: Any) -> None:
        self.ids += request_ids


def stream(num_events: int, error: Exception) -> tuple[list[dict[str, Any]], BaseException | None]:
    """The messages of a stream that fails after some events, and what it raised."""
    aborts, sent = Aborts(), list[dict[str, Any]]()

    async def events() -> AsyncIterator[bytes]:
        for i in range(num_events):
            yield event(i)
        raise error

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def run() -> BaseException | None:
        answer = EventStream(Job(cast(EngineClient, aborts), [4, 5]), asyncio.get_running_loop().time() + 60, events())
        return (await asyncio.gather(answer({}, receive, send), return_exceptions=True))[0]

    raised = asyncio.run(run())
    assert aborts.ids == [4, 5]
    return sent, raised


@pytest.mark.parametrize("error", [bad_request("no"), RuntimeError("a fault of ours")])
def test_what_fails_before_the_first_event_is_raised_so_that_it_gives_the_status(error: Exception) -> None:
    assert stream(0, error) == ([], error)


@pytest.mark.parametrize("num_events", [1, 3])
@pytest.mark.parametrize("error", [bad_request("no"), RuntimeError("a fault of ours")])
def test_what_fails_later_is_the_last_event_and_the_end(num_events: int, error: Exception) -> None:
    sent, raised = stream(num_events, error)
    # A fault of ours is raised all the same, for the log.
    assert raised is (None if isinstance(error, ApiError) else error)
    bodies = [message["body"] for message in sent if message["type"] == "http.response.body"]
    assert bodies[:-1] == [event(i) for i in range(num_events)]
    told = json.loads(bodies[-1].removeprefix(b"data: "))["error"]
    assert told["code"] == (None if isinstance(error, ApiError) else "internal_error")
    assert "a fault of ours" not in told["message"]
    assert [message.get("more_body", False) for message in sent[1:]] == [True] * num_events + [False]
