"""Per-step metadata: what the host plans, staged into fixed buffers, and what the device derives from it.

The host knows which rows run and how many tokens each has; it does not know how long a sequence is while an earlier
step is still in flight. So `stage` lays out rows and tokens, and `rederive` computes everything that depends on a
length from the seats, in device operations alone: no value comes back to the host, and running it again on the same
state gives the same result. Shapes depend on the staged row and token counts only, so a captured step pads both.
"""

import numpy as np
import torch
from torch import Tensor

from tandem.core import cpu
from tandem.msa.limits import LimitError, Limits
from tandem.msa.plan_rows import Int32Array, PlanRows, RowKind
from tandem.msa.staging import Staging
from tandem.msa.state import SeatState

_INT32_MAX = 2**31 - 1
_MAX_CACHED_SHAPES = 256

# Lines of the staged matrices; the names are those of the views.
_ROW_FIELDS = (
    "row_seat",
    "row_kind",
    "row_query_len",
    "row_num_drafts",
    "row_max_length",
    "_row_advance",  # what the length grows by when no draft is accepted
    "query_start",
)
# The only lines that change from one step to the next while the same rows decode.
_BOUND_FIELDS = (
    "_row_first",  # a length may not exceed it ...
    "_row_floor",  # ... nor stay below: first_index where the row is fresh, else 0
    "_row_ceiling",  # a length above it is a fault of the plan: first_index, unlimited where the row is fresh
    "_row_write_from",
)
_TOKEN_FIELDS = (
    "token_row",
    "token_seat",
    "next_token_ids",
    "_token_end",  # place after the token in its row
    "_token_source",  # place in SeatState.tokens
    "_token_from_seat",  # 1 where the seat has the id, 0 where the plan has it
    "_token_plan_id",
    "_token_max_length",
)
_SAMPLE_FIELDS = ("sample_row", "sample_seat", "_sample_drafts", "logit_start")
_DERIVED_ROWS = ("row_length", "_seat_length")
_DERIVED_TOKENS = (
    "token_ids",
    "position",
    "write_index",
    "kv_len",
    "num_valid_blocks",
    "_end",
    "_index",
    "_write_from",
)
(
    _ROW_SEAT,
    _ROW_KIND,
    _ROW_QUERY_LEN,
    _ROW_NUM_DRAFTS,
    _ROW_MAX_LENGTH,
    _ROW_ADVANCE,
    _QUERY_START,
) = range(len(_ROW_FIELDS))
_ROW_FIRST, _ROW_FLOOR, _ROW_CEILING, _ROW_WRITE_FROM = range(len(_BOUND_FIELDS))
(
    _TOKEN_ROW,
    _TOKEN_SEAT,
    _NEXT_TOKEN_IDS,
    _TOKEN_END,
    _TOKEN_SOURCE,
    _TOKEN_FROM_SEAT,
    _TOKEN_PLAN_ID,
    _TOKEN_MAX_LENGTH,
) = range(len(_TOKEN_FIELDS))
_SAMPLE_ROW, _SAMPLE_SEAT, _SAMPLE_DRAFTS, _LOGIT_START = range(len(_SAMPLE_FIELDS))


class StepMetadata:
    """Buffers sized by `Limits`, and this step's views of them.

    All tensors are int32 on one device; the views of one shape have the same addresses in every step. R rows and T
    tokens are the staged counts, padding included; N rows sample, and L of the tokens need logits for that.

    Attributes:
        num_rows, num_tokens, num_samples, num_logits: R, T, N, L.
        row_seat, row_kind, row_query_len, row_num_drafts, row_max_length: [R] as planned; a padding row has the
            padding seat and zeros.
        row_length: [R] derived: tokens in the sequence's cache before this step.
        query_start: [R+1] first token of each row.
        token_row, token_seat: [T] row and seat of each token; a padding token has row R and the padding seat.
        token_ids: [T] derived: ids to embed, never negative (an absent draft is fed as 0 and matches nothing).
        next_token_ids: [T] the id after each token as far as the plan knows it, else -1 (decode rows, end of prompt).
        position: [T] derived: token index; 0 for padding.
        write_index: [T] derived: index at which keys and values are stored; -1 for nowhere.
        kv_len: [T] derived: keys that the token sees, itself included; 0 for padding, which sees none.
        num_valid_blocks: [T] derived: ceil(kv_len / tokens_per_page).
        sample_row, sample_seat: [N] the sampling rows, in plan order, and their seats.
        logit_start: [N+1] each sampling row's part of `logit_token`.
        logit_token: [L] tokens whose logits the step needs: all of a decode row, the last of a context row.
        overrun: [] the most tokens by which a seat's length exceeded the plan's bound; > 0 outside warm-up is a fault
            of the plan, to be reported with the step's result.
    """

    num_rows: int
    num_tokens: int
    num_samples: int
    num_logits: int
    row_seat: Tensor
    row_kind: Tensor
    row_query_len: Tensor
    row_num_drafts: Tensor
    row_max_length: Tensor
    row_length: Tensor
    query_start: Tensor
    token_row: Tensor
    token_seat: Tensor
    token_ids: Tensor
    next_token_ids: Tensor
    position: Tensor
    write_index: Tensor
    kv_len: Tensor
    num_valid_blocks: Tensor
    sample_row: Tensor
    sample_seat: Tensor
    logit_start: Tensor
    logit_token: Tensor
    overrun: Tensor

    _all_seats: Tensor
    _all_lengths: Tensor
    _row_first: Tensor
    _row_floor: Tensor
    _row_ceiling: Tensor
    _row_write_from: Tensor
    _row_advance: Tensor
    _seat_length: Tensor
    _token_end: Tensor
    _token_source: Tensor
    _token_from_seat: Tensor
    _token_plan_id: Tensor
    _write_from: Tensor
    _token_max_length: Tensor
    _end: Tensor
    _index: Tensor
    _valid: Tensor
    _writable: Tensor
    _sample_drafts: Tensor

    def __init__(self, limits: Limits, device: torch.device | str = "cpu", steps_in_flight: int = 1) -> None:
        self.limits = limits
        self.device = torch.device(device)
        rows, tokens = limits.max_rows + 1, limits.max_tokens
        self._rows = Staging(len(_ROW_FIELDS), rows, self.device, steps_in_flight)
        self._bounds = Staging(len(_BOUND_FIELDS), rows, self.device, steps_in_flight)
        self._tokens = Staging(len(_TOKEN_FIELDS), tokens, self.device, steps_in_flight)
        self._samples = Staging(len(_SAMPLE_FIELDS), rows, self.device, steps_in_flight)
        self._logits = Staging(1, tokens, self.device, steps_in_flight)
        self._derived_rows = torch.zeros((len(_DERIVED_ROWS), rows), dtype=torch.int32, device=self.device)
        self._derived_tokens = torch.zeros((len(_DERIVED_TOKENS), tokens), dtype=torch.int32, device=self.device)
        self._flags = torch.zeros((2, tokens), dtype=torch.bool, device=self.device)
        self._iota = np.arange(max(rows, tokens), dtype=np.int32)
        self._views: dict[tuple[int, int, int, int], dict[str, Tensor]] = {}
        self.overrun = torch.zeros((), dtype=torch.int32, device=self.device)
        self._block_size = torch.full((), limits.tokens_per_page, dtype=torch.int32, device=self.device)
        self._zero = torch.zeros((), dtype=torch.int32, device=self.device)
        self._one = torch.ones((), dtype=torch.int32, device=self.device)
        self._nowhere = torch.full((), -1, dtype=torch.int32, device=self.device)
        self._decode_rows_staged: tuple[object, ...] = ()
        self._any_fresh = False
        self._bind(0, 0, 0, 0)

    @property
    def row_write_from(self) -> Tensor:
        """[R+1] int32 as planned: index i of the row's sequence is written iff i >= it; the last is padding's."""
        return self._row_write_from

    @property
    def token_max_length(self) -> Tensor:
        """[T] int32 as planned: no index of the token's sequence from it on is read or written; 0 for padding."""
        return self._token_max_length

    def stage(self, rows: PlanRows, state: SeatState, *, pad_rows: int = 0, pad_tokens: int = 0) -> None:
        """Lays out the rows of a plan, padded to at least `pad_rows` rows and `pad_tokens` tokens.

        Touches no length and no table. Raises `LimitError` where the step is larger than the limits.
        """
        same_rows: tuple[object, ...] = ()
        if len(rows.token_ids) == 0:
            lines = (rows.seat, rows.kind, rows.query_len, rows.num_drafts, rows.max_length, rows.samples, rows.fresh)
            same_rows = (pad_rows, pad_tokens, *(line.tobytes() for line in lines))
        if not same_rows or same_rows != self._decode_rows_staged:
            self._decode_rows_staged = ()
            self._stage_all(rows, state.padding_seat, pad_rows, pad_tokens)
            self._decode_rows_staged = same_rows
        self._stage_bounds(rows)

    def _stage_all(self, rows: PlanRows, padding_seat: int, pad_rows: int, pad_tokens: int) -> None:
        """Stages everything but the bounds of the lengths, and binds the views of the step's shape."""
        num_rows = len(rows.seat)
        query_start = np.zeros(num_rows + 1, dtype=np.int32)
        np.cumsum(rows.query_len, out=query_start[1:])
        num_tokens = int(query_start[-1])
        staged_rows, staged_tokens = max(num_rows, pad_rows), max(num_tokens, pad_tokens)
        if staged_rows > self.limits.max_rows or staged_tokens > self.limits.max_tokens:
            raise LimitError(
                f"a step of {staged_rows} rows and {staged_tokens} tokens exceeds max_rows {self.limits.max_rows} "
                f"or max_tokens {self.limits.max_tokens}"
            )
        decode = rows.kind == RowKind.DECODE
        odd_length = (rows.query_len != 1 + rows.num_drafts) & decode
        if odd_length.any() or (rows.num_drafts > self.limits.max_draft_len).any():
            raise LimitError(
                f"decode rows of {rows.query_len[decode].tolist()} tokens with {rows.num_drafts[decode].tolist()} "
                f"drafts: allowed is 1 + drafts, and at most max_draft_len {self.limits.max_draft_len} of them"
            )
        if (rows.max_length > self.limits.max_model_len).any():
            raise LimitError(
                f"max_length {int(rows.max_length.max())} exceeds max_model_len {self.limits.max_model_len}"
            )
        self._any_fresh = bool(rows.fresh.any())
        self._stage_rows(rows, decode, query_start, staged_rows, padding_seat)
        self._stage_tokens(rows, decode, query_start, staged_rows, staged_tokens, padding_seat)
        num_samples, num_logits = self._stage_samples(rows, decode, query_start)
        self._bind(staged_rows, staged_tokens, num_samples, num_logits)

    def _stage_bounds(self, rows: PlanRows) -> None:
        num_rows = len(rows.seat)
        bounds = self._bounds.begin()
        bounds[:, num_rows : self.num_rows + 1] = 0
        used = bounds[:, :num_rows]
        used[_ROW_FIRST] = used[_ROW_CEILING] = rows.first_index
        used[_ROW_FLOOR] = 0
        used[_ROW_WRITE_FROM] = rows.write_from
        if self._any_fresh:
            fresh = rows.fresh != 0
            used[_ROW_FLOOR][fresh] = rows.first_index[fresh]
            used[_ROW_CEILING][fresh] = _INT32_MAX
        self._bounds.commit()

    def _stage_rows(
        self, rows: PlanRows, decode: np.ndarray, query_start: Int32Array, staged_rows: int, padding_seat: int
    ) -> None:
        num_rows = len(rows.seat)
        host = self._rows.begin()
        host[:, num_rows : staged_rows + 1] = 0
        host[_ROW_SEAT, num_rows : staged_rows + 1] = padding_seat
        host[_QUERY_START, : num_rows + 1] = query_start
        host[_QUERY_START, num_rows : staged_rows + 1] = query_start[-1]
        used = host[:, :num_rows]
        used[_ROW_SEAT] = rows.seat
        used[_ROW_KIND] = rows.kind
        used[_ROW_QUERY_LEN] = rows.query_len
        used[_ROW_NUM_DRAFTS] = rows.num_drafts
        used[_ROW_MAX_LENGTH] = rows.max_length
        used[_ROW_ADVANCE] = rows.query_len
        used[_ROW_ADVANCE][decode] = 1
        self._rows.commit()

    def _stage_tokens(
        self,
        rows: PlanRows,
        decode: np.ndarray,
        query_start: Int32Array,
        staged_rows: int,
        staged_tokens: int,
        padding_seat: int,
    ) -> None:
        num_tokens = int(query_start[-1])
        token_row = np.repeat(self._iota[: len(rows.seat)], rows.query_len)
        offset = self._iota[:num_tokens] - query_start[token_row]
        seat = rows.seat[token_row]
        fed_by_seat = decode[token_row]
        host = self._tokens.begin()
        padding = host[:, num_tokens:staged_tokens]
        padding[:] = 0
        padding[_TOKEN_ROW] = staged_rows
        padding[_TOKEN_SEAT] = padding_seat
        padding[_NEXT_TOKEN_IDS] = -1
        used = host[:, :num_tokens]
        used[_TOKEN_ROW] = token_row
        used[_TOKEN_SEAT] = seat
        used[_TOKEN_END] = offset + 1
        used[_TOKEN_SOURCE] = (seat * (1 + self.limits.max_draft_len) + offset) * fed_by_seat
        used[_TOKEN_FROM_SEAT] = fed_by_seat
        used[_TOKEN_MAX_LENGTH] = rows.max_length[token_row]
        used[_NEXT_TOKEN_IDS] = -1
        used[_TOKEN_PLAN_ID] = 0
        if len(rows.token_ids):
            place = (rows.token_offsets[token_row] + offset)[~fed_by_seat]
            used[_TOKEN_PLAN_ID][~fed_by_seat] = rows.token_ids[place]
            used[_NEXT_TOKEN_IDS][~fed_by_seat] = rows.token_ids[place + 1]
        self._tokens.commit()

    def _stage_samples(self, rows: PlanRows, decode: np.ndarray, query_start: Int32Array) -> tuple[int, int]:
        sampling = np.flatnonzero(rows.samples)
        num_samples = len(sampling)
        num_logits_of = np.where(decode[sampling], rows.query_len[sampling], 1)
        logit_end = np.cumsum(num_logits_of)
        num_logits = int(logit_end[-1]) if num_samples else 0
        host = self._samples.begin()
        host[_SAMPLE_ROW, :num_samples] = sampling
        host[_SAMPLE_SEAT, :num_samples] = rows.seat[sampling]
        host[_SAMPLE_DRAFTS, :num_samples] = rows.num_drafts[sampling]
        host[_LOGIT_START, 0] = 0
        host[_LOGIT_START, 1 : num_samples + 1] = logit_end
        self._samples.commit()
        # The logits of a row are its last ones, so each place is as far from the row's end as from its logits' end.
        to_end = np.repeat(query_start[sampling + 1] - logit_end, num_logits_of)
        self._logits.begin()[0, :num_logits] = self._iota[:num_logits] + to_end
        self._logits.commit()
        return num_samples, num_logits

    def rederive(self, state: SeatState) -> None:
        """Computes every derived view from the seats' present lengths and tokens. Device operations only.

        On the CPU one kernel does all of it: a dozen small operations, each with its caches cold after a step's
        weights went through them, took longer than a layer.
        """
        if self.device.type != "cpu":
            self.rederive_in_torch(state)
            return
        cpu.derive_step(
            state.length,
            state.tokens,
            self._all_seats,
            self._row_first,
            self._row_floor,
            self._row_ceiling,
            self._row_write_from,
            self.token_row,
            self._token_end,
            self._token_max_length,
            self._token_source,
            self._token_from_seat,
            self._token_plan_id,
            self.limits.tokens_per_page,
            self._all_lengths,
            self.token_ids,
            self.position,
            self.write_index,
            self.kv_len,
            self.num_valid_blocks,
            self.overrun,
        )

    def rederive_in_torch(self, state: SeatState) -> None:
        """The same as `rederive` in torch operations: for other devices, and what the kernel is held against."""
        torch.index_select(state.length, 0, self._all_seats, out=self._seat_length)
        torch.clamp(self._seat_length, self._row_floor, self._row_first, out=self._all_lengths)
        torch.amax(torch.sub(self._seat_length, self._row_ceiling, out=self._seat_length), dim=0, out=self.overrun)

        # One past the token's index, cut to 0 where that lies beyond the sequence's limit: the keys it sees.
        torch.index_select(self._all_lengths, 0, self.token_row, out=self._end)
        torch.add(self._end, self._token_end, out=self._end)
        torch.le(self._end, self._token_max_length, out=self._valid)
        torch.where(self._valid, self._end, self._zero, out=self.kv_len)
        torch.sub(self.kv_len, self._one, out=self._index)
        torch.maximum(self._index, self._zero, out=self.position)
        torch.index_select(self._row_write_from, 0, self.token_row, out=self._write_from)
        torch.gt(self.kv_len, self._write_from, out=self._writable)
        torch.where(self._writable, self._index, self._nowhere, out=self.write_index)
        torch.floor_divide(self._index, self._block_size, out=self.num_valid_blocks)
        torch.add(self.num_valid_blocks, self._one, out=self.num_valid_blocks)

        torch.index_select(state.tokens.view(-1), 0, self._token_source, out=self.token_ids)
        torch.maximum(self.token_ids, self._zero, out=self.token_ids)
        torch.addcmul(self._token_plan_id, self.token_ids, self._token_from_seat, out=self.token_ids)

    def _bind(self, num_rows: int, num_tokens: int, num_samples: int, num_logits: int) -> None:
        """Points the attributes at the views of a shape, which are made once per shape."""
        self.num_rows, self.num_tokens, self.num_samples, self.num_logits = (
            num_rows,
            num_tokens,
            num_samples,
            num_logits,
        )
        key = (num_rows, num_tokens, num_samples, num_logits)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MAX_CACHED_SHAPES:
                self._views.clear()
            views = self._views[key] = self._make_views(*key)
        vars(self).update(views)

    def _make_views(self, num_rows: int, num_tokens: int, num_samples: int, num_logits: int) -> dict[str, Tensor]:
        # The row after the last is the one that padding tokens belong to; the derivation includes it.
        all_rows = num_rows + 1
        views = {name: self._rows.tensor[line, :num_rows] for line, name in enumerate(_ROW_FIELDS)}
        views |= {name: self._bounds.tensor[line, :all_rows] for line, name in enumerate(_BOUND_FIELDS)}
        views["query_start"] = self._rows.tensor[_QUERY_START, :all_rows]
        views["_all_seats"] = self._rows.tensor[_ROW_SEAT, :all_rows]
        views["_all_lengths"] = self._derived_rows[0, :all_rows]
        views["row_length"] = self._derived_rows[0, :num_rows]
        views["_seat_length"] = self._derived_rows[1, :all_rows]
        views |= {name: self._tokens.tensor[line, :num_tokens] for line, name in enumerate(_TOKEN_FIELDS)}
        views |= {name: self._derived_tokens[line, :num_tokens] for line, name in enumerate(_DERIVED_TOKENS)}
        views["_valid"], views["_writable"] = self._flags[0, :num_tokens], self._flags[1, :num_tokens]
        views |= {name: self._samples.tensor[line, :num_samples] for line, name in enumerate(_SAMPLE_FIELDS)}
        views["logit_start"] = self._samples.tensor[_LOGIT_START, : num_samples + 1]
        views["logit_token"] = self._logits.tensor[0, :num_logits]
        return views


def derive(rows: PlanRows, state: SeatState, meta: StepMetadata, *, pad_rows: int = 0, pad_tokens: int = 0) -> None:
    """Everything of a step that follows from its plan and the seats: applies table changes, stages, derives.

    Changes nothing of `state` but the block table, so it may run again, also after `advance`: a length beyond the
    plan's bound is cut to it.

    Args:
        rows: the plan's rows; read during the call only.
        state: the seats, on the device of `meta`.
        meta: filled in place.
        pad_rows, pad_tokens: shape to pad to, as a captured step needs.

    Raises `LimitError` where the plan does not fit the limits.
    """
    apply_table_changes(rows.table_changes, state)
    meta.stage(rows, state, pad_rows=pad_rows, pad_tokens=pad_tokens)
    meta.rederive(state)


def apply_table_changes(changes: Int32Array, state: SeatState) -> None:
    """Sets block_table[seat, page index] = slot for each line of `changes` [C, 3], in stream order."""
    if len(changes) == 0:
        return
    seats, pages = state.block_table.shape
    if changes.min() < 0 or changes[:, 0].max() >= seats or changes[:, 1].max() >= pages:
        raise LimitError(f"a table change lies outside the table of {seats} seats and {pages} pages")
    host = torch.from_numpy(np.ascontiguousarray(changes.T).copy())
    lines = host if state.device.type == "cpu" else host.pin_memory().to(state.device, non_blocking=True)
    state.block_table.index_put_((lines[0], lines[1]), lines[2])


def advance(state: SeatState, meta: StepMetadata, tokens: Tensor, num_accepted: Tensor | None = None) -> None:
    """What verifying does to the seats, in device operations: lengths move on, the newly sampled token becomes known.

    A context row's length grows by its tokens, a decode row's by 1 + its accepted drafts, never past max_length.

    Args:
        state: updated in place (`length`, `last_token`).
        meta: the step's metadata, as derived before the step.
        tokens: [N] int32, each sampling row's newest token: the one after its last accepted draft.
        num_accepted: [N] int32 accepted drafts of each sampling row; left out where no row has drafts.
    """
    if meta.device.type == "cpu":
        cpu.advance_seats(
            state.length,
            state.tokens,
            meta.row_seat,
            meta.row_length,
            meta._row_advance,
            meta.row_max_length,
            meta.sample_row,
            meta.sample_seat,
            meta._sample_drafts,
            tokens,
            num_accepted,
        )
    else:
        advance_in_torch(state, meta, tokens, num_accepted)


def advance_in_torch(state: SeatState, meta: StepMetadata, tokens: Tensor, num_accepted: Tensor | None = None) -> None:
    """The same as `advance` in torch operations: for other devices, and what the kernel is held against."""
    length = meta.row_length + meta._row_advance
    if num_accepted is not None:
        length.index_add_(0, meta.sample_row, torch.minimum(num_accepted, meta._sample_drafts))
    torch.minimum(length, meta.row_max_length, out=length)
    state.length.index_put_((meta.row_seat,), length)
    state.last_token.index_put_((meta.sample_seat,), tokens)
