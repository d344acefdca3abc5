"""Damage to block selection on purpose: what an evaluation must notice, to show that it would.

Selections read the index keys of other pages. Nothing in the cache changes: the damaged heads choose their blocks
through a block table in which every full page of a sequence stands in another one's place. It is a debug hook of the
evaluations and of no use for anything else.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.msa.backend import AttendedTokens, AttentionBackend
from tandem.msa.state import SeatState
from tandem.spec.damage import InvalidDamageError

_SEED = 1


@dataclass(frozen=True)
class IndexKeyDamage:
    """Which selections read wrong index keys: those of one (layer, group), or all where it is None."""

    home: tuple[int, int] | None = None

    @classmethod
    def parse(cls, text: str) -> "IndexKeyDamage":
        """Reads `index-keys` or `index-keys:LAYER,GROUP`."""
        kind, colon, place = text.partition(":")
        parts = place.split(",")
        if kind == "index-keys" and not colon:
            return cls()
        if kind == "index-keys" and len(parts) == 2 and all(part.isdecimal() for part in parts):
            return cls((int(parts[0]), int(parts[1])))
        raise InvalidDamageError(f"damage {text!r} is not allowed: index-keys, or index-keys:LAYER,GROUP")

    def wrap(self, backend: AttentionBackend) -> AttentionBackend:
        """A backend that behaves as `backend` but for the damaged selections."""
        return DamagedIndexBackend(backend, self)


class DamagedIndexBackend(AttentionBackend):
    """Delegates everything, but lets some selections see each page's index keys in another page's place."""

    def __init__(self, inner: AttentionBackend, damage: IndexKeyDamage) -> None:
        """Raises `InvalidDamageError` where the damage names no sparse layer of `inner`, or no group of that layer."""
        geometry = [cached.geometry for cached in inner.layers.values()]
        super().__init__(inner.layout, inner.pool, inner.limits, inner.state, geometry)
        self._inner = inner
        self._home = damage.home
        if damage.home is not None:
            self._check(*damage.home)
        self._shuffled_state = SeatState(inner.limits, inner.state.device)
        self._shuffled = type(inner)(inner.layout, inner.pool, inner.limits, self._shuffled_state, geometry)

    def _check(self, layer: int, group: int) -> None:
        sparse = sorted(key for key, cached in self.layers.items() if cached.geometry.sparse is not None)
        if layer not in sparse:
            raise InvalidDamageError(f"layer {layer} selects no blocks; sparse layers are {sparse}")
        groups = self.layers[layer].k.heads
        if group >= groups:
            raise InvalidDamageError(f"layer {layer} has no group {group}; it has {groups}")

    def write(self, layer: int, k: Tensor, v: Tensor, index_k: Tensor | None, tokens: AttendedTokens) -> None:  # noqa: D102
        self._inner.write(layer, k, v, index_k, tokens)

    def select(self, layer: int, index_q: Tensor, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        chosen = self._inner.select(layer, index_q, tokens)
        if self._home is not None and self._home[0] != layer:
            return chosen
        self._shuffle_pages(tokens)
        wrong = self._shuffled.select(layer, index_q, tokens)
        if self._home is None:
            return wrong
        damaged = chosen.clone()
        damaged[:, self._home[1]] = wrong[:, self._home[1]]
        return damaged

    def attend(self, layer: int, q: Tensor, blocks: Tensor | None, tokens: AttendedTokens) -> Tensor:  # noqa: D102
        return self._inner.attend(layer, q, blocks, tokens)

    def _shuffle_pages(self, tokens: AttendedTokens) -> None:
        """Copies the block table, the full pages of every sequence of the step in an order that moves each of them."""
        table = self._shuffled_state.block_table
        table.copy_(self.state.block_table)
        for seat in torch.unique(tokens.token_seat[tokens.kv_len > 0]).tolist():
            longest = int(tokens.kv_len[tokens.token_seat == seat].max())
            order = moved_order(longest // self.layout.tokens_per_page)
            table[seat, : len(order)] = self.state.block_table[seat, order]


def moved_order(count: int) -> list[int]:
    """A permutation of range(count) that is one cycle, the same for equal counts: nothing stays in its place.

    Source: Sattolo, An algorithm to generate a random cyclic permutation, 1986. A count of 1 or 0 has nothing to move.
    """
    rng = random.Random(_SEED + count)
    order = list(range(count))
    for place in range(count - 1, 0, -1):
        other = rng.randrange(place)
        order[place], order[other] = order[other], order[place]
    return order
