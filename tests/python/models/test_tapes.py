"""Steps as tapes: the same bits as without one, and no torch operation that a replay would miss."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from models.runner import Runner
from models.support import Shape, random_weights, text_config, wrapped_config, write_checkpoint
from tandem.models import CpuOps, MiniMaxM3, MiniMaxM3Config, load_model, tapes
from tandem.models.tapes import MAX_TAPED_TOKENS, NotAKernelError, Tapes
from tandem.msa import CpuBackend

SEED = 7


class UntapedBackend(CpuBackend):
    """The same kernels, called one by one."""

    kernels_only = False


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> MiniMaxM3:
    text = text_config(Shape(layers="dss"))
    weights = random_weights(MiniMaxM3Config.from_dict(text), SEED)
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("tapes"), wrapped_config(text), weights)
    return load_model(folder, torch.float32, CpuOps())


@pytest.mark.parametrize("capture", [(), (0, 1, 3), (2,)], ids=str)
def test_taped_steps_give_the_bits_of_untaped_ones(model, capture):
    taped, untaped = (Runner(model, backend, 400) for backend in (CpuBackend, UntapedBackend))
    ids = torch.randint(3, 60, (400,), generator=torch.Generator().manual_seed(SEED)).tolist()
    sizes = [130, 1, 1, 4, 1, 4, MAX_TAPED_TOKENS, MAX_TAPED_TOKENS + 1, 1, MAX_TAPED_TOKENS, 4, 1, 1]
    earlier = []
    for size in sizes:
        part = ids[taped.num_tokens : taped.num_tokens + size]
        for runner in (taped, untaped):
            runner.state.last_token[1] = part[0]
        logits, states = taped.feed(part, capture)
        plain_logits, plain_states = untaped.feed(part, capture)
        assert torch.equal(logits, plain_logits)
        assert len(states) == len(capture)
        assert all(torch.equal(state, plain) for state, plain in zip(states, plain_states, strict=True))
        earlier.append((states, plain_states))
    # What a step returned is not overwritten by the ones after it.
    assert all(torch.equal(state, plain) for pair in earlier for state, plain in zip(*pair, strict=True))
    assert len(model._tapes._by_cache[taped.backend]._taped) >= 3
    assert untaped.backend not in model._tapes._by_cache


def test_a_step_keeps_what_it_returned_while_later_steps_capture_other_layers(model):
    taped, untaped = (Runner(model, backend, 40) for backend in (CpuBackend, UntapedBackend))
    returned = []
    for capture in [(1,), (2,), (), (1,), (1, 2), (2,), ()]:
        token = 5 + taped.num_tokens
        for runner in (taped, untaped):
            runner.state.last_token[1] = token
            logits, states = runner.feed([token], capture)
            hidden = model.forward(runner.meta.token_ids, runner.meta, runner.backend)[0]
            returned.append([logits, hidden, *states])
    for given, expected in zip(returned[::2], returned[1::2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(given, expected, strict=True))


@pytest.mark.parametrize("most", [2, 3, 4, 5, 6, 7])
def test_when_there_are_too_many_tapes_those_of_a_pass_are_forgotten_together(model, most, monkeypatch):
    """One part of a pass, recorded anew, used to write where the next part's tape no longer read."""
    monkeypatch.setattr(tapes, "_MAX_TAPES", most)
    taped, untaped = (Runner(model, backend, 60) for backend in (CpuBackend, UntapedBackend))
    for size in [1, 2, 3, 1, 2, 1, 3, 3, 2, 2, 1, 1]:
        part = [5 + taped.num_tokens + i for i in range(size)]
        for runner in (taped, untaped):
            runner.state.last_token[1] = part[0]
        logits, states = taped.feed(part, (1, 2))
        plain_logits, plain_states = untaped.feed(part, (1, 2))
        assert torch.equal(logits, plain_logits)
        assert all(torch.equal(state, plain) for state, plain in zip(states, plain_states, strict=True))
        assert len(model._tapes._by_cache[taped.backend]._taped) <= max(most, 3)


def test_tapes_end_with_the_cache_that_they_read(model):
    runner = Runner(model, CpuBackend, 40)
    runner.feed([5, 6, 7])
    assert runner.backend in model._tapes._by_cache
    before = len(model._tapes._by_cache)
    del runner
    gc.collect()
    assert len(model._tapes._by_cache) == before - 1


def test_a_torch_operation_that_computes_is_refused_by_name():
    taped = Tapes()
    with pytest.raises(NotAKernelError, match=r"aten\.add\.Tensor"):
        taped.run("sum", lambda: torch.empty(2) + torch.empty(2))
    # Nothing was kept: the next call records again.
    assert taped.run("sum", lambda: torch.empty(2)).shape == (2,)


def test_captures_that_do_not_ascend_are_refused(model):
    runner = Runner(model, CpuBackend, 40)
    with pytest.raises(ValueError, match=r"capture is \(2, 1\)"):
        runner.feed([5, 6, 7], (2, 1))
    with pytest.raises(ValueError, match=r"capture is \(4,\); allowed are .* 0 to 3"):
        runner.feed([5, 6, 7], (4,))


def test_recording_does_not_import_the_compiler() -> None:
    """It takes seconds, which the first token would wait for."""
    code = (
        "import sys, torch; from tandem.models.tapes import Tapes; x = torch.ones(2);"
        "Tapes().run(0, lambda: torch.empty_like(x)); print('torch._dynamo' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout == "False\n"
