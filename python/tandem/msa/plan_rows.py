"""The part of a step plan that the device derivation reads, as host arrays."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]
ByteArray = npt.NDArray[np.uint8]


class RowKind(IntEnum):
    """What a row does in its step."""

    CONTEXT = 0
    DECODE = 1


class PlanArrays(Protocol):
    """What `PlanRows.from_plan` reads; `tandem.core.sched.StepPlan` has it."""

    @property
    def seat(self) -> Int32Array: ...  # noqa: D102
    @property
    def kind(self) -> Int32Array: ...  # noqa: D102
    @property
    def first_index(self) -> Int32Array: ...  # noqa: D102
    @property
    def query_len(self) -> Int32Array: ...  # noqa: D102
    @property
    def write_from(self) -> Int32Array: ...  # noqa: D102
    @property
    def num_drafts(self) -> Int32Array: ...  # noqa: D102
    @property
    def max_length(self) -> Int32Array: ...  # noqa: D102
    @property
    def samples(self) -> ByteArray: ...  # noqa: D102
    @property
    def fresh(self) -> ByteArray: ...  # noqa: D102
    @property
    def token_offsets(self) -> Int32Array: ...  # noqa: D102
    @property
    def token_ids(self) -> Int32Array: ...  # noqa: D102
    @property
    def table_changes(self) -> Int32Array: ...  # noqa: D102


@dataclass(frozen=True)
class PlanRows:
    """Rows of one step in plan order; int32 host arrays over R rows unless said otherwise.

    Attributes:
        seat: seat of the row's sequence, each at most once.
        kind: `RowKind`.
        first_index: planned index of the row's first token: exact for context rows and fresh ones, an upper bound else.
        query_len: tokens of the row, at least 1; 1 + num_drafts for decode rows.
        write_from: index i is written iff i >= write_from.
        num_drafts: drafts that a decode row feeds; 0 for context rows.
        max_length: no index >= max_length is read or written.
        samples: uint8, 1 where the row's last token (decode: each of its tokens) yields a sampled token.
        fresh: uint8, 1 where the seat's length is not yet valid and first_index takes its place.
        token_offsets: [R+1] start of each row's ids in token_ids.
        token_ids: [N] query_len + 1 ids for a context row (the last is the id after the row's tokens, -1 where only
            the device will know it); none for a decode row.
        table_changes: [C, 3] (seat, page index, slot), each (seat, page index) at most once.
    """

    seat: Int32Array
    kind: Int32Array
    first_index: Int32Array
    query_len: Int32Array
    write_from: Int32Array
    num_drafts: Int32Array
    max_length: Int32Array
    samples: ByteArray
    fresh: ByteArray
    token_offsets: Int32Array
    token_ids: Int32Array
    table_changes: Int32Array

    @property
    def num_rows(self) -> int:
        """Rows of the step."""
        return len(self.seat)

    @staticmethod
    def from_plan(plan: PlanArrays) -> "PlanRows":
        """Views of the plan's arrays, valid as long as the plan's."""
        return PlanRows(
            seat=plan.seat,
            kind=plan.kind,
            first_index=plan.first_index,
            query_len=plan.query_len,
            write_from=plan.write_from,
            num_drafts=plan.num_drafts,
            max_length=plan.max_length,
            samples=plan.samples,
            fresh=plan.fresh,
            token_offsets=plan.token_offsets,
            token_ids=plan.token_ids,
            table_changes=plan.table_changes,
        )
