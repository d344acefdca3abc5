"""Requests, admission, step plans and step results."""

import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray

import tandem.core._core.kv


class FinishReason(enum.IntEnum):
    """Why a request ended; its value is the code in arrays."""

    NONE = 0

    STOP = 1

    LENGTH = 2

    ABORT = 3

    ERROR = 4

class RowKind(enum.IntEnum):
    """What a row does; its value is the code in StepPlan.kind."""

    CONTEXT = 0

    DECODE = 1

class SchedulerConfig:
    """
    Fixed for the life of a scheduler. Raises InvalidArgument naming a field that does not fit.
    """

    def __init__(self, *, num_slots: int, tokens_per_page: int, max_seats: int, max_tokens_per_step: int, max_model_len: int, draft_len: int = 0, has_drafter: bool = False, overlap: bool = True, enable_prefix_cache: bool = True, watermark_pages: int = 1, max_speculating_rows: int = 2147483647) -> None: ...

    @property
    def num_slots(self) -> int:
        """Pages of the pool."""

    @property
    def tokens_per_page(self) -> int: ...

    @property
    def max_seats(self) -> int:
        """Sequences running at once; also the most rows of a step."""

    @property
    def max_tokens_per_step(self) -> int:
        """Most tokens (sum of query_len) of a step."""

    @property
    def max_model_len(self) -> int:
        """No sequence grows beyond this many tokens."""

    @property
    def draft_len(self) -> int:
        """Drafts proposed per round, 0 to 7."""

    @property
    def has_drafter(self) -> bool:
        """Whether the cache has draft layers, even at draft_len 0."""

    @property
    def overlap(self) -> bool:
        """Whether a step may be planned while one is in flight."""

    @property
    def enable_prefix_cache(self) -> bool: ...

    @property
    def watermark_pages(self) -> int:
        """Pages that admission leaves free while anything runs."""

    @property
    def max_speculating_rows(self) -> int:
        """
        With more decode rows ready than this, none verifies drafts in that step.
        """

    @property
    def max_steps_in_flight(self) -> int: ...

    @property
    def decode_reach(self) -> int:
        """A decode row planned at n touches no index above n + decode_reach."""

    @property
    def look_ahead(self) -> int:
        """Tokens beyond the known ones that admission makes room for."""

    @property
    def max_sequence_tokens(self) -> int:
        """
        The longest sequence, prompt and generated tokens together, that submit accepts.
        """

class RequestSpec:
    """One request. `prompt` is int32 [P], P >= 1, copied."""

    def __init__(self, prompt: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], *, max_tokens: int, priority: int = 0, salt: str = '', speculate: bool = True, synchronous: bool = False) -> None: ...

    @property
    def max_tokens(self) -> int:
        """Tokens to generate at most."""

    @property
    def priority(self) -> int:
        """Lower goes first; ties by arrival."""

    @property
    def salt(self) -> str:
        """Prefixes are shared only under equal salts."""

    @property
    def speculate(self) -> bool:
        """False: its drafts are not proposed."""

    @property
    def synchronous(self) -> bool:
        """Never planned while it has a step in flight."""

class StepResult:
    """
    What a step produced, per sampling row in plan order; the arrays are not copied.

    num_tokens, num_accepted, finish: int32 [S]; tokens: int32 [sum(num_tokens)], the rows' tokens end to end.
    A row has num_accepted + 1 tokens, or num_accepted where an accepted draft ends the request.
    """

    def __init__(self, step_id: int, num_tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], num_accepted: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], tokens: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)], finish: Annotated[NDArray[numpy.int32], dict(shape=(None,), order='C', device='cpu', writable=False)]) -> None: ...

    @property
    def step_id(self) -> int: ...

class Terminal:
    """The one and only terminal event of a request."""

    @property
    def seq_id(self) -> int: ...

    @property
    def reason(self) -> FinishReason: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache at the first admission."""

    @property
    def num_generated_tokens(self) -> int: ...

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_rounds(self) -> int: ...

    @property
    def num_drafted_tokens(self) -> int: ...

    @property
    def num_accepted_tokens(self) -> int: ...

    def __eq__(self, arg: Terminal, /) -> bool: ...

    def __repr__(self) -> str: ...

class Rounds:
    """
    What became of drafts, cumulative. A round is a decode row that verified drafts and whose result counted. Of a round that ends its request, all drafts count as drafted, and as accepted those up to and including the token that ends it.
    """

    @property
    def num_rounds(self) -> int: ...

    @property
    def num_drafted(self) -> list[int]:
        """By place in the round, the first draft at 0; 7 places."""

    @property
    def num_accepted(self) -> list[int]:
        """By place in the round, likewise."""

class Stats:
    """
    Counters since the start, and what is now: running, waiting, in flight, pending.
    """

    @property
    def num_running(self) -> int: ...

    @property
    def num_waiting(self) -> int: ...

    @property
    def num_steps_in_flight(self) -> int: ...

    @property
    def num_pending_pages(self) -> int:
        """Held by steps in flight alone."""

    @property
    def num_submitted(self) -> int: ...

    @property
    def num_finished(self) -> dict[FinishReason, int]:
        """Requests ended, by reason."""

    @property
    def num_preemptions(self) -> int: ...

    @property
    def num_planned_steps(self) -> int: ...

    @property
    def num_completed_steps(self) -> int: ...

    @property
    def num_failed_steps(self) -> int: ...

    @property
    def num_context_rows(self) -> int: ...

    @property
    def num_decode_rows(self) -> int: ...

    @property
    def num_context_tokens(self) -> int: ...

    @property
    def num_decode_tokens(self) -> int:
        """Planned in decode rows, verified drafts included."""

    @property
    def num_dropped_rows(self) -> int:
        """Completed for an epoch that had ended."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of admitted requests, each counted once."""

    @property
    def num_cached_tokens(self) -> int:
        """Of those, found in the prefix cache."""

    @property
    def num_generated_tokens(self) -> int: ...

    @property
    def cold_rounds(self) -> Rounds:
        """Of sequences that began with nothing cached."""

    @property
    def prefix_hit_rounds(self) -> Rounds:
        """
        Of sequences that began with pages of the prefix tree, after a preemption their own ones included.
        """

    @property
    def num_rounds(self) -> int:
        """On all routes, as the two below."""

    @property
    def num_drafted_tokens(self) -> int: ...

    @property
    def num_accepted_tokens(self) -> int: ...

class StepPlan:
    """
    One step as the engine is to run it. The arrays are read-only, not copied, and do not change until the step's own complete or fail; later access raises InvalidArgument.
    R rows, at most one per sequence.
    """

    @property
    def step_id(self) -> int: ...

    @property
    def num_rows(self) -> int: ...

    @property
    def num_sampling_rows(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Sum of query_len."""

    @property
    def seq_id(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [R]."""

    @property
    def epoch(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. Goes up whenever the sequence loses its seat."""

    @property
    def seat(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. Index of the sequence in the device vectors."""

    @property
    def kind(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. RowKind."""

    @property
    def first_index(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        int32 [R]. Planned length at the start: exact for context rows; for decode rows an upper bound of the device's while an earlier step is in flight.
        """

    @property
    def query_len(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. Tokens of the row; 1 + num_drafts for decode rows."""

    @property
    def write_from(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        int32 [R]. Entries of index i, in any layer, are written iff i >= write_from.
        """

    @property
    def num_drafts(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. Drafts verified by a decode row."""

    @property
    def max_length(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R]. No index >= max_length is touched."""

    @property
    def samples(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """uint8 [R]. 1: the row has a place in StepResult."""

    @property
    def proposes(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """
        uint8 [R]. 1: the row is to propose drafts, which its next row verifies. The drafter's single steps may leave the others out, its extend pass may not.
        """

    @property
    def fresh(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """
        uint8 [R]. 1: first row on this seat; its device state starts from first_index and the known tokens.
        """

    @property
    def token_offsets(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [R+1]. Where each row's token_ids begin."""

    @property
    def token_ids(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """
        int32 [N]. query_len + 1 ids per context row, the last one -1 on the final chunk; none per decode row.
        """

    @property
    def table_changes(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None, 3), writable=False)]:
        """
        int32 [N, 3]. (seat, page index, slot), to be applied to the block table before the step.
        """

class StepEvents:
    """
    What complete or fail made of a step; valid until the next one. Arrays have one element per sampling row in plan order (none after fail).
    """

    @property
    def step_id(self) -> int: ...

    @property
    def terminals(self) -> list[Terminal]:
        """Requests that ended, each once in its life."""

    @property
    def seq_id(self) -> Annotated[NDArray[numpy.int64], dict(shape=(None,), writable=False)]:
        """int64 [S]."""

    @property
    def valid(self) -> Annotated[NDArray[numpy.uint8], dict(shape=(None,), writable=False)]:
        """uint8 [S]. 0: of a dropped epoch, ignored whole."""

    @property
    def num_tokens(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [S]. Kept, cut at the length limit."""

    @property
    def num_accepted(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [S]. Drafts among the kept tokens."""

    @property
    def num_drafts(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [S]. Drafts that the row verified."""

    @property
    def finish(self) -> Annotated[NDArray[numpy.int32], dict(shape=(None,), writable=False)]:
        """int32 [S]. FinishReason; NONE to go on."""

class Scheduler:
    """
    Decides what runs in each step: submit, then plan and complete in turn.

    All calls come from one thread, the first that calls or the one that called bind_thread; another one gets InvalidArgument, and so does any other mistake. A refused call changes nothing.
    """

    def __init__(self, config: SchedulerConfig) -> None: ...

    def submit(self, spec: RequestSpec) -> int:
        """
        Accepts a request and returns its id. Raises InvalidArgument for what could never run alone.
        """

    def abort(self, seq_id: int) -> Terminal | None:
        """Ends a request and returns its Terminal; None if it has ended already."""

    def plan(self) -> StepPlan | None:
        """
        The next step; None if no row can run now: then complete a step in flight, or there is no work.
        """

    def complete(self, result: StepResult) -> StepEvents:
        """Takes the result of the oldest step in flight."""

    def fail(self, step_id: int) -> StepEvents:
        """
        The oldest step in flight raised: its requests end with ERROR, the others go on.
        """

    def known_tokens(self, seq_id: int) -> Annotated[NDArray[numpy.int32], dict(shape=(None,))]:
        """
        int32 [known], a copy: prompt, then generated tokens of an unfinished request.
        """

    def num_cached(self, seq_id: int) -> int:
        """Prompt tokens found in the prefix cache at the first admission."""

    @property
    def num_unfinished(self) -> int:
        """Requests accepted and not ended."""

    @property
    def num_steps_in_flight(self) -> int: ...

    @property
    def config(self) -> SchedulerConfig: ...

    def stats(self) -> Stats: ...

    def ledger(self) -> tandem.core._core.kv.Ledger:
        """State of every page, as kv.Ledger. O(num_slots)."""

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix."""

    def bind_thread(self) -> None:
        """Makes the calling thread the only one that may call from now on."""

    def check(self) -> None:
        """Aborts the process unless the scheduler's books agree. For tests."""
