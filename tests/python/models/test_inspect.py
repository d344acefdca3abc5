"""`inspect` works from the configuration and file headers, and its numbers are the model's."""

import json
import shutil
from pathlib import Path

import pytest

from tandem.core import InvalidArgument, layout
from tandem.models import CheckpointError, ConfigError, CpuOps, MiniMaxM3Config, TensorMismatchError
from tandem.models.errors import OptionError
from tandem.models.inspect import inspect_model

from .eagle3_support import AUX_LAYERS, CLASSIC, TARGET, DraftShape, draft_config, draft_tensors, load_pair
from .support import Shape, random_weights, text_config, wrapped_config, write_checkpoint

OFFICIAL_CONFIG = Path(__file__).with_name("minimax_m3_config.json")


@pytest.fixture
def official(tmp_path: Path) -> Path:
    """A folder with the configuration of the released model and none of its weights."""
    shutil.copy(OFFICIAL_CONFIG, tmp_path / "config.json")
    return tmp_path


def test_the_released_model_is_described_without_its_weights(official: Path) -> None:
    inspection = inspect_model(official)
    weights = inspection.weights
    assert (weights.num_tensors, weights.num_parameters) == (22893, 426_174_572_928)
    assert not weights.complete
    assert weights.absent_files == ("model.safetensors",)
    # Two bytes a parameter, four for the routers' [128, 6144] and [128].
    assert weights.num_bytes == 2 * 426_174_572_928 + 2 * 57 * 128 * (6144 + 1)
    text = inspection.render()
    for part in (
        "22,893 tensors",
        "426,174,572,928 parameters",
        "absent here: model.safetensors",
        "137,472 bytes per token",
    ):
        assert part in text
    assert "full in layers 0-2, block-sparse in 3-59" in text


def test_the_released_models_slot_is_what_its_geometry_says(official: Path) -> None:
    inspection = inspect_model(official)
    head_part = 60 * 2 * 32 * 1024  # K and V of 128 tokens x 128 dims in every layer
    index_part = 57 * 32 * 1024
    assert inspection.bytes_per_token == 60 * 2048 + 57 * 256
    assert [section.num_bytes for section in inspection.sections] == [4 * head_part, index_part]
    assert [section.num_tiles for section in inspection.sections] == [120, 57]
    assert inspection.slot_bytes == 4 * head_part + index_part
    assert [(group.role, group.first_layer, group.last_layer) for group in inspection.tiles] == [
        ("K", 0, 59),
        ("V", 0, 59),
        ("INDEX_K", 3, 59),
    ]


@pytest.mark.parametrize(("size", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1)])
def test_a_rank_holds_its_heads_and_all_index_keys(official: Path, size: int, heads: int) -> None:
    inspection = inspect_model(official, shard=layout.Shard(size, size - 1))
    assert inspection.slot_bytes == heads * 60 * 2 * 32768 + 57 * 32768
    assert [section.local_heads for section in inspection.sections] == [heads, 1]
    assert inspection.sections[0].first_head == 4 - heads


@pytest.mark.parametrize(
    ("kv_dtype", "per_token"),
    [
        ("float32", 2 * (60 * 2048 + 57 * 256)),
        ("float16", 60 * 2048 + 57 * 256),
        ("fp8_e4m3", 60 * 1024 + 57 * 128),
        # Half a byte a number and one scale byte per sixteen; index keys stay bf16.
        ("nvfp4", 60 * 8 * (64 + 8) + 57 * 256),
    ],
)
def test_bytes_per_token_follow_the_cache_type(official: Path, kv_dtype: str, per_token: int) -> None:
    assert inspect_model(official, kv_dtype=kv_dtype).bytes_per_token == per_token


def test_what_fits_is_whole_pages_and_whole_sequences(official: Path) -> None:
    inspection = inspect_model(official, memory_gib=[0.01, 80.0])
    nothing, much = inspection.capacities
    assert (nothing.pages, nothing.tokens, nothing.max_context) == (0, 0, 0)
    assert much.pages == 80 * 2**30 // inspection.slot_bytes
    assert much.max_context == much.tokens == much.pages * 128
    assert much.sequences == {context: much.pages // (context // 128) for context in (4096, 32768, 131072, 1048576)}
    assert inspect_model(official, memory_gib=[800.0]).capacities[0].max_context == 1048576


def test_what_does_not_fit_together_is_refused(official: Path) -> None:
    with pytest.raises(OptionError, match="kv_dtype is 'int8'; allowed are bfloat16"):
        inspect_model(official, kv_dtype="int8")
    with pytest.raises(InvalidArgument, match="3"):
        inspect_model(official, shard=layout.Shard(3, 0))


def test_present_weights_are_counted_and_checked_from_headers(tmp_path: Path) -> None:
    shape = Shape()
    config = wrapped_config(text_config(shape))
    tensors = random_weights(MiniMaxM3Config.from_dict(config), seed=1)
    write_checkpoint(tmp_path, config, tensors, num_shards=2)
    weights = inspect_model(tmp_path).weights
    assert weights.complete
    assert weights.num_tensors == len(tensors)
    assert weights.num_parameters == sum(tensor.numel() for tensor in tensors.values())
    assert weights.num_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert weights.formats == {"plain": len(tensors)}

    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    partial = inspect_model(tmp_path).weights
    assert (partial.complete, partial.absent_files) == (False, ("model-00002-of-00002.safetensors",))

    del tensors["model.norm.weight"]
    with pytest.raises(TensorMismatchError, match=r"missing \(1\): model\.norm\.weight"):
        inspect_model(write_checkpoint(tmp_path / "other", config, tensors))
    with pytest.raises(CheckpointError, match="is not a folder"):
        inspect_model(tmp_path / "nowhere")


def test_the_dictionary_form_is_plain_json(official: Path) -> None:
    inspection = inspect_model(official, shard=layout.Shard(4, 1))
    plain = json.loads(json.dumps(inspection.to_dict()))
    assert plain["slot_bytes"] == inspection.slot_bytes
    assert plain["config"]["num_hidden_layers"] == 60
    assert plain["tiles"][2]["role"] == "INDEX_K"
    assert plain["sections"][0]["first_head"] == 1
    assert plain["weights"]["complete"] is False


def test_a_drafter_in_the_models_folder_adds_its_layer_to_the_cache(tmp_path: Path) -> None:
    load_pair(tmp_path, CLASSIC, CpuOps(), seed=2)
    plain = inspect_model(tmp_path / "target")
    assert plain.drafter is None
    assert "drafter: none" in plain.render()
    (tmp_path / "eagle3").rename(tmp_path / "target" / "eagle3")
    with_drafter = inspect_model(tmp_path / "target")
    drafter = with_drafter.drafter
    assert drafter is not None
    assert (drafter.captured_layers, drafter.own_embedding, drafter.own_head) == (AUX_LAYERS, True, True)
    tensors = draft_tensors(CLASSIC, 3)
    counted = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    assert drafter.weights.num_tensors == len(counted)
    assert drafter.weights.num_parameters == sum(tensor.numel() for tensor in counted)
    # K and V of the draft layer in bf16; the target's tiles are as without it.
    own = CLASSIC.kv_heads * CLASSIC.head_dim * 2
    assert with_drafter.bytes_per_token == plain.bytes_per_token + 2 * own
    assert [tile for tile in with_drafter.tiles if tile.owner == "target"] == list(plain.tiles)
    draft = [tile for tile in with_drafter.tiles if tile.owner == "drafter"]
    assert [(tile.role, tile.first_layer, tile.last_layer, tile.bytes_per_token) for tile in draft] == [
        ("K", 4, 4, own),
        ("V", 4, 4, own),
    ]
    assert with_drafter.sections[0].num_tiles == plain.sections[0].num_tiles + 2
    text = with_drafter.render()
    assert "its own embedding and head, 40 draft tokens" in text
    assert "4 (drafter)" in text
    assert inspect_model(tmp_path / "target", drafter=None).slot_bytes == plain.slot_bytes


def test_a_drafter_of_another_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text_config(TARGET)))
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").write_text(json.dumps(draft_config(DraftShape(vocab=80))))
    with pytest.raises(ConfigError, match="eagle3: the drafter's vocab_size is 80, the target's 64"):
        inspect_model(tmp_path)


def test_layers_of_a_kind_are_grouped_where_they_adjoin(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(text_config(Shape(layers="dsdss"))))
    inspection = inspect_model(tmp_path)
    groups = [(group.role, group.first_layer, group.last_layer) for group in inspection.tiles]
    assert groups == [("K", 0, 4), ("V", 0, 4), ("INDEX_K", 1, 1), ("INDEX_K", 3, 4)]
    assert "full in layers 0, 2, block-sparse in 1, 3-4" in inspection.render()
