"""Kernels of the embedded CPU backend."""

from collections.abc import Sequence
from typing import overload

import torch

import tandem.core._core.layout


def isa() -> str:
    """Name of the instruction set in use."""

def supported_isas() -> list[str]:
    """Names that `set_isa` takes on this machine, slowest first."""

def set_isa(name: str) -> None:
    """
    Chooses an instruction set, for tests. Raises InvalidArgument for one that the machine lacks.
    """

def num_threads() -> int:
    """Threads that share a kernel's work."""

def set_num_threads(count: int) -> None:
    """1 to 256. Results do not depend on it."""

class PackedLinear:
    """A weight rearranged once for `linear`; keeps a copy, not the tensor."""

    def __init__(self, weight: torch.Tensor) -> None:
        """
        `weight`: float32 or bfloat16 `[N, K]`. Raises InvalidArgument for anything else.
        """

    @property
    def out_features(self) -> int:
        """N."""

    @property
    def in_features(self) -> int:
        """K."""

    @property
    def num_bytes(self) -> int:
        """Size of the packed copy."""

def linear(weight: PackedLinear, x: torch.Tensor, out: torch.Tensor) -> None:
    """
    out `[T, N]` = x `[T, K]` @ weight^T, both float32 or both bfloat16.

    Each element is one chain of fp32 multiply-adds over ascending k, rounded once: its bits do not depend on T. Raises InvalidArgument where shapes or dtypes do not fit.
    """

def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, one_plus: bool, out: torch.Tensor) -> None:
    """
    out = x * rsqrt(mean(x^2) + eps) * (weight + one_plus), per row of x `[T, H]`.

    weight float32 `[H]`; fp32 inside, rounded once. out may be x.
    """

def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, one_plus: bool, out: torch.Tensor) -> None:
    """residual += x (rounded to its dtype), then out = rms_norm(residual)."""

class RopeTable:
    """Cosines and sines by position, shared by the NormRope of all layers."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """float32 `[positions, rotary_dim / 2]` each; copied."""

class NormRope:
    """What `norm_rope` does to the heads of one fused projection row."""

    def __init__(self, parts: Sequence[tuple[int, int, int, int, torch.Tensor | None]], rope: RopeTable | None, eps: float, one_plus: bool) -> None:
        """
        `parts`: (first column, heads, head dim, rotary dim, norm weight float32 `[dim]` or None) each; weights are copied. rotary dim is 0 (no rotation) or twice the table's columns.
        """

def norm_rope(plan: NormRope, rows: torch.Tensor, positions: torch.Tensor) -> None:
    """
    In place on rows `[T, C]` (float32 or bfloat16): per head RMS norm, then half-split rotation by positions int32 `[T]`, both in fp32, then one rounding. Rows with a negative position are padding and stay as they are.
    """

def project(weight: PackedLinear, plan: NormRope, x: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> None:
    """
    `linear(weight, x, rows)`, then `norm_rope(plan, rows, positions)`, to the same bits.
    """

def swiglu_oai(gate_up: torch.Tensor, alpha: float, limit: float, out: torch.Tensor) -> None:
    """
    gate_up `[T, 2I]` (gates first) -> out `[T, I]`: g * sigmoid(alpha * g) * (u + 1), g = min(gate, limit), u = clamp(up, -limit, limit).
    """

def silu_mul(gate_up: torch.Tensor, out: torch.Tensor) -> None:
    """
    gate_up `[T, 2I]` (gates first) -> out `[T, I]`: gate * sigmoid(gate) * up.
    """

def route(x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, topk: int, scale: float, ids: torch.Tensor, weights: torch.Tensor) -> None:
    """
    Experts of x `[T, H]`: p = sigmoid(gate @ x) in fp32; ids int32 `[T, topk]` by p + bias, descending, ties to the lower id; weights float32 `[T, topk]` = p / sum of the chosen p * scale. gate float32 `[E, H]`, bias `[E]`.
    """

class PackedExperts:
    """Gated MLPs rearranged once for `moe`; keeps copies."""

    def __init__(self, gate_up: Sequence[torch.Tensor], down: Sequence[torch.Tensor], shared: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        """
        `gate_up` `[2I, H]` (gates first) and `down` `[H, I]` per routed expert, float32 or bfloat16; `shared`: one such pair that every token takes, of any I.
        """

    @property
    def num_routed(self) -> int:
        """Routed experts."""

    @property
    def has_shared(self) -> bool:
        """Whether there is a shared one."""

    @property
    def hidden_size(self) -> int:
        """H."""

def moe(experts: PackedExperts, x: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, limit: float, alpha: float, out: torch.Tensor) -> None:
    """
    out `[T, H]` = sum over slots of weights[t, i] * mlp[ids[t, i]](x[t]), slots ascending, plus the shared MLP.

    ids int32 and weights float32 `[T, topk]`, id -1 an empty slot; both None where there are only shared weights. SwiGLU-OAI inside; fp32 from x to the single rounding at the end.
    """

def routed_moe(experts: PackedExperts, x: torch.Tensor, gate: torch.Tensor, bias: torch.Tensor, topk: int, scale: float, limit: float, alpha: float, out: torch.Tensor) -> None:
    """`route`, then `moe` with what it chose, to the same bits."""

def moe_silu(experts: PackedExperts, x: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor | None, out: torch.Tensor) -> None:
    """`moe` with gate * sigmoid(gate) * up inside."""

def prefer_huge_pages(pool: torch.Tensor) -> None:
    """
    Asks the system to back a pool uint8 `[bytes]` with huge pages from its next first use on: an advice.
    """

@overload
def write_kv(pool: torch.Tensor, view: tandem.core._core.layout.View, src: torch.Tensor, seat: torch.Tensor, index: torch.Tensor, block_table: torch.Tensor) -> None:
    """
    Writes src `[T, heads, dim]` or `[T, heads * dim]` (rows may be strided) at token index[t] of seat[t].

    index -1 writes nothing. Raises InvalidArgument before any byte changes if a seat, index or slot is out of range.
    """

@overload
def write_kv(pool: torch.Tensor, parts: Sequence[tuple[tandem.core._core.layout.View, torch.Tensor]], seat: torch.Tensor, index: torch.Tensor, block_table: torch.Tensor) -> None:
    """The same for several (view, src) pairs in one call, all or nothing."""

def select_blocks(index_q: torch.Tensor, pool: torch.Tensor, view: tandem.core._core.layout.View, block_table: torch.Tensor, seat: torch.Tensor, kv_len: torch.Tensor, topk: int, num_local: int, out: torch.Tensor, block_size: int | None = None, scores: torch.Tensor | None = None) -> None:
    """
    Chooses exactly min(topk, visible) blocks per token and index head into out int32 `[T, Hi, topk]`, ids ascending, then -1.

    index_q `[T, Hi, D]` (rows may be strided); the newest `num_local` blocks always, then by the largest raw dot product with a visible key, ties to the lower id. kv_len[t] keys are visible to token t, 0 for padding. `block_size` is the layout's page by default. `scores` float32 `[T, Hi, B]`, for tests, receives every visible block's score and -inf elsewhere.
    """

def attend(q: torch.Tensor, pool: torch.Tensor, k_view: tandem.core._core.layout.View, v_view: tandem.core._core.layout.View, block_table: torch.Tensor, seat: torch.Tensor, kv_len: torch.Tensor, blocks: torch.Tensor | None, scale: float, first_index_attended: int, out: torch.Tensor, block_size: int | None = None) -> None:
    """
    Softmax attention of q `[T, Hq, D]` (rows may be strided) over the cache into out `[T, Hq, D]` of q's dtype.

    Token t sees keys [first_index_attended, kv_len[t]) of seat[t]; with blocks int32 `[T, Hk, topk]` (ascending, then -1) only those of them in the blocks of its group's KV head. A token without a key gives zeros. `block_size` is the layout's page by default; it divides 128 or is a multiple of it.
    """

def derive_step(length: torch.Tensor, seat_tokens: torch.Tensor, row_seat: torch.Tensor, row_first: torch.Tensor, row_floor: torch.Tensor, row_ceiling: torch.Tensor, row_write_from: torch.Tensor, token_row: torch.Tensor, token_end: torch.Tensor, token_max_length: torch.Tensor, token_source: torch.Tensor, token_from_seat: torch.Tensor, token_plan_id: torch.Tensor, tokens_per_page: int, row_length: torch.Tensor, token_ids: torch.Tensor, position: torch.Tensor, write_index: torch.Tensor, kv_len: torch.Tensor, num_valid_blocks: torch.Tensor, overrun: torch.Tensor) -> None:
    """
    What a step's tokens follow from its plan and the seats: `tandem.msa.StepMetadata.rederive` in one call.

    All int32: `length` `[S]`, `seat_tokens` `[S, 1+K]`, `overrun` `[]`, the others `[R]` or `[T]`; outputs from `row_length` on. Raises InvalidArgument before anything is written for a seat, row or source out of range.
    """

def advance_seats(length: torch.Tensor, seat_tokens: torch.Tensor, row_seat: torch.Tensor, row_length: torch.Tensor, row_advance: torch.Tensor, row_max_length: torch.Tensor, sample_row: torch.Tensor, sample_seat: torch.Tensor, sample_drafts: torch.Tensor, tokens: torch.Tensor, num_accepted: torch.Tensor | None = None) -> None:
    """
    What verifying a step does to the seats: `tandem.msa.advance` in one call.

    All int32: `length` `[S]` and `seat_tokens` `[S, 1+K]` change in place; the others are `[R]`, from `sample_row` on `[N]`. Raises InvalidArgument before anything is written for a seat or row out of range.
    """

def extend_slots(token_kv_len: torch.Tensor, token_max_length: torch.Tensor, token_row: torch.Tensor, row_write_from: torch.Tensor, write_index: torch.Tensor, kv_len: torch.Tensor) -> None:
    """
    The draft slots of a step's tokens: `tandem.spec.slots.extend_slots` in one call.

    All int32 `[T]`, `row_write_from` `[R]`; outputs are `write_index` and `kv_len`. Raises InvalidArgument before anything is written for a row out of range.
    """

def single_slots(newest_index: torch.Tensor, max_length: torch.Tensor, draft: torch.Tensor, step: int, position: torch.Tensor, write_index: torch.Tensor, kv_len: torch.Tensor, drafts: torch.Tensor) -> None:
    """
    The slots of one single step: `tandem.spec.slots.single_slots` in one call.

    All int32 `[N]`; outputs are `position`, `write_index`, `kv_len` and column `step` - 1 of `drafts` `[N, K]`, which gets the draft, -1 where it lies beyond the limit. Raises InvalidArgument for a step outside 1 to K.
    """

def verify_rounds(logit_start: torch.Tensor, logit_token: torch.Tensor, decided: torch.Tensor, sample_row: torch.Tensor, sample_seat: torch.Tensor, row_num_drafts: torch.Tensor, drafts: torch.Tensor, num_accepted: torch.Tensor, newest: torch.Tensor, place: torch.Tensor) -> None:
    """
    Which drafts a step accepts: `tandem.spec.verify` in one call.

    All int32: `logit_start` `[N+1]`, `logit_token` and `decided` `[L]`, `row_num_drafts` `[R]`, `drafts` `[S, K]`, the others `[N]`; the last three are outputs. Raises InvalidArgument before anything is written for a row, seat or position out of range.
    """

class Tape:
    """
    Kernel calls that are made again in one call, without the interpreter between them.

    `with tape:` records the calls of this thread while it makes them. A replay reads and writes the same memory, which the tape keeps alive; nothing but kernels is recorded.
    """

    def __init__(self) -> None: ...

    def __enter__(self) -> Tape:
        """
        Raises InvalidArgument if this thread records already or the tape is not empty.
        """

    def __exit__(self, type: object | None, value: object | None, traceback: object | None) -> None:
        """Ends the recording; an exception leaves the tape empty."""

    def replay(self) -> None:
        """Makes the calls again. Raises what they raise."""

    @property
    def num_calls(self) -> int:
        """Kernel calls on the tape."""
