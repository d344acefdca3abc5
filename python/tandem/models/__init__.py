"""Models: configuration, checkpoint loading, layers, and the equations that put them together."""

from tandem.models.config import MiniMaxM3Config
from tandem.models.errors import CheckpointError, ConfigError, TensorMismatchError
from tandem.models.layers.ops import CpuOps, Ops, ReferenceOps
from tandem.models.minimax_m3 import MiniMaxM3, attention_geometry, load_model, tile_specs

__all__ = [
    "CheckpointError",
    "ConfigError",
    "CpuOps",
    "MiniMaxM3",
    "MiniMaxM3Config",
    "Ops",
    "ReferenceOps",
    "TensorMismatchError",
    "attention_geometry",
    "load_model",
    "tile_specs",
]
