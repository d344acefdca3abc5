"""An engine that cannot be built, at whatever of its parts that shows, leaves no thread and no memory behind."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tandem import LLM
from tandem.core import sched
from tandem.engine import build, runner
from tandem.engine.params import SamplingParams
from tandem.models import eagle3
from tests.python.engine.checkpoint import make_checkpoint, make_drafter

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

PARTS: dict[str, tuple[Any, str]] = {
    "configuration": (build.MiniMaxM3Config, "from_pretrained"),
    "tiles": (build, "_cached_layers"),
    "sizes": (build, "_resolve"),
    "weights": (build, "load_model"),
    "poison": (build, "PoolPoison"),
    "seats": (build, "SeatState"),
    "attention": (build, "CpuBackend"),
    "drafter's weights": (eagle3, "load_drafter"),
    "draft worker": (build, "DraftWorker"),
    "scheduler": (sched, "Scheduler"),
    "step metadata": (runner, "StepMetadata"),
    "sampling seats": (runner, "SamplingSeats"),
    "step thread": (runner, "StepThread"),
    "runner": (build, "ModelRunner"),
    "end ids": (build, "_end_ids"),
    "engine": (build, "Engine"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "model")
    make_drafter(path / "eagle3", seed=1)
    return path


def start(folder: Path) -> LLM:
    return LLM(folder, num_threads=1, poison_pool=True, max_seats=2)


def own_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("tandem")}


def require_no_thread(before: set[threading.Thread]) -> None:
    """No other than those of before; a thread that was told to end needs a moment to do so."""
    deadline = time.monotonic() + 20
    while own_threads() - before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert own_threads() - before == set()


@pytest.mark.parametrize("part", PARTS)
def test_a_fault_while_a_part_is_made_leaves_nothing_and_the_next_engine_is_right(
    part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The part itself is there already when the fault comes, and so are all before it."""
    before = own_threads()
    pools: list[weakref.ref[Any]] = []
    owner, name = PARTS[part]
    make: Callable[..., Any] = getattr(owner, name)
    make_state = build.SeatState
    made: list[weakref.ref[Any]] = []

    def state(limits: Any) -> Any:
        made.append(weakref.ref(result := make_state(limits)))
        return result

    def fail(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        pools.extend(weakref.ref(value) for value in args if isinstance(value, build.torch.Tensor))
        raise MemoryError(f"no room for the {part}")

    def refused() -> None:
        with pytest.raises(MemoryError, match=f"no room for the {part}"):
            start(folder)

    with monkeypatch.context() as patch:
        patch.setattr(build, "SeatState", state)
        patch.setattr(owner, name, fail)
        refused()
    require_no_thread(before)
    gc.collect()
    assert [each() for each in (*pools, *made) if each() is not None] == []
    assert len(pools) == (part in ("poison", "attention"))
    with start(folder) as llm:
        output = llm.generate("hello", GREEDY, progress=False)[0]
        assert (output.finish_reason, output.completion_tokens) == ("length", 8)
        ledger = llm.stats().ledger
        assert ledger.free + ledger.cached == ledger.total
    require_no_thread(before)
