"""Tiny pairs of target and drafter, loaded once for each kind of drafter."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from tandem.core import cpu
from tandem.models import CpuOps
from tests.python.models.eagle3_support import DraftShape, Pair, load_pair


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    cpu.set_num_threads(1)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[DraftShape], Pair]:
    """The pair of a drafter's shape, on the CPU kernels in fp32; its seed is fixed."""

    @cache
    def load(key: str) -> Pair:
        return load_pair(tmp_path_factory.mktemp("pair"), shapes[key], CpuOps(), seed=11)

    shapes: dict[str, DraftShape] = {}

    def pair(shape: DraftShape) -> Pair:
        shapes[repr(shape)] = shape
        return load(repr(shape))

    return pair
