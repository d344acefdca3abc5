"""The C++ runtime: ``layout``, ``kv``, ``sched`` and ``cpu``."""

from tandem.core._core import InvalidArgument, cpu, kv, layout, sched

__all__ = ["InvalidArgument", "cpu", "kv", "layout", "sched"]
