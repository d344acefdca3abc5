"""Step metadata, and attention over the paged cache: one interface, interchangeable backends."""

from tandem.msa.backend import AttendedTokens, AttentionBackend
from tandem.msa.cpu import CpuBackend
from tandem.msa.geometry import GeometryError, LayerGeometry, SparseGeometry
from tandem.msa.limits import LimitError, Limits
from tandem.msa.metadata import StepMetadata, advance, apply_table_changes, derive
from tandem.msa.plan_rows import PlanArrays, PlanRows, RowKind
from tandem.msa.reference import ReferenceBackend
from tandem.msa.state import SeatState
from tandem.msa.tiles import tile_tensor

__all__ = [
    "AttendedTokens",
    "AttentionBackend",
    "CpuBackend",
    "GeometryError",
    "LayerGeometry",
    "LimitError",
    "Limits",
    "PlanArrays",
    "PlanRows",
    "ReferenceBackend",
    "RowKind",
    "SeatState",
    "SparseGeometry",
    "StepMetadata",
    "advance",
    "apply_table_changes",
    "derive",
    "tile_tensor",
]
