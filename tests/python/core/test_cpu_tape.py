"""Tapes of kernel calls: what a replay does, and what cannot be recorded."""

import gc
import threading
import weakref

import pytest
import torch

from tandem.core import InvalidArgument, cpu

SEED = 20251129


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def recorded(rng: torch.Generator) -> tuple[cpu.Tape, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A tape of a product and a norm of it, its input [3, 8], its output [3, 5] and the weight [5, 8]."""
    weight, x, out = torch.randn(5, 8, generator=rng), torch.randn(3, 8, generator=rng), torch.empty(3, 5)
    packed = cpu.PackedLinear(weight)
    tape = cpu.Tape()
    with tape:
        product = x.new_empty(3, 5)
        cpu.linear(packed, x, product)
        cpu.rms_norm(product, torch.zeros(5), 1e-6, True, out)
    return tape, x, out, weight


def expected(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    product = x @ weight.T
    return product * torch.rsqrt(product.pow(2).mean(-1, keepdim=True) + 1e-6)


def test_recording_makes_the_calls_and_a_replay_makes_them_on_what_the_memory_then_holds(rng):
    tape, x, out, weight = recorded(rng)
    assert tape.num_calls == 2
    torch.testing.assert_close(out, expected(x, weight))
    x.copy_(torch.randn(3, 8, generator=rng))
    tape.replay()
    torch.testing.assert_close(out, expected(x, weight))
    assert tape.num_calls == 2


def test_a_tape_keeps_alive_what_its_calls_use(rng):
    tape, x, out, weight = recorded(rng)
    gc.collect()
    # What takes memory now would take that of the product or of the packed weight, had the tape let go of them.
    others = [torch.full((3, 5), 7.0) for _ in range(64)]
    tape.replay()
    torch.testing.assert_close(out, expected(x, weight))
    assert all(torch.equal(other, torch.full((3, 5), 7.0)) for other in others)


def test_a_tape_that_ends_lets_go_of_its_tensors(rng):
    tape, x, _, _ = recorded(rng)
    watch = weakref.ref(x)
    del x
    assert watch() is not None
    del tape
    gc.collect()
    assert watch() is None


def test_a_failed_recording_leaves_nothing_and_may_be_tried_again(rng):
    packed = cpu.PackedLinear(torch.randn(5, 8, generator=rng))
    x, out = torch.randn(3, 8, generator=rng), torch.empty(3, 5)
    tape = cpu.Tape()

    def record(last_input: torch.Tensor) -> None:
        with tape:
            cpu.linear(packed, x, out)
            cpu.linear(packed, last_input, out)

    with pytest.raises(InvalidArgument, match="the weight takes 8 columns"):
        record(out)
    assert tape.num_calls == 0
    record(x)
    assert tape.num_calls == 2


def test_one_tape_at_a_time_records_and_no_other_is_replayed_into_it(rng):
    tape, _, _, _ = recorded(rng)
    with pytest.raises(InvalidArgument, match="holds 2 calls already"), tape:
        pass
    outer = cpu.Tape()
    with outer:
        with pytest.raises(InvalidArgument, match="records on this thread already"), cpu.Tape():
            pass
        with pytest.raises(InvalidArgument, match="would be missing on it"):
            tape.replay()
    assert outer.num_calls == 0


def test_only_the_calls_of_the_recording_thread_are_on_the_tape(rng):
    packed = cpu.PackedLinear(torch.randn(5, 8, generator=rng))
    x, out = torch.randn(3, 8, generator=rng), torch.empty(3, 5)
    tape = cpu.Tape()
    with tape:
        other = threading.Thread(target=cpu.linear, args=(packed, x, out))
        other.start()
        other.join()
    assert tape.num_calls == 0


def test_a_replay_raises_what_a_call_raises(rng):
    cache = torch.zeros(4, 8)
    rope = cpu.RopeTable(torch.ones(10, 2), torch.zeros(10, 2))
    plan = cpu.NormRope([(0, 1, 8, 4, None)], rope, 1e-6, False)
    positions = torch.tensor([0, 1, 2, 9], dtype=torch.int32)
    tape = cpu.Tape()
    with tape:
        cpu.norm_rope(plan, cache, positions)
    positions[2] = 10
    with pytest.raises(InvalidArgument, match="position 10 of row 2: the rope table has 10"):
        tape.replay()
