"""Tandem's C++ runtime: one submodule per library."""

from tandem.core._core import (
    cpu as cpu,
    kv as kv,
    layout as layout,
    sched as sched
)


class InvalidArgument(ValueError):
    pass
