"""Damage to the drafter's cache on purpose: what acceptance must show, since the text cannot.

The drafter reads its pages as a transfer would leave them that mistook their order of axes. Nothing in the cache
changes, and nothing of the target: its text stays the same, and only the drafts get worse. It is a debug hook of the
acceptance probe and the server's alarm and of no use for anything else.
"""

import torch
from torch import Tensor

from tandem.core import layout as core_layout
from tandem.msa.backend import AttendedTokens, AttentionBackend
from tandem.msa.tiles import tile_tensor

_TOKEN_GROUPS = 4


class InvalidDamageError(ValueError):
    """A description of damage that cannot be read, or names a layer or group that the model does not have."""


def misread_drafts(backend: AttentionBackend) -> AttentionBackend:
    """A backend that behaves as `backend`, but that the draft layer's pages are read in the wrong order of axes.

    They are stored in groups of tokens with the heads inside, for a reader to whom heads come first. Raises
    `InvalidDamageError` where there is no draft layer, or one that the damage would leave as it is.
    """
    layer = draft_layer(backend)
    heads, tokens = backend.layer(layer).k.heads, backend.layout.tokens_per_page
    rows = misread_rows(heads, tokens)
    if torch.equal(rows, torch.arange(heads * tokens)):
        raise InvalidDamageError(f"damage draft-kv is not allowed: {heads} KV head in one order of axes is in any")
    return MisreadDraftBackend(backend, layer, rows)


def draft_layer(backend: AttentionBackend) -> int:
    """The drafter's layer, which alone stores nothing at index 0. Raises `InvalidDamageError` where there is none."""
    layers = [key for key, cached in backend.layers.items() if cached.geometry.first_index_attended > 0]
    if not layers:
        raise InvalidDamageError("damage draft-kv is not allowed: there is no drafter")
    return layers[0]


def misread_rows(heads: int, tokens_per_page: int) -> Tensor:
    """Which entry a reader finds at each place of a page who takes [group][head][token] for [head][token].

    The page is stored in 4 groups of consecutive tokens, each with all heads. Entries and places are numbered
    head * tokens_per_page + token. Returns int64 [heads * tokens_per_page], a permutation that moves keys and values
    together, but from head to head. (Within a head it would change nothing: attention over tokens that are all visible
    does not depend on where they are stored.)

    Raises `InvalidDamageError` for a page that 4 groups do not divide.
    """
    if tokens_per_page % _TOKEN_GROUPS != 0:
        raise InvalidDamageError(
            f"damage draft-kv is not allowed: 4 groups do not divide {tokens_per_page} tokens per page"
        )
    entries = torch.arange(heads * tokens_per_page)
    return entries.view(heads, _TOKEN_GROUPS, -1).transpose(0, 1).flatten()


class MisreadDraftBackend(AttentionBackend):
    """Delegates everything, but lets one layer attend to a copy of its pages with their entries moved.

    Args:
        inner: the backend.
        layer: the layer, one of full attention.
        rows: the entry that is found at each place of a page, as `misread_rows` returns it.

    Entries that no token of a call sees are dead, and read as zeros where they come into sight.
    """

    def __init__(self, inner: AttentionBackend, layer: int, rows: Tensor) -> None:
        cached = [entry.geometry for entry in inner.layers.values()]
        super().__init__(inner.layout, inner.pool, inner.limits, inner.state, cached)
        self._inner = inner
        self._layer = layer
        self._rows = rows
        tiles = [tile for tile in inner.layout.tiles if tile.layer == layer]
        # Slots have the same ids as in the pool, so the block table serves both.
        copy_layout = core_layout.CacheLayout(tiles, inner.layout.tokens_per_page)
        copy = torch.empty(inner.limits.num_slots * copy_layout.slot_bytes, dtype=torch.uint8, device=inner.pool.device)
        self._copy = type(inner)(copy_layout, copy, inner.limits, inner.state, [inner.layer(layer).geometry])

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:  # noqa: D102
        self._inner.write(layer, k, v, index_k, tokens)

    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        return self._inner.select(layer, index_q, tokens)

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        if layer != self._layer:
            return self._inner.attend(layer, q, blocks, tokens)
        for seat in torch.unique(tokens.token_seat[tokens.kv_len > 0]).tolist():
            self._copy_pages(seat, int(tokens.kv_len[tokens.token_seat == seat].max()))
        return self._copy.attend(layer, q, blocks, tokens)

    def _copy_pages(self, seat: int, num_entries: int) -> None:
        """Copies the pages of a seat's first `num_entries` entries, with every entry where it is found."""
        source, target = self._inner.layer(self._layer), self._copy.layer(self._layer)
        num_slots, page = self.limits.num_slots, self.layout.tokens_per_page
        slots = self.state.block_table[seat, : -(-num_entries // page)].long()[:, None]
        head, token = self._rows // page, self._rows % page
        index = torch.arange(len(slots), device=slots.device)[:, None] * page + token
        dead = (index < source.geometry.first_index_attended) | (index >= num_entries)
        for read, write in ((source.k, target.k), (source.v, target.v)):
            # A view in whole pages has one sub-page; [pages, heads * tokens, dim].
            found = tile_tensor(self.pool, read, num_slots)[slots, 0, head, token].masked_fill_(dead[..., None], 0)
            tile_tensor(self._copy.pool, write, num_slots)[slots[:, 0], 0] = found.view(len(slots), -1, page, read.dim)
