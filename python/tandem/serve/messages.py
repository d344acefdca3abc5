"""What the two processes say to each other, and how it is written: msgpack, one message a frame."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tandem.engine.grammar import Grammar
from tandem.engine.outputs import FinishReason
from tandem.engine.params import SamplingParams
from tandem.serve.metrics_snapshot import Snapshot
from tandem.serve.steps import Window

# One token with its log-probability, and those of the most likely ids: (id, logprob, ((id, logprob), ...)).
LogprobEntry = tuple[int, float, tuple[tuple[int, float], ...]]


StepsWanted = Literal["none", "read", "drain"]


class _Message(msgspec.Struct, tag=True, array_like=True):
    pass


# To the engine.


class Submit(_Message):
    """Run a request. ``params`` are keyword arguments of `SamplingParams`, read by `params_of`.

    A ``canary`` is no traffic: the acceptance alarm is not told of it, and its end has its tokens.
    """

    request_id: int
    prompt_ids: list[int]
    params: dict[str, Any]
    stream: bool
    canary: bool = False


class Abort(_Message):
    """End a request soon; it still gets its end."""

    request_id: int


class Stop(_Message):
    """End the process."""


class GetStats(_Message):
    """Ask for a `StatsReply` with the same number; ``drain`` forgets the records of steps that it gives."""

    call_id: int
    steps: StepsWanted = "none"


# From the engine.


class Ready(_Message):
    """The engine is built."""

    vocab_size: int
    max_prompt_tokens: int
    max_model_len: int
    tokens_per_page: int
    load_seconds: float


class Failed(_Message):
    """The engine cannot be built. ``mistake``: what was given is at fault, not the program."""

    text: str
    mistake: bool


class End(msgspec.Struct, array_like=True):
    """The end of a request; seconds count from its submission to the engine.

    ``refused`` says that nothing ran because the request cannot be served; ``error`` is the reason then, and ``param``
    the parameter at fault. ``num_rounds``, ``num_drafted`` and ``num_accepted`` are what became of drafts;
    ``token_ids`` what was generated, where a canary asked.
    """

    finish_reason: FinishReason
    cached_tokens: int
    stop_reason: str | int | None = None
    error: str | None = None
    refused: bool = False
    param: str | None = None
    num_preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    total_s: float = 0.0
    prompt_logprobs: list[LogprobEntry | None] | None = None
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    token_ids: list[int] | None = None


class Piece(msgspec.Struct, array_like=True):
    """What a request gained since the last one."""

    request_id: int
    text: str
    num_tokens: int
    logprobs: list[LogprobEntry] | None = None
    end: End | None = None

    def append(self, later: Piece) -> None:
        """Take in what the same request gained afterwards."""
        self.text += later.text
        self.num_tokens += later.num_tokens
        if later.logprobs is not None:
            self.logprobs = (self.logprobs or []) + later.logprobs
        self.end = later.end


class Pieces(_Message):
    """At most one piece per request."""

    pieces: list[Piece]


class Beat(_Message):
    """A sign of life, several times a second. ``num_steps`` is the engine's progress counter."""

    num_steps: int


class StatsReply(_Message):
    """Answer to `GetStats`."""

    call_id: int
    stats: Snapshot
    steps: Window | None = None


ToEngine = Submit | Abort | Stop | GetStats
FromEngine = Ready | Failed | Pieces | Beat | StatsReply


def params_of(fields: dict[str, Any]) -> SamplingParams:
    """The parameters that a message has as plain values; a grammar travels as an object of its fields.

    Raises:
        InvalidParameterError: a value is not allowed.
    """
    grammar = fields.get("grammar")
    return SamplingParams(**(fields if grammar is None else fields | {"grammar": Grammar(**grammar)}))


_encoder = msgspec.msgpack.Encoder()
_to_engine = msgspec.msgpack.Decoder(ToEngine)
_from_engine = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """Read a message that the engine process got."""
    message: ToEngine = _to_engine.decode(data)
    return message


def decode_from_engine(data: bytes) -> FromEngine:
    """Read a message that the HTTP process got."""
    message: FromEngine = _from_engine.decode(data)
    return message
