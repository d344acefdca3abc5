"""What attention needs to know of a model beyond the shapes that the cache layout has."""

from dataclasses import dataclass


class GeometryError(ValueError):
    """An attention geometry that a backend cannot serve; the message names what was given and what is allowed."""


@dataclass(frozen=True)
class SparseGeometry:
    """Block selection of a sparse layer (MSA).

    Attributes:
        block_size: tokens of a block.
        topk: blocks per token and index head, forced ones included.
        num_local: newest blocks that are always chosen, the token's own first.
    """

    block_size: int
    topk: int
    num_local: int

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.topk < 1 or not 0 <= self.num_local <= self.topk:
            raise GeometryError(
                f"block_size {self.block_size}, topk {self.topk}, num_local {self.num_local}: "
                "allowed are positive sizes and at most topk local blocks"
            )


@dataclass(frozen=True)
class LayerGeometry:
    """One attention layer; heads are those of the rank.

    Attributes:
        layer: id of the layer in the cache layout.
        num_q_heads: query heads; each KV head serves num_q_heads / num_kv_heads consecutive ones.
        scale: factor of the scores before the softmax.
        sparse: how blocks are selected; None for full attention.
        first_index_attended: keys below this index are never attended (1 for a draft layer, whose entry 0 is unused).
    """

    layer: int
    num_q_heads: int
    scale: float
    sparse: SparseGeometry | None = None
    first_index_attended: int = 0
