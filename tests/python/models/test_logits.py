"""On random models we compute what transformers' MiniMax-M3 computes: logits, greedy tokens, captured states."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.core import layout
from tandem.models import MiniMaxM3Config, load_model

from .comparison import IMPLEMENTATIONS, assert_same_model, generated
from .runner import Runner
from .support import Shape, random_weights, text_config, transformers_model, wrapped_config, write_checkpoint

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Case:
    """A random model, a prompt length beyond topk * block, and how the prompt is cut into steps."""

    shape: Shape
    num_prompt: int
    chunks: tuple[int, ...]


# Between them: every layer kind in several orders, one to six query heads per KV head, rotary parts of a quarter, half
# and all of the head, index heads narrower and wider than the head, blocks of 8 to 64, one and two local blocks, and
# prompts cut nowhere, at block edges, beside them, and into single tokens; in two of them the activation's clamps bite
# and every factor differs from the released model's.
ODD_FACTORS = {
    "swiglu_limit": 0.75,
    "swiglu_alpha": 1.25,
    "routed_scaling_factor": 1.5,
    "rope_theta": 10000,
    "rms_norm_eps": 1e-2,
}
CASES = {
    "as_released": Case(Shape(layers="dddss"), 150, (150,)),
    "cut_at_block_edges": Case(
        Shape(heads=8, kv_heads=4, block=8, topk=3, layers="dsss", extra=ODD_FACTORS), 120, (8, 64, 48)
    ),
    "cut_beside_block_edges": Case(
        Shape(heads=6, kv_heads=1, head_dim=16, rotary_dim=16, local=2), 140, (17, 15, 1, 107)
    ),
    "single_tokens": Case(
        Shape(layers="ssd", kv_heads=4, index_dim=16, block=8, topk=2, experts_per_token=3), 40, (1,) * 40
    ),
    "mixed_layers": Case(
        Shape(layers="edas", extra=ODD_FACTORS, hidden=48, head_dim=64, index_dim=64, block=32, topk=2), 130, (100, 30)
    ),
    "wide_blocks": Case(
        Shape(block=64, topk=2, local=1, experts=16, experts_per_token=4, rotary_dim=8), 300, (129, 171)
    ),
}


@dataclass(frozen=True)
class Oracle:
    folder: Path
    prompt: list[int]
    model: Any

    def logits(self, ids: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return transformers' logits [T, V] and hidden states, one per layer and the embedding."""
        with torch.no_grad():
            out = self.model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
        return out.logits[0], [state[0] for state in out.hidden_states]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @lru_cache
    def build(name: str) -> Oracle:
        case = CASES[name]
        text = text_config(case.shape)
        seed = list(CASES).index(name)
        tensors = random_weights(MiniMaxM3Config.from_dict(text), seed)
        folder = write_checkpoint(tmp_path_factory.mktemp(name), wrapped_config(text), tensors)
        generator = torch.Generator().manual_seed(1000 + seed)
        prompt = torch.randint(case.shape.vocab, (case.num_prompt,), generator=generator).tolist()
        return Oracle(folder, prompt, transformers_model(text, tensors))

    return build


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_logits_and_greedy_tokens_equal_those_of_transformers(oracle: Any, name: str, implementation: str) -> None:
    truth = oracle(name)
    ops, backend = IMPLEMENTATIONS[implementation]
    model = load_model(truth.folder, torch.float32, ops())
    ids, ours = generated(model, backend, truth.prompt, CASES[name].chunks)
    theirs, _ = truth.logits(ids[:-1])
    assert_same_model(ids, ours, theirs, len(truth.prompt))
    if implementation == "reference":
        # The prompt is long enough that the choice of blocks matters.
        config = model.config
        assert len(truth.prompt) > config.topk_blocks * config.block_size


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_captured_states_are_the_residual_stream_after_so_many_layers(oracle: Any, implementation: str) -> None:
    truth = oracle("mixed_layers")
    ops, backend = IMPLEMENTATIONS[implementation]
    model = load_model(truth.folder, torch.float32, ops())
    runner = Runner(model, backend, len(truth.prompt))
    _, states = truth.logits(truth.prompt)
    captured = [runner.feed(truth.prompt[:100], (0, 1, 3))[1], runner.feed(truth.prompt[100:], (0, 1, 3))[1]]
    for place, layers_run in enumerate((0, 1, 3)):
        ours = torch.cat([captured[0][place], captured[1][place]])
        assert (ours - states[layers_run]).abs().max() < 1e-4 * states[layers_run].abs().max()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_captures_leave_the_logits_alone_and_are_refused_out_of_range(oracle: Any, implementation: str) -> None:
    truth = oracle("as_released")
    ops, backend = IMPLEMENTATIONS[implementation]
    model = load_model(truth.folder, torch.float32, ops())
    ids = truth.prompt[:20]
    plain, none = Runner(model, backend, 20).feed(ids)
    captured, states = Runner(model, backend, 20).feed(ids, (2, 5))
    assert torch.equal(plain, captured)
    assert none == []
    assert len(states) == 2
    with pytest.raises(ValueError, match=r"capture is \(2, 6\).*0 to 5"):
        Runner(model, backend, 20).feed(ids, (2, 6))


def test_how_a_prompt_is_cut_changes_no_bit_on_the_cpu_kernels(oracle: Any) -> None:
    truth = oracle("mixed_layers")
    ops, backend = IMPLEMENTATIONS["cpu"]
    model = load_model(truth.folder, torch.float32, ops())
    whole = generated(model, backend, truth.prompt, (130,))
    for chunks in ((1,) * 130, (64, 66), (3, 61, 33, 33)):
        ids, logits = generated(model, backend, truth.prompt, chunks)
        assert ids == whole[0]
        assert torch.equal(logits, whole[1])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_bf16_model_stays_near_the_fp32_one(oracle: Any, implementation: str) -> None:
    truth = oracle("as_released")
    ops, backend = IMPLEMENTATIONS[implementation]
    # As long as all blocks are selected, so that no near tie between blocks decides.
    ids = truth.prompt[:64]
    exact, _ = Runner(load_model(truth.folder, torch.float32, ops()), backend, 64).feed(ids)
    model = load_model(truth.folder, torch.bfloat16, ops())
    logits, states = Runner(model, backend, 64, layout.ElementType.BF16).feed(ids, (3,))
    assert logits.dtype == torch.float32
    assert states[0].dtype == torch.bfloat16
    error = (logits - exact).abs().mean() / exact.abs().mean()
    assert 1e-4 < error < 0.1
