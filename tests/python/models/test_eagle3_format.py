"""A drafter in the exact format of the published EAGLE 3.1 heads for MiniMax-M3, scaled down: names, shapes, keys.

Source: https://huggingface.co/Inferact/MiniMax-M3-EAGLE3-GQA (4 KV heads) and MiniMax-M3-EAGLE3 (as many as query
heads): 17 tensors, the full vocabulary, no list of captured layers, an MLP three times the hidden size.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem import LLM, SamplingParams
from tandem.models import CheckpointError, ConfigError, MiniMaxM3Config, TensorMismatchError
from tests.python.engine.byte_tokenizer import byte_tokenizer_json
from tests.python.models.support import Shape, random_weights, text_config, wrapped_config, write_checkpoint

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 64, 8, 2, 32, 300
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)

CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": HIDDEN,
    "intermediate_size": 3 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": VOCAB,
    "draft_vocab_size": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000000,
    "max_position_embeddings": 32768,
    "fc_norm": True,
    "norm_output": True,
    "torch_dtype": "bfloat16",
}


def shapes(kv_heads: int = KV_HEADS) -> dict[str, tuple[int, ...]]:
    """The 17 tensors."""
    return {
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "fc_norm.0.weight": (HIDDEN,),
        "fc_norm.1.weight": (HIDDEN,),
        "fc_norm.2.weight": (HIDDEN,),
        "layers.0.input_layernorm.weight": (HIDDEN,),
        "layers.0.hidden_norm.weight": (HIDDEN,),
        "layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "layers.0.self_attn.q_proj.weight": (HEADS * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.k_proj.weight": (kv_heads * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.v_proj.weight": (kv_heads * HEAD_DIM, 2 * HIDDEN),
        "layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
        "layers.0.mlp.gate_proj.weight": (3 * HIDDEN, HIDDEN),
        "layers.0.mlp.up_proj.weight": (3 * HIDDEN, HIDDEN),
        "layers.0.mlp.down_proj.weight": (HIDDEN, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
    }


def random_tensors(wanted: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=rng).mul(shape[-1] ** -0.5).bfloat16() for name, shape in wanted.items()}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 layers, so that the states after 2, 4 and 5 layers are three."""
    folder = tmp_path_factory.mktemp("model")
    shape = Shape(
        layers="dddsssss", hidden=HIDDEN, heads=8, kv_heads=4, head_dim=32, block=4, topk=2, experts=4, vocab=VOCAB
    )
    text = text_config(shape) | {"max_position_embeddings": 128}
    write_checkpoint(folder, wrapped_config(text), random_weights(MiniMaxM3Config.from_dict(text), seed=3))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "[e~["}), encoding="utf-8")
    return folder


def write_drafter(folder: Path, tensors: dict[str, Tensor], **changes: Any) -> Path:
    write_checkpoint(folder, CONFIG | changes, tensors, prefix="")
    return folder


@pytest.mark.parametrize("kv_heads", [KV_HEADS, HEADS])
def test_a_head_of_the_published_format_drafts_in_the_model(model: Path, tmp_path: Path, kv_heads: int) -> None:
    wanted = shapes(kv_heads)
    assert len(wanted) == 17
    drafter = write_drafter(tmp_path / "eagle3", random_tensors(wanted), num_key_value_heads=kv_heads)
    with LLM(model, drafter=None, num_threads=1) as llm:
        expected = llm.generate("hello", GREEDY)[0]
    with LLM(model, drafter=drafter, num_threads=1) as llm:
        output = llm.generate("hello", GREEDY)[0]
    assert output.token_ids == expected.token_ids
    assert output.rounds.num_drafted == 3 * output.rounds.num_rounds > 0


def refusal(model: Path, tmp_path: Path, tensors: dict[str, Tensor], **changes: Any) -> CheckpointError:
    drafter = write_drafter(tmp_path / "eagle3", tensors, **changes)
    with pytest.raises(CheckpointError) as refused:
        LLM(model, drafter=drafter, num_threads=1)
    return refused.value


@pytest.mark.parametrize(
    "gone",
    [
        ("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
        ("fc_norm.1.weight",),
        ("layers.0.hidden_norm.weight", "norm.weight"),
    ],
)
def test_missing_norms_are_named(model: Path, tmp_path: Path, gone: tuple[str, ...]) -> None:
    tensors = random_tensors({name: shape for name, shape in shapes().items() if name not in gone})
    error = refusal(model, tmp_path, tensors)
    assert isinstance(error, TensorMismatchError)
    assert (error.missing, error.unexpected, error.wrong) == (sorted(gone), [], [])


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("fc.weight", (HIDDEN, 2 * HIDDEN)),
        ("layers.0.self_attn.q_proj.weight", (HEADS * HEAD_DIM, HIDDEN)),
        ("layers.0.self_attn.k_proj.weight", (HEADS * HEAD_DIM, 2 * HIDDEN)),
        ("layers.0.mlp.down_proj.weight", (HIDDEN, 2 * HIDDEN)),
        ("norm.weight", (2 * HIDDEN,)),
        ("embed_tokens.weight", (VOCAB - 1, HIDDEN)),
        ("lm_head.weight", (VOCAB + 1, HIDDEN)),
    ],
)
def test_a_wrong_width_or_vocabulary_is_named_with_both_shapes(
    model: Path, tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    error = refusal(model, tmp_path, random_tensors(shapes() | {name: shape}))
    assert isinstance(error, TensorMismatchError)
    assert error.wrong == [f"{name} is BF16 {list(shape)}, expected BF16 or F32 {list(shapes()[name])}"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 280}, "eagle3: the drafter's vocab_size is 280, the target's 300"),
        ({"hidden_size": 96}, "eagle3: the drafter's hidden_size is 96, the target's 64"),
    ],
)
def test_a_head_of_another_model_is_refused(model: Path, tmp_path: Path, changes: dict[str, int], message: str) -> None:
    error = refusal(model, tmp_path, random_tensors(shapes()), **changes)
    assert isinstance(error, ConfigError)
    assert message in str(error)


def test_a_smaller_draft_vocabulary_needs_its_map(model: Path, tmp_path: Path) -> None:
    wanted = shapes() | {"lm_head.weight": (200, HIDDEN)}
    error = refusal(model, tmp_path, random_tensors(wanted), draft_vocab_size=200)
    assert isinstance(error, TensorMismatchError)
    assert error.missing == ["d2t"]
