"""Step plans for tests: a builder, a random generator, and a token-by-token model of the derivation."""

from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from tandem.msa import Limits, PlanRows, RowKind, SeatState, StepMetadata


@dataclass
class Row:
    """One planned row; `ids` are those of a context row's tokens plus the one after them."""

    seat: int
    first_index: int
    kind: RowKind = RowKind.DECODE
    ids: list[int] = field(default_factory=list)
    num_drafts: int = 0
    write_from: int = 0
    max_length: int = 48
    samples: bool = True
    fresh: bool = False

    @property
    def query_len(self) -> int:
        return 1 + self.num_drafts if self.kind == RowKind.DECODE else len(self.ids) - 1


def context(seat: int, first_index: int, ids: list[int], **more: object) -> Row:
    return Row(seat, first_index, RowKind.CONTEXT, ids, **more)  # type: ignore[arg-type]


def decode(seat: int, first_index: int, num_drafts: int = 0, **more: object) -> Row:
    return Row(seat, first_index, RowKind.DECODE, [], num_drafts, **more)  # type: ignore[arg-type]


def plan(*rows: Row, changes: list[tuple[int, int, int]] | None = None) -> PlanRows:
    """The arrays of a plan, read-only as the scheduler's are."""

    def line(values: list[int], dtype: type = np.int32) -> np.ndarray:
        array = np.array(values, dtype=dtype)
        array.flags.writeable = False
        return array

    ids = [row.ids if row.kind == RowKind.CONTEXT else [] for row in rows]
    table = np.array(changes or [], dtype=np.int32).reshape(-1, 3)
    table.flags.writeable = False
    return PlanRows(
        seat=line([row.seat for row in rows]),
        kind=line([row.kind for row in rows]),
        first_index=line([row.first_index for row in rows]),
        query_len=line([row.query_len for row in rows]),
        write_from=line([row.write_from for row in rows]),
        num_drafts=line([row.num_drafts for row in rows]),
        max_length=line([row.max_length for row in rows]),
        samples=line([row.samples for row in rows], np.uint8),
        fresh=line([row.fresh for row in rows], np.uint8),
        token_offsets=line([0, *np.cumsum([len(part) for part in ids]).tolist()]),
        token_ids=line([token for part in ids for token in part]),
        table_changes=table,
    )


@dataclass
class Expected:
    """What the derivation must give, computed one token at a time."""

    row_length: list[int]
    tokens: list[dict[str, int]]
    overrun: int


def expect(rows: list[Row], state: SeatState, limits: Limits) -> Expected:
    lengths, tokens, overrun = [], [], 0
    for number, row in enumerate(rows):
        known = int(state.length[row.seat])
        length = row.first_index if row.fresh else min(known, row.first_index)
        overrun = max(overrun, 0 if row.fresh else known - row.first_index)
        lengths.append(length)
        for t in range(row.query_len):
            index = length + t
            inside = index < row.max_length
            if row.kind == RowKind.CONTEXT:
                token, following = row.ids[t], row.ids[t + 1]
            else:
                token, following = max(int(state.tokens[row.seat, t]), 0), -1
            tokens.append(
                {
                    "token_row": number,
                    "token_seat": row.seat,
                    "token_ids": token,
                    "next_token_ids": following,
                    "position": index if inside else 0,
                    "write_index": index if inside and index >= row.write_from else -1,
                    "kv_len": index + 1 if inside else 0,
                    "num_valid_blocks": index // limits.tokens_per_page + 1 if inside else 0,
                }
            )
    return Expected(lengths, tokens, overrun)


def padding_token(num_rows: int, state: SeatState) -> dict[str, int]:
    return {
        "token_row": num_rows,
        "token_seat": state.padding_seat,
        "token_ids": 0,
        "next_token_ids": -1,
        "position": 0,
        "write_index": -1,
        "kv_len": 0,
        "num_valid_blocks": 0,
    }


def tokens_of(meta: StepMetadata) -> list[dict[str, int]]:
    names = padding_token(0, SeatState(meta.limits))
    return [{name: int(getattr(meta, name)[t]) for name in names} for t in range(meta.num_tokens)]


def random_rows(rng: Random, limits: Limits, state: SeatState) -> list[Row]:
    """Rows on distinct seats whose seats are set up to match: some exact, some planned ahead, some fresh."""
    rows: list[Row] = []
    budget = limits.max_tokens
    for seat in rng.sample(range(limits.max_seats), rng.randint(1, limits.max_seats)):
        max_length = rng.randint(1, limits.max_model_len)
        known = rng.randint(0, max_length - 1)
        state.length[seat] = known
        state.tokens[seat] = torch.tensor([rng.randint(-1, 99) for _ in range(1 + limits.max_draft_len)])
        if rng.random() < 0.5:
            ahead = rng.choice([0, 0, 1, 1 + limits.max_draft_len])
            row = decode(seat, known + ahead, rng.randint(0, limits.max_draft_len), max_length=max_length)
        else:
            size = rng.randint(1, max(1, min(12, max_length - known)))
            ids = [rng.randint(0, 99) for _ in range(size)]
            last = rng.random() < 0.5
            row = context(seat, known, [*ids, -1 if last else 50], max_length=max_length, samples=last)
            row.write_from = known + rng.randint(0, 1)
            if rng.random() < 0.5:
                row.fresh = True
                state.length[seat] = rng.randint(0, limits.max_model_len)
        if row.query_len <= budget:
            budget -= row.query_len
            rows.append(row)
    return rows
