"""The reference backend: plain torch in fp32, one sequence at a time, written to be checked by eye."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tandem.core import layout as core_layout
from tandem.msa.backend import AttendedTokens, AttentionBackend
from tandem.msa.geometry import SparseGeometry
from tandem.msa.tiles import tile_tensor

_QUERY_CHUNK = 64


class ReferenceBackend(AttentionBackend):
    """Slow and obvious; any device, any block size that the layout has as its page."""

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:  # noqa: D102
        for view, rows in self.parts(layer, k, v, index_k):
            self._write(view, rows, tokens)

    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        cached = self.layer(layer)
        sparse = cached.sparse
        chosen = index_q.new_full((*index_q.shape[:2], sparse.topk), -1, dtype=torch.int32)
        for seat, members in self._by_seat(tokens):
            kv_len = tokens.kv_len[members].long()
            keys = self._gather(cached.index_keys, seat, int(kv_len.max()))[:, 0]
            scores = torch.einsum("thd,nd->thn", index_q[members].float(), keys)
            scores = scores.masked_fill(_unseen(kv_len, keys.shape[0])[:, None], -torch.inf)
            chosen[members] = self.choose(scores, kv_len, sparse)
        return chosen

    def choose(self, scores: Tensor, kv_len: Tensor, sparse: SparseGeometry) -> Tensor:
        """The blocks that follow from the scores of single keys.

        Args:
            scores: [T, index heads, keys], -inf where a key is not visible.
            kv_len: int64 [T], at least 1.
            sparse: how to choose.

        Returns: int32 [T, index heads, topk], ids ascending, then -1.
        """
        num_valid = (kv_len + sparse.block_size - 1) // sparse.block_size
        return choose_blocks(block_max(scores, sparse.block_size), num_valid, sparse.topk, sparse.num_local)

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        cached = self.layer(layer)
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        block_size = self.layout.tokens_per_page
        for seat, members in self._by_seat(tokens):
            kv_len = tokens.kv_len[members].long()
            num_keys = int(kv_len.max())
            first = cached.geometry.first_index_attended
            keys = self._gather(cached.k, seat, num_keys)
            values = self._gather(cached.v, seat, num_keys)
            values[:first] = 0  # never written, so possibly NaN, which a weight of zero would not silence
            group = q.shape[1] // keys.shape[1]
            queries = q[members].float().view(len(members), keys.shape[1], group, -1)
            scores = torch.einsum("thgd,nhd->thgn", queries, keys) * cached.geometry.scale
            hidden = _unseen(kv_len, num_keys)[:, None].repeat(1, keys.shape[1], 1)
            hidden[:, :, :first] = True
            if blocks is not None:
                block_of_key = torch.arange(num_keys, device=q.device) // block_size
                hidden |= (blocks[members].long()[..., None] != block_of_key).all(dim=2)
            scores = scores.masked_fill(hidden[:, :, None], -torch.inf)
            # A token that may attend nothing has only -inf scores; its softmax is undefined and its output zero.
            weights = scores.softmax(dim=-1).masked_fill(hidden[:, :, None], 0)
            out[members] = torch.einsum("thgn,nhd->thgd", weights, values).flatten(1, 2).to(q.dtype)
        return out

    def _by_seat(self, tokens: AttendedTokens) -> Iterator[tuple[int, Tensor]]:
        """Yields (seat, places of some of its tokens that see anything), all tokens once."""
        seeing = tokens.kv_len > 0
        for seat in torch.unique(tokens.token_seat[seeing]).tolist():
            members = torch.nonzero(seeing & (tokens.token_seat == seat))[:, 0]
            for part in torch.split(members, _QUERY_CHUNK):
                yield seat, part

    def _write(self, view: core_layout.View, rows: Tensor, tokens: AttendedTokens) -> None:
        places = torch.nonzero(tokens.write_index >= 0)[:, 0]
        index = tokens.write_index[places].long()
        slot, sub_page, token = self._locate(view, tokens.token_seat[places].long(), index)
        tile = tile_tensor(self.pool, view, self.limits.num_slots)
        tile[slot, sub_page, :, token] = rows[places].view(-1, view.heads, view.dim).to(tile.dtype)

    def _gather(self, view: core_layout.View, seat: int, num_keys: int) -> Tensor:
        """Entries 0..num_keys-1 of a seat as fp32 [num_keys, heads, dim]; nothing beyond them is read."""
        index = torch.arange(num_keys, device=self.pool.device)
        slot, sub_page, token = self._locate(view, torch.full_like(index, seat), index)
        return tile_tensor(self.pool, view, self.limits.num_slots)[slot, sub_page, :, token].float()

    def _locate(self, view: core_layout.View, seat: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Splits token indices into (slot, sub-page, token): sub-page q of a sequence is (table[q // r], q % r)."""
        page_of_view = index // view.tokens_per_page
        slot = self.state.block_table[seat, page_of_view // view.sub_pages].long()
        return slot, page_of_view % view.sub_pages, index % view.tokens_per_page


def _unseen(kv_len: Tensor, num_keys: int) -> Tensor:
    """bool [T, num_keys]: key j is not visible to token t, which sees the first kv_len[t]."""
    return torch.arange(num_keys, device=kv_len.device) >= kv_len[:, None]


def block_max(scores: Tensor, block_size: int) -> Tensor:
    """Largest score of each block, blocks anchored at index 0: [T, heads, keys] -> [T, heads, blocks]."""
    missing = -scores.shape[-1] % block_size
    padded = torch.nn.functional.pad(scores, (0, missing), value=-torch.inf)
    return padded.view(*padded.shape[:-1], -1, block_size).amax(dim=-1)


def choose_blocks(block_scores: Tensor, num_valid: Tensor, topk: int, num_local: int) -> Tensor:
    """The topk highest of the blocks that hold a visible key, the lower id first among equals.

    Args:
        block_scores: [T, heads, blocks].
        num_valid: int64 [T], blocks that hold a visible key, at least 1.
        topk: blocks to choose.
        num_local: newest valid blocks taken before any other.

    Returns: int32 [T, heads, topk], ids ascending, then -1.
    """
    block = torch.arange(block_scores.shape[-1], device=block_scores.device)
    age = (num_valid[:, None] - 1 - block)[:, None]
    scores = block_scores.masked_fill((age >= 0) & (age < num_local), torch.inf)
    best_first = scores.sort(dim=-1, descending=True, stable=True).indices[..., :topk]
    taken = torch.arange(best_first.shape[-1], device=block.device) < num_valid[:, None, None]
    ascending = best_first.masked_fill(~taken, torch.iinfo(torch.int64).max).sort(dim=-1).values
    chosen = ascending.masked_fill(~taken, -1).to(torch.int32)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[-1]), value=-1)
