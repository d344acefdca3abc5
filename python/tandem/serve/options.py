"""How a server is set up; every value has one place, the command line fills them in."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

DEFAULT_PORT = 8000
DEFAULT_MAX_BODY_BYTES = 8 * 2**20


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine process needs to build its engine; the fields are those of `tandem.LLM`, but for the last two.

    Attributes:
        acceptance_baseline: (rate, deviation between prompts) that the acceptance alarm expects; None learns it.
        damage_drafts: let the drafter read its cache wrongly, to see that the alarm notices.
    """

    model: str
    drafter: str | None = None
    draft_len: int | None = None
    max_speculating_rows: int | None = None
    dtype: str = "float32"
    kv_dtype: str | None = None
    kv_cache_bytes: int | None = None
    max_model_len: int | None = None
    max_seats: int | None = None
    max_tokens_per_step: int | None = None
    enable_prefix_cache: bool = True
    num_threads: int | None = None
    seed: int | None = None
    overlap: bool = True
    acceptance_baseline: tuple[float, float] | None = None
    damage_drafts: bool = False


def default_engine_command() -> tuple[str, ...]:
    """The command of the engine process; its socket's address is appended."""
    return (sys.executable, "-m", "tandem.serve.engine_process")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Everything else.

    Attributes:
        engine: what is served.
        model_path: the model's folder, whose tokenizer and chat template the HTTP process reads.
        served_model_name: the name that requests give.
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        api_keys: keys of which a request must bear one; empty lets everyone in.
        max_requests: generations that may run or wait at once; more are refused with 429.
        max_body_bytes: largest request body.
        request_timeout_s: seconds from a request's arrival to its last byte; afterwards it is aborted.
        head_timeout_s: seconds that a request's line and headers may take.
        send_timeout_s: seconds that a client may take nothing while there is something to send.
        shutdown_grace_s: seconds that running requests are given after SIGTERM.
        stall_s: seconds without progress after which an engine with work is unhealthy.
        access_log: log each request.
        canary_interval_s: seconds from one run of the canary to the next; None runs none.
        canary_prompts: what the canary replays; None takes the model folder's own, else the one for any model.
        canary_allowance: accepted drafts of a canary prompt by which two of its answers may differ.
        engine_command: program of the engine process; the channel's address is appended.
    """

    engine: EngineConfig
    model_path: Path
    served_model_name: str
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    api_keys: Sequence[str] = ()
    max_requests: int = 256
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    request_timeout_s: float = 600.0
    head_timeout_s: float = 30.0
    send_timeout_s: float = 30.0
    shutdown_grace_s: float = 30.0
    stall_s: float = 30.0
    access_log: bool = False
    canary_interval_s: float | None = None
    canary_prompts: Path | None = None
    canary_allowance: int = 0
    engine_command: Sequence[str] = field(default_factory=default_engine_command)
