"""Which calls of the extension give the GIL up: kernels do, the scheduler's quick calls do not."""

import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from tandem.core import cpu, sched


@pytest.fixture
def turns_of_others() -> Iterator[Callable[[Callable[[], object]], int]]:
    """Counts how often another Python thread got its turn during a call.

    The other thread takes the GIL whenever it is free and gives it back at once. The interval after which the
    interpreter takes the GIL from a running thread is made so long that only the call itself can let go of it.
    """
    turns = 0
    stop = False

    def take_turns() -> None:
        nonlocal turns
        while not stop:
            turns += 1
            time.sleep(0)

    def measure(call: Callable[[], object]) -> int:
        before = turns
        call()
        return turns - before

    interval = sys.getswitchinterval()
    other = threading.Thread(target=take_turns)
    other.start()
    sys.setswitchinterval(1000.0)
    # A wait for the GIL that began under the old interval ends here.
    time.sleep(0.05)
    yield measure
    stop = True
    sys.setswitchinterval(interval)
    other.join()


def test_the_measurement_tells_a_call_that_lets_go_from_one_that_does_not(turns_of_others):
    assert turns_of_others(lambda: time.sleep(0.02)) > 0
    assert turns_of_others(lambda: sum(range(1_000_000))) == 0


def test_a_long_kernel_lets_other_threads_run(turns_of_others):
    weight = torch.randn(1024, 1024)
    packed = cpu.PackedLinear(weight)
    x = torch.randn(512, 1024)
    out = torch.empty(512, 1024)
    assert turns_of_others(lambda: cpu.linear(packed, x, out)) > 0
    assert torch.allclose(out, x @ weight.T, atol=1e-2)


def test_packing_weights_lets_other_threads_run(turns_of_others):
    weight = torch.randn(2048, 2048)
    assert turns_of_others(lambda: cpu.PackedLinear(weight)) > 0


def test_submit_plan_complete_and_queries_keep_the_gil(turns_of_others):
    config = sched.SchedulerConfig(
        num_slots=256, tokens_per_page=16, max_seats=64, max_tokens_per_step=2048, max_model_len=512, overlap=False
    )
    scheduler = sched.Scheduler(config)
    prompt = np.arange(20, dtype=np.int32)  # made here, since arange itself lets go of the GIL

    def serve() -> None:
        ids = [scheduler.submit(sched.RequestSpec(prompt, max_tokens=8)) for _ in range(64)]
        while (plan := scheduler.plan()) is not None:
            rows = plan.num_sampling_rows
            one, none = np.ones(rows, dtype=np.int32), np.zeros(rows, dtype=np.int32)
            scheduler.complete(sched.StepResult(plan.step_id, one, none, one, none))
            scheduler.stats()
            scheduler.ledger()
        assert len(ids) == 64

    assert turns_of_others(serve) == 0
    assert scheduler.num_unfinished == 0
