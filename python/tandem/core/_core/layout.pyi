"""Tiles, shards, slots and views."""

from collections.abc import Sequence
import enum
from typing import Annotated

import numpy
from numpy.typing import NDArray


class ElementType(enum.Enum):
    """How one number of a tile is stored."""

    BF16 = 0
    """bfloat16, 2 bytes."""

    FP16 = 1
    """IEEE binary16, 2 bytes."""

    FP32 = 2
    """IEEE binary32, 4 bytes."""

    FP8_E4M3 = 3
    """1 byte, finite values and NaN only."""

    NVFP4 = 4
    """
    Two E2M1 numbers a byte; every 16 along dim share a scale, held by the tile K_SCALE or V_SCALE.
    """

class Role(enum.Enum):
    """What a tile holds."""

    K = 0
    """Keys."""

    V = 1
    """Values."""

    INDEX_K = 2
    """Index keys of block selection."""

    K_SCALE = 3
    """FP8_E4M3 scales of an NVFP4 K tile, one per 16 numbers."""

    V_SCALE = 4
    """FP8_E4M3 scales of an NVFP4 V tile, one per 16 numbers."""

class TileSpec:
    """
    One (layer, role) of the cache as a model declares it: per page and head, `[tokens_per_page, dim]` numbers of `dtype`. Immutable; checked when a CacheLayout is built.
    """

    def __init__(self, layer: int, role: Role, dtype: ElementType, heads: int, dim: int, replicated: bool = False) -> None: ...

    @property
    def layer(self) -> int:
        """Layer of the cache, from 0."""

    @property
    def role(self) -> Role:
        """What it holds."""

    @property
    def dtype(self) -> ElementType:
        """How a number is stored."""

    @property
    def heads(self) -> int:
        """Global heads, over all ranks."""

    @property
    def dim(self) -> int:
        """Numbers per token and head (of a scale tile: scales)."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all heads."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class Shard:
    """
    The part of the head axis that one rank holds. A section with at least `size` heads gives each rank heads/size consecutive ones; one with fewer gives rank r head r*heads//size.
    """

    def __init__(self, size: int = 1, rank: int = 0) -> None: ...

    @property
    def size(self) -> int:
        """Number of ranks."""

    @property
    def rank(self) -> int:
        """This rank, from 0."""

    def __eq__(self, other: object, /) -> bool: ...

    def __hash__(self) -> int: ...

    def __repr__(self) -> str: ...

class View:
    """
    An affine map from (slot, local head, sub-page, token) to bytes of the pool, for one (layer, role). A page is seen as `sub_pages` pages of `tokens_per_page` tokens; page q of a sequence in these units is `(table[q // sub_pages], q % sub_pages)`. Offsets and strides are bytes.
    """

    @property
    def layer(self) -> int:
        """Layer of the cache."""

    @property
    def role(self) -> Role:
        """What the tile holds."""

    @property
    def dtype(self) -> ElementType:
        """How a number is stored."""

    @property
    def heads(self) -> int:
        """Heads that this rank holds."""

    @property
    def dim(self) -> int:
        """Numbers per token and head."""

    @property
    def tokens_per_page(self) -> int:
        """Tokens of one page of this view."""

    @property
    def sub_pages(self) -> int:
        """Pages of this view in one page of the layout."""

    @property
    def base_offset(self) -> int:
        """Of slot 0, head 0, sub-page 0, token 0."""

    @property
    def slot_stride(self) -> int:
        """From a slot to the next."""

    @property
    def head_stride(self) -> int:
        """From a head to the next."""

    @property
    def sub_page_stride(self) -> int:
        """From a sub-page to the next."""

    @property
    def token_stride(self) -> int:
        """From a token to the next."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, contiguous."""

    @property
    def sub_page_bytes(self) -> int:
        """Bytes of one sub-page of one head, contiguous."""

    def bound(self, num_slots: int) -> int:
        """
        First byte past all that the view addresses in a pool of `num_slots` slots. Raises InvalidArgument for a negative count.
        """

    def offset(self, slot: int, head: int, sub_page: int, token: int) -> int:
        """
        First byte of one token of one local head. Raises InvalidArgument for a coordinate out of range.
        """

    def flat_ids(self, table: Annotated[NDArray[numpy.int32], dict(order='C', device='cpu', writable=False)], num_slots: int, head: int = 0) -> NDArray[numpy.int32]:
        """
        Sub-page numbers for a kernel that sees the pool as one array of `sub_page_bytes` units.

        `table`: int32 slots `[..., pages]`, -1 where there is none. Returns int32 `[..., pages * sub_pages]` for local head `head`, -1 for -1. Raises InvalidArgument, saying why, unless the sub-page size divides the base offset and every stride, for a slot outside the pool, and for a number past 32 bits.
        """

    def __eq__(self, other: object, /) -> bool: ...

    def __repr__(self) -> str: ...

class Section:
    """
    The part of a slot whose tiles have the same global head count: head after head, each with all its tiles. Replicated sections come last.
    """

    @property
    def global_heads(self) -> int:
        """Heads over all ranks."""

    @property
    def replicated(self) -> bool:
        """Whether every rank holds all of them."""

    @property
    def heads(self) -> int:
        """Heads that this rank holds."""

    @property
    def first_head(self) -> int:
        """Global number of the first of them."""

    @property
    def replicas(self) -> int:
        """Ranks that hold the same heads."""

    @property
    def offset(self) -> int:
        """Bytes from the slot's start."""

    @property
    def head_stride(self) -> int:
        """Bytes from a head to the next."""

    @property
    def bytes(self) -> int:
        """Bytes of the section."""

class CacheLayout:
    """
    How every tile of a model's cache lies in a slot: sections by global head count, heads outermost in them, each tile `[tokens, dim]` and contiguous. Built once; views, sizes and bounds are derived from it.
    """

    def __init__(self, tiles: Sequence[TileSpec], tokens_per_page: int, shard: Shard = ..., alignment: int = 128) -> None:
        """
        Places `tiles` (any order) in slots of `tokens_per_page` tokens for one rank. Tile starts and the strides of heads, sections and slots are multiples of `alignment` bytes, a power of two of at least 128. Raises InvalidArgument, naming the tile, what was given and what is allowed.
        """

    @property
    def tiles(self) -> list[TileSpec]:
        """The declared tiles, ordered by (layer, role)."""

    @property
    def sections(self) -> list[Section]:
        """In the order of their offsets."""

    @property
    def tokens_per_page(self) -> int:
        """Tokens of one page."""

    @property
    def shard(self) -> Shard:
        """The rank that it is for."""

    @property
    def alignment(self) -> int:
        """Bytes."""

    @property
    def slot_bytes(self) -> int:
        """Bytes from a slot to the next, padding included."""

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's entries on this rank, padding not counted."""

    def view(self, layer: int, role: Role, tokens_per_page: int | None = None) -> View:
        """
        The view of one tile in pages of `tokens_per_page` tokens (the layout's own where None). Raises InvalidArgument if there is no such tile or the page size does not divide the layout's.
        """

    def digest(self) -> str:
        """
        32 hex digits over tiles, page size, shard and alignment. Equal digests: every byte of a slot means the same.
        """

    def content_digest(self) -> str:
        """
        32 hex digits over what two peers must have in common to exchange pages: each tile's layer, role, dtype, global heads, dim and replication.
        """

    def to_dict(self) -> dict[str, object]:
        """A dict of plain values that `from_dict` takes."""

    @staticmethod
    def from_dict(described: dict[str, object]) -> CacheLayout:
        """
        The layout that a dict describes. Unknown keys are ignored; `replicated`, `shard` and `alignment` have defaults; the version must be known. Raises InvalidArgument for a missing key or a value of the wrong type, and names it.
        """

    def __repr__(self) -> str: ...
