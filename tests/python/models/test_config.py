"""The configuration is read strictly: what is not computed is refused, by key and value."""

import copy
import json
import logging
from typing import Any

import pytest

from tandem.models import ConfigError, MiniMaxM3Config

from .support import Shape, text_config, wrapped_config

SHAPE = Shape()
SPARSE = "sparse_attention_config"


def with_value(path: str, value: Any) -> dict[str, Any]:
    """The wrapped tiny configuration with the value at a dotted path (`-` removes the key)."""
    config = wrapped_config(copy.deepcopy(text_config(SHAPE)))
    *parents, key = path.split(".")
    section = config
    for parent in parents:
        section = section[parent]
    if value == "-":
        del section[key]
    else:
        section[key] = value
    return config


def test_wrapped_and_bare_configurations_read_the_same() -> None:
    text = text_config(SHAPE)
    wrapped = MiniMaxM3Config.from_dict(wrapped_config(text))
    assert wrapped == MiniMaxM3Config.from_dict(text)
    assert wrapped.sparse_layers == (False, False, True, True)
    assert wrapped.num_index_heads == SHAPE.kv_heads
    assert (wrapped.bos_token_id, wrapped.eos_token_ids) == (1, (3,))


def test_end_tokens_may_be_a_list_absent_or_on_the_wrapper() -> None:
    several = with_value("text_config.eos_token_id", [3, 5])
    assert MiniMaxM3Config.from_dict(several).eos_token_ids == (3, 5)
    absent = with_value("text_config.eos_token_id", "-")
    assert MiniMaxM3Config.from_dict(absent).eos_token_ids == ()
    assert MiniMaxM3Config.from_dict(absent | {"eos_token_id": 9}).eos_token_ids == (9,)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("text_config.hidden_act", "silu"),
        ("text_config.use_gemma_norm", False),
        ("text_config.use_qk_norm", False),
        ("text_config.qk_norm_type", "per_layer"),
        ("text_config.scoring_func", "softmax"),
        ("text_config.use_routing_bias", False),
        ("text_config.n_shared_experts", 2),
        ("text_config.attention_output_gate", True),
        ("text_config.attention_bias", True),
        ("text_config.mlp_bias", True),
        ("text_config.tie_word_embeddings", True),
        ("tie_word_embeddings", True),
        ("text_config.rope_scaling", {"rope_type": "yarn", "factor": 4}),
        ("text_config.sliding_window", 4096),
        ("text_config.n_group", 8),
        ("text_config.topk_group", 4),
        ("text_config.norm_topk_prob", False),
        ("text_config.swiglu_beta", 0.5),
        (f"text_config.{SPARSE}.use_sparse_attention", False),
        (f"text_config.{SPARSE}.sparse_init_block", 1),
        (f"text_config.{SPARSE}.sparse_score_type", "lse"),
        (f"text_config.{SPARSE}.sparse_disable_index_value", [0, 0, 1, 0]),
        (f"text_config.{SPARSE}.sparse_num_index_heads", 4),
        (f"text_config.{SPARSE}.index_topk_freq", 4),
        (f"text_config.{SPARSE}.sparse_local_block", 5),
        ("text_config.num_attention_heads", 5),
        ("text_config.rotary_dim", 32),
        ("text_config.num_experts_per_tok", 7),
        (f"text_config.{SPARSE}.sparse_index_dim", 8),
        (f"text_config.{SPARSE}.sparse_init_block", False),
        ("text_config.use_gemma_norm", 1),
        ("text_config.hidden_size", "64"),
        ("text_config.hidden_size", True),
        ("text_config.moe_layer_freq", [0, 0, 1]),
        ("text_config.rope_theta", 0),
        ("text_config.eos_token_id", "three"),
    ],
)
def test_a_value_that_is_not_computed_is_refused_with_key_and_value(path: str, value: Any) -> None:
    key = path.rsplit(".", 1)[1] if "." in path else path
    given = "is 0" if key == "sparse_disable_index_value" else (str(value) if isinstance(value, int) else repr(value))
    with pytest.raises(ConfigError) as refusal:
        MiniMaxM3Config.from_dict(with_value(path, value))
    assert key in str(refusal.value)
    assert given in str(refusal.value)


@pytest.mark.parametrize(
    "path",
    [
        f"text_config.{SPARSE}.sparse_local_block",
        f"text_config.{SPARSE}.sparse_init_block",
        f"text_config.{SPARSE}.sparse_topk_blocks",
        f"text_config.{SPARSE}",
        "text_config.partial_rotary_factor",
        "text_config.moe_layer_freq",
        "text_config.hidden_act",
        "text_config.swiglu_limit",
        "text_config.num_hidden_layers",
    ],
)
def test_a_missing_key_is_an_error_not_a_guess(path: str) -> None:
    with pytest.raises(ConfigError, match=f"lacks {path.replace('.', '[.]')}"):
        MiniMaxM3Config.from_dict(with_value(path, "-"))


@pytest.mark.parametrize(
    ("path", "value", "belongs"),
    [
        ("num_hidden_layers", 2, "text_config"),
        ("rope_theta", 10000, "text_config"),
        ("sparse_topk_blocks", 8, "text_config.sparse_attention_config"),
        ("text_config.sparse_topk_blocks", 8, "sparse_attention_config"),
        (f"text_config.{SPARSE}.rope_theta", 10000, "text_config"),
        ("text_config.index_topk_blocks", 8, "sparse_attention_config.sparse_topk_blocks"),
        (f"text_config.{SPARSE}.sparse_local_blocks", 2, "sparse_local_block"),
    ],
)
def test_a_key_at_the_wrong_level_is_refused_rather_than_ignored(path: str, value: Any, belongs: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        MiniMaxM3Config.from_dict(with_value(path, value))
    assert "no effect" in str(refusal.value)
    assert belongs in str(refusal.value)


def test_an_odd_rotary_width_is_refused() -> None:
    config = with_value("text_config.rotary_dim", 15)
    config["text_config"]["partial_rotary_factor"] = 15 / 32
    with pytest.raises(ConfigError, match="rotary_dim 15 has to be even"):
        MiniMaxM3Config.from_dict(config)


def test_unknown_keys_are_reported_once_per_level_and_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    plain = MiniMaxM3Config.from_dict(wrapped_config(text_config(SHAPE)))
    assert not caplog.records
    config = with_value("text_config.attention_chunk_size", 7)
    config["text_config"][SPARSE]["sparse_flavour"] = "new"
    with caplog.at_level(logging.WARNING):
        assert MiniMaxM3Config.from_dict(config) == plain
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "attention_chunk_size" in messages[0]
    assert "sparse_flavour" in messages[1]


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], [], None, "MiniMaxM3SparseForCausalLM"])
def test_another_architecture_is_refused_by_name(architectures: Any) -> None:
    config = wrapped_config(text_config(SHAPE)) | {"architectures": architectures}
    with pytest.raises(ConfigError) as refusal:
        MiniMaxM3Config.from_dict(config)
    assert repr(architectures[0] if architectures == ["LlamaForCausalLM"] else architectures) in str(refusal.value)
    assert "MiniMaxM3SparseForConditionalGeneration" in str(refusal.value)


def test_a_folder_without_a_readable_config_is_an_error_that_names_the_file(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        MiniMaxM3Config.from_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder"):
        MiniMaxM3Config.from_pretrained(tmp_path / "absent")
    (tmp_path / "config.json").write_text('{"architectures": [')
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        MiniMaxM3Config.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ConfigError, match=r"config\.json holds a JSON list"):
        MiniMaxM3Config.from_pretrained(tmp_path)
