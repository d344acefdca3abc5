"""Shape of the demo model: production tile geometry, everything else small."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Widths and counts of one model; the defaults are the shipped model's."""

    vocab_size: int = 2048
    hidden: int = 192
    num_layers: int = 8
    num_dense_layers: int = 3
    num_heads: int = 8
    num_groups: int = 4
    head_dim: int = 128
    rotary_dim: int = 64
    rope_theta: float = 5e6
    eps: float = 1e-6
    dense_width: int = 768
    expert_width: int = 128
    num_experts: int = 8
    experts_per_token: int = 2
    routed_scale: float = 2.0
    index_dim: int = 128
    block: int = 128
    topk_blocks: int = 4
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    max_length: int = 16384

    @property
    def num_sparse_layers(self) -> int:
        return self.num_layers - self.num_dense_layers

    @property
    def heads_per_group(self) -> int:
        return self.num_heads // self.num_groups

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """Layers run before each state that a drafter takes; Eagle3's rule."""
        return 2, self.num_layers // 2, self.num_layers - 3

    def is_sparse(self, layer: int) -> bool:
        return layer >= self.num_dense_layers

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tiny() -> Shape:
    """Return a shape with every part of the real one, for trying the pipeline on a CPU."""
    return Shape(
        hidden=64, num_heads=4, num_groups=4, head_dim=32, rotary_dim=16, dense_width=64, expert_width=32, index_dim=32
    )
