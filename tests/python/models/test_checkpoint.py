"""Every way of writing a checkpoint loads the same weights; every damage is named before anything is loaded."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.models import CheckpointError, ConfigError, MiniMaxM3Config, ReferenceOps, TensorMismatchError, load_model
from tandem.models.minimax_m3_weights import open_weights

from .support import (
    Shape,
    quantise_mxfp8,
    quantise_nvfp4,
    random_weights,
    text_config,
    wrapped_config,
    write_checkpoint,
)

SHAPE = Shape(layers="dss", experts=2)
TEXT = text_config(SHAPE)
CONFIG = wrapped_config(TEXT)
PARSED = MiniMaxM3Config.from_dict(CONFIG)
EXPERT = "model.layers.1.block_sparse_moe.experts.1.w2.weight"
ROUTER = "model.layers.1.block_sparse_moe.gate.weight"


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    return random_weights(PARSED, seed=7)


def changed(tensors: dict[str, Tensor], name: str, value: Tensor | None) -> dict[str, Tensor]:
    others = {key: tensor for key, tensor in tensors.items() if key != name}
    return others if value is None else others | {name: value}


def mismatch(folder: Path) -> TensorMismatchError:
    with pytest.raises(TensorMismatchError) as caught:
        load_model(folder, torch.float32, ReferenceOps())
    return caught.value


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_sharded_or_not_and_prefixed_or_not_loads_the_same(
    tmp_path: Path, tensors: dict[str, Tensor], num_shards: int, prefix: str
) -> None:
    config = CONFIG if prefix else TEXT
    write_checkpoint(tmp_path, config, tensors, prefix=prefix, num_shards=num_shards)
    weights = open_weights(tmp_path, MiniMaxM3Config.from_pretrained(tmp_path))
    for name, tensor in tensors.items():
        assert torch.equal(weights.read(name, torch.float32), tensor.float()), name
    names = ["model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.index_k_proj.weight"]
    fused = weights.read_rows(names, torch.bfloat16)
    assert torch.equal(fused, torch.cat([tensors[name] for name in names]))


def test_vision_and_prediction_layers_and_static_scales_are_passed_over(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    others = {
        "vision_tower.blocks.0.weight": torch.zeros(3),
        "multi_modal_projector.linear.weight": torch.zeros(3),
        "patch_merge_mlp.linear.weight": torch.zeros(3),
        "language_model.model.mtp.0.norm.weight": torch.zeros(3),
        "language_model.model.layers.1.self_attn.q_proj.input_scale": torch.tensor(1.0),
        "language_model.model.layers.1.self_attn.k_proj.k_scale": torch.tensor(1.0),
    }
    write_checkpoint(tmp_path, CONFIG, tensors, others=others)
    open_weights(tmp_path, PARSED)


def test_mxfp8_matrices_load_as_the_values_they_encode(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if "_proj." in name or ".experts." in name:
            values, exponents = quantise_mxfp8(tensor)
            # Model Optimizer's export of the same format names the exponents differently.
            suffix = "_scale" if "self_attn.q_proj" in name else "_scale_inv"
            stored |= {name: values, name + suffix: exponents}
            scale = torch.pow(2.0, exponents.float() - 127.0).repeat_interleave(32, dim=1)
            expected[name] = values.float() * scale
        else:
            stored[name] = tensor
            expected[name] = tensor.float()
    write_checkpoint(tmp_path, CONFIG, stored, num_shards=2)
    weights = open_weights(tmp_path, PARSED)
    for name, values in expected.items():
        assert torch.equal(weights.read(name, torch.float32), values), name
    down = weights.read(EXPERT, torch.bfloat16)
    assert down.dtype == torch.bfloat16
    assert (down.float() - tensors[EXPERT].float()).abs().max() < 0.05


def test_nvfp4_experts_on_an_mxfp8_base_load_as_the_values_they_encode(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    stored: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            packed, scale, scale_2 = quantise_nvfp4(tensor)
            stored |= {name: packed, name + "_scale": scale, name + "_scale_2": scale_2}
            stored[name.replace("weight", "input_scale")] = torch.tensor(1.0)
            values = torch.empty(tensor.shape)
            values[:, 0::2], values[:, 1::2] = grid[(packed & 15).long()], grid[(packed >> 4).long()]
            expected[name] = values * (scale.float() * scale_2).repeat_interleave(16, dim=1)
        elif "_proj." in name:
            quantised, exponents = quantise_mxfp8(tensor)
            stored |= {name: quantised, name + "_scale": exponents}
            expected[name] = quantised.float() * torch.pow(2.0, exponents.float() - 127.0).repeat_interleave(32, dim=1)
        else:
            stored[name] = tensor
            expected[name] = tensor.float()
    write_checkpoint(tmp_path, CONFIG, stored)
    weights = open_weights(tmp_path, PARSED)
    for name, values in expected.items():
        assert torch.equal(weights.read(name, torch.float32), values), name
    # Three matrices an expert; seven others in the dense layer and nine in each of the two sparse ones.
    counts = {weight_format.value: count for weight_format, count in weights.formats.items()}
    assert counts == {"nvfp4": 2 * 2 * 3, "mxfp8": 7 + 2 * 9, "plain": len(tensors) - 12 - 25}


def test_missing_unexpected_and_misshaped_tensors_are_all_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    damaged = changed(tensors, "model.norm.weight", None)
    damaged = changed(damaged, EXPERT, torch.zeros(3, 5, dtype=torch.bfloat16))
    damaged = changed(damaged, "model.layers.0.block_sparse_moe.down_proj.weight", torch.zeros(2))
    error = mismatch(write_checkpoint(tmp_path, CONFIG, damaged))
    assert error.missing == ["model.norm.weight"]
    assert error.unexpected == ["model.layers.0.block_sparse_moe.down_proj.weight"]
    assert error.wrong == [f"{EXPERT} is BF16 [3, 5], expected BF16 or F32 [64, 32]"]
    for name in ("model.norm.weight", "block_sparse_moe.down_proj", EXPERT, str(tmp_path)):
        assert name in str(error)


def test_the_list_of_findings_is_bounded_in_print_and_whole_in_the_error(
    tmp_path: Path, tensors: dict[str, Tensor]
) -> None:
    error = mismatch(write_checkpoint(tmp_path, CONFIG, {"model.norm.weight": tensors["model.norm.weight"]}))
    assert len(error.missing) == len(tensors) - 1
    assert f"and {len(tensors) - 13} more" in str(error)
    assert len(str(error)) < 2000


def test_one_tensor_too_many_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    name = "model.layers.1.self_attn.index_v_proj.weight"
    error = mismatch(write_checkpoint(tmp_path, CONFIG, changed(tensors, name, torch.zeros(2))))
    assert (error.missing, error.unexpected, error.wrong) == ([], [name], [])


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        (EXPERT, torch.float16, "is F16 [64, 32], expected BF16 or F32"),
        (EXPERT, torch.int8, "is I8 [64, 32], expected BF16 or F32"),
        ("model.norm.weight", torch.float64, "is F64 [64], expected BF16 or F32"),
        (ROUTER, torch.bfloat16, "is BF16 [2, 64], expected F32"),
        ("model.layers.1.block_sparse_moe.e_score_correction_bias", torch.bfloat16, "is BF16 [2], expected F32"),
    ],
)
def test_a_wrong_type_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, Tensor], name: str, dtype: torch.dtype, expected: str
) -> None:
    error = mismatch(write_checkpoint(tmp_path, CONFIG, changed(tensors, name, tensors[name].to(dtype))))
    assert error.wrong == [finding for finding in error.wrong if finding.startswith(f"{name} {expected}")] != []


def test_quantised_matrices_without_their_scales_name_the_scales(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    values, _ = quantise_mxfp8(tensors[EXPERT])
    error = mismatch(write_checkpoint(tmp_path / "mxfp8", CONFIG, changed(tensors, EXPERT, values)))
    assert error.missing == [f"{EXPERT}_scale_inv"]
    packed, scale, _ = quantise_nvfp4(tensors[EXPERT])
    partial = changed(tensors, EXPERT, packed) | {f"{EXPERT}_scale": scale}
    error = mismatch(write_checkpoint(tmp_path / "nvfp4", CONFIG, partial))
    assert error.missing == [f"{EXPERT}_scale_2"]


def test_float_scales_of_square_blocks_are_not_taken_for_mxfp8(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    values, _ = quantise_mxfp8(tensors[EXPERT])
    others = changed(tensors, EXPERT, values) | {f"{EXPERT}_scale_inv": torch.ones(1, 1)}
    error = mismatch(write_checkpoint(tmp_path, CONFIG, others))
    assert error.wrong == [f"{EXPERT}_scale_inv is F32 [1, 1], expected U8 or F8_E8M0 [64, 1]"]


def test_a_width_that_blocks_do_not_divide_is_refused(tmp_path: Path) -> None:
    config = wrapped_config(text_config(Shape(layers="d", dense_width=48)))
    tensors = random_weights(MiniMaxM3Config.from_dict(config), seed=1)
    name = "model.layers.0.mlp.down_proj.weight"
    stored = changed(tensors, name, torch.zeros(64, 48).to(torch.float8_e4m3fn))
    stored[f"{name}_scale_inv"] = torch.zeros(64, 2, dtype=torch.uint8)
    error = mismatch(write_checkpoint(tmp_path, config, stored))
    assert error.wrong == [f"{name} is mxfp8 with 48 columns, which blocks of 32 do not divide"]


def rewritten_header(file: Path, change: Any) -> None:
    """Apply `change` to the parsed header of a safetensors file, leaving the bytes of the tensors as they are."""
    raw = file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_damaged_safetensors_files_are_named_with_their_sizes(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    file = write_checkpoint(tmp_path, CONFIG, tensors) / "model.safetensors"
    whole = file.read_bytes()

    def refused(content: bytes, message: str) -> None:
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            load_model(tmp_path, torch.float32, ReferenceOps())
        assert str(file) in str(caught.value)

    refused(whole[:-1], f"truncated: its header describes {len(whole)} bytes, the file has {len(whole) - 1}")
    refused(whole[: len(whole) // 2], "is truncated: its header describes")
    refused(whole[:100], "truncated: its header ends at byte")
    refused(whole[:5], "truncated: 5 bytes cannot hold")
    refused(b"", "truncated: 0 bytes cannot hold")
    refused(whole + b"\0", f"is damaged: its header describes {len(whole)} bytes, the file has {len(whole) + 1}")
    refused(b"version https://git-lfs.github.com/spec/v1\n" * 4, "is not a safetensors file")
    refused(struct.pack("<Q", 16) + b"{" * 16, "malformed safetensors header")
    file.write_bytes(whole)
    rewritten_header(file, lambda header: header["language_model.model.norm.weight"].update(shape=[65]))
    refused(file.read_bytes(), r"norm\.weight, BF16 \[65\], takes 130 bytes but has 128")
    file.write_bytes(whole)
    rewritten_header(file, lambda header: header["language_model.model.norm.weight"].pop("shape"))
    refused(file.read_bytes(), "malformed safetensors header")
    file.write_bytes(whole)
    load_model(tmp_path, torch.float32, ReferenceOps())


def test_missing_files_are_named(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    write_checkpoint(tmp_path, CONFIG, tensors, num_shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    kept = shard.read_bytes()
    shard.unlink()
    with pytest.raises(CheckpointError, match=f"{shard.name} is missing"):
        load_model(tmp_path, torch.float32, ReferenceOps())
    shard.write_bytes(kept)
    index = tmp_path / "model.safetensors.index.json"
    text = index.read_text()
    index.unlink()
    with pytest.raises(CheckpointError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        load_model(tmp_path, torch.float32, ReferenceOps())
    for broken, message in (
        ("{", "is not valid JSON"),
        ("{}", "has no weight_map"),
        (text.replace("model-00001", "../model-00001"), "which is not a file name"),
        (text.replace('"language_model.model.norm.weight"', '"language_model.model.norm.scale"'), "lacks tensors"),
    ):
        index.write_text(broken)
        with pytest.raises(CheckpointError, match=message):
            load_model(tmp_path, torch.float32, ReferenceOps())
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        load_model(tmp_path, torch.float32, ReferenceOps())


def test_a_tensor_in_two_files_is_refused(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    others = {"model.norm.weight": tensors["model.norm.weight"].clone()}
    write_checkpoint(tmp_path, CONFIG, tensors, others=others)
    with pytest.raises(CheckpointError, match=r"holds model\.norm\.weight, which .* holds too"):
        load_model(tmp_path, torch.float32, ReferenceOps())
