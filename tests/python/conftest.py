"""What all Python tests share: a printed seed, one torch thread per worker, and the long runs behind `--soak`."""

import random

import numpy as np
import pytest
import torch

DEFAULT_SEED = 20240607
_SOAK_TIMEOUT_S = 3600


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="run the tests marked soak as well")
    parser.addoption("--seed", type=int, default=DEFAULT_SEED, help="seed of the random tests")


def pytest_configure() -> None:
    # Two workers share two cores; more threads would only wait for each other.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest applies `-m`
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--soak"):
        for item in items:
            if isinstance(item, pytest.Function) and "soak" in item.fixturenames:
                item.add_marker("soak")
            if item.get_closest_marker("soak") is not None:
                item.add_marker(pytest.mark.timeout(_SOAK_TIMEOUT_S))
        return
    soak = [item for item in items if item.get_closest_marker("soak") is not None]
    config.hook.pytest_deselected(items=soak)
    items[:] = [item for item in items if item.get_closest_marker("soak") is None]


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run, printed so that a failure can be repeated with `--seed`."""
    value = int(request.config.getoption("--seed"))
    print(f"seed {value}")
    return value


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A numpy generator of its own for each test."""
    return np.random.default_rng(seed)


@pytest.fixture
def py_rng(seed: int) -> random.Random:
    """A standard-library generator of its own for each test."""
    return random.Random(seed)


@pytest.fixture
def torch_rng(seed: int) -> torch.Generator:
    """A torch CPU generator of its own for each test."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether this is a long run; random tests take more rounds then."""
    return bool(request.config.getoption("--soak"))
