"""Eagle3 drafters of every kind: what they load, what they share with the target, what they refuse."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.core import layout
from tandem.models import (
    CheckpointError,
    ConfigError,
    CpuOps,
    MiniMaxM3,
    MiniMaxM3Config,
    ReferenceOps,
    TensorMismatchError,
    load_model,
)
from tandem.models.eagle3 import Eagle3, attention_geometry, load_drafter, tile_specs
from tandem.models.eagle3_config import Eagle3Config
from tandem.models.minimax_m3_weights import open_weights
from tandem.msa import CpuBackend, Limits, SeatState
from tandem.spec.slots import DraftSlots
from tests.python.models.eagle3_support import (
    AUX_LAYERS,
    CLASSIC,
    TARGET,
    DraftShape,
    draft_config,
    draft_tensors,
)
from tests.python.models.support import random_weights, text_config, write_checkpoint


class Folder:
    """A target that is loaded once, and drafters beside it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = text_config(TARGET)
        self.config = MiniMaxM3Config.from_dict(text)
        self.tensors = random_weights(self.config, 5)
        write_checkpoint(path / "target", text, self.tensors)
        self.target: MiniMaxM3 = load_model(path / "target", torch.float32, CpuOps())
        self.num_drafters = 0

    def load(self, shape: DraftShape, tensors: dict[str, Tensor] | None = None, **changes: Any) -> Eagle3:
        """Write the drafter of `shape` with `changes` in its configuration, or with other tensors, and load it."""
        self.num_drafters += 1
        folder = self.path / f"drafter{self.num_drafters}"
        config = {key: value for key, value in (draft_config(shape) | changes).items() if value != "absent"}
        write_checkpoint(folder, config, draft_tensors(shape, 7) if tensors is None else tensors, prefix="")
        weights = open_weights(self.path / "target", self.config)
        return load_drafter(folder, self.target, weights, torch.float32, CpuOps())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    return Folder(tmp_path_factory.mktemp("eagle3"))


def first_pass(drafter: Eagle3) -> Tensor:
    """g of two slots with fixed random states."""
    rng = torch.Generator().manual_seed(3)
    return drafter.first_hidden([torch.randn((2, TARGET.hidden), generator=rng) for _ in drafter.aux_layers])


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_a_head_of_the_published_format_has_seventeen_tensors_with_its_own_vocabulary(folder: Folder) -> None:
    for kv_heads in (TARGET.kv_heads, TARGET.heads):
        shape = DraftShape(kv_heads=kv_heads, own_embedding=True, own_head=True)
        tensors = draft_tensors(shape, 7)
        assert len(tensors) == 17
        assert tensors["layers.0.self_attn.k_proj.weight"].shape == (kv_heads * 32, 2 * TARGET.hidden)
        drafter = folder.load(shape)
        tiles = tile_specs(drafter.config, drafter.layer, layout.ElementType.BF16)
        assert [(tile.layer, tile.role, tile.heads, tile.dim) for tile in tiles] == [
            (4, layout.Role.K, kv_heads, 32),
            (4, layout.Role.V, kv_heads, 32),
        ]
        geometry = attention_geometry(drafter.config, drafter.layer)
        assert (geometry.layer, geometry.num_q_heads, geometry.first_index_attended) == (4, 4, 1)
        assert geometry.scale == 32**-0.5


def test_an_embedding_and_head_that_are_absent_or_equal_are_the_targets(folder: Folder) -> None:
    shape = DraftShape()
    equal = {
        "embed_tokens.weight": folder.tensors["model.embed_tokens.weight"],
        "lm_head.weight": folder.tensors["lm_head.weight"],
    }
    for tensors in (draft_tensors(shape, 7), draft_tensors(shape, 7) | equal):
        drafter = folder.load(shape, tensors)
        assert drafter.vocabulary.embed == folder.target.embed
        assert drafter.vocabulary.logits == folder.target.logits
        assert drafter.vocabulary.to_target is None


def test_an_embedding_or_head_that_differs_in_one_element_is_the_drafters_own(folder: Folder) -> None:
    shape = DraftShape()
    embedding, head = folder.tensors["model.embed_tokens.weight"].clone(), folder.tensors["lm_head.weight"].clone()
    embedding[9, 3] += 1
    head[20] *= 100
    own = {"embed_tokens.weight": embedding, "lm_head.weight": head}
    drafter = folder.load(shape, draft_tensors(shape, 7) | own)
    assert torch.equal(drafter.vocabulary.embed(ids(9)), embedding[9:10].float())
    assert torch.equal(folder.target.embed(ids(9)), folder.tensors["model.embed_tokens.weight"][9:10].float())
    y = folder.tensors["lm_head.weight"][20:21].float()
    torch.testing.assert_close(drafter.vocabulary.logits(y), y @ head.float().T)
    assert int(drafter.propose(y)[0]) == 20


def test_a_draft_vocabulary_proposes_ids_of_the_target_and_the_lowest_of_equal_ones(folder: Folder) -> None:
    tensors = draft_tensors(CLASSIC, 7)
    targets = (tensors["d2t"] + torch.arange(40)).tolist()
    head = tensors["lm_head.weight"]
    head[11] = head[30] = 4 * head[0]
    drafter = folder.load(CLASSIC, tensors)
    y = head[11:12].float()
    assert int(drafter.vocabulary.logits(y).argmax()) in (11, 30)
    assert drafter.propose(y).tolist() == [targets[11]]
    assert drafter.propose(y).dtype == torch.int32


def test_names_of_older_checkpoints_mean_the_same_tensors(folder: Folder) -> None:
    shape = DraftShape()
    present = draft_tensors(shape, 7)
    older = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in present.items()}
    for i, place in enumerate(("low", "mid", "high")):
        older[f"aux_norm_{place}.weight"] = older.pop(f"fc_norm.{i}.weight")
    assert torch.equal(first_pass(folder.load(shape, older)), first_pass(folder.load(shape, present)))
    both = present | {"midlayer.hidden_norm.weight": torch.ones(TARGET.hidden)}
    with pytest.raises(CheckpointError, match=r"holds layers\.0\.hidden_norm\.weight under two names"):
        folder.load(shape, both)


def test_captured_layers_come_from_the_checkpoint_the_caller_or_the_default(folder: Folder) -> None:
    assert folder.load(DraftShape()).aux_layers == AUX_LAYERS
    top = folder.load(DraftShape(), eagle_config=None, eagle_aux_hidden_state_layer_ids=[0, 2, 3])
    assert top.aux_layers == (0, 2, 3)
    default = Eagle3Config.from_dict(draft_config(DraftShape()) | {"eagle_config": None})
    assert default.captured_layers(60) == (2, 30, 57)
    assert default.captured_layers(60, [3, 31, 58]) == (3, 31, 58)
    with pytest.raises(ConfigError, match=r"\[2, 2, 1\]; .* ascending and between 0 and the target's 4 layers"):
        default.captured_layers(4)
    with pytest.raises(ConfigError, match=r"captured layers \[1, 2\]: the drafter joins 3 states"):
        default.captured_layers(60, [1, 2])


CLASSIC_TENSORS = draft_tensors(CLASSIC, 7)


def without(*names: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in draft_tensors(DraftShape(), 7).items() if name not in names}


@pytest.mark.parametrize(
    ("shape", "tensors", "title", "names"),
    [
        (
            DraftShape(),
            without("fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"),
            "missing",
            ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"],
        ),
        (DraftShape(fc_norm=False), without(), "unexpected", ["fc_norm.0.weight", "fc_norm.2.weight"]),
        (
            DraftShape(width=64),
            without(),
            "wrong",
            ["layers.0.mlp.down_proj.weight is BF16 [64, 96], expected BF16 or F32 [64, 64]"],
        ),
        (DraftShape(kv_heads=4), without(), "wrong", ["layers.0.self_attn.k_proj.weight is BF16 [64, 128]"]),
        (
            DraftShape(),
            without() | {"embed_tokens.weight": torch.zeros((65, 64)).bfloat16()},
            "wrong",
            ["embed_tokens.weight is BF16 [65, 64], expected BF16 or F32 [64, 64]"],
        ),
        (DraftShape(), without() | {"layers.1.hidden_norm.weight": torch.ones(64)}, "unexpected", ["layers.1."]),
        (
            CLASSIC,
            {name: tensor for name, tensor in CLASSIC_TENSORS.items() if name not in ("d2t", "lm_head.weight")},
            "missing",
            ["d2t", "lm_head.weight"],
        ),
        (CLASSIC, CLASSIC_TENSORS | {"d2t": torch.zeros(39).long()}, "wrong", ["d2t is I64 [39]", "[40]"]),
        (CLASSIC, CLASSIC_TENSORS | {"t2d": torch.zeros(65).bool()}, "wrong", ["t2d is BOOL [65]", "[64]"]),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    shape: DraftShape, tensors: dict[str, Tensor], title: str, names: list[str], folder: Folder
) -> None:
    with pytest.raises(TensorMismatchError, match=title) as refusal:
        folder.load(shape, tensors)
    findings = {
        "missing": refusal.value.missing,
        "unexpected": refusal.value.unexpected,
        "wrong": refusal.value.wrong,
    }[title]
    for name in names:
        assert any(name in finding for finding in findings), findings


@pytest.mark.parametrize(
    ("offset", "message"),
    [(60, r"d2t names target ids 1 to 99, allowed are 0 to 63"), (None, r"d2t gives 40 draft ids only 39 targets")],
)
def test_a_draft_vocabulary_that_leaves_the_targets_or_names_a_token_twice_is_refused(
    offset: int | None, message: str, folder: Folder
) -> None:
    offsets = torch.ones(40, dtype=torch.int64)
    if offset is None:
        offsets[3] = 0
    else:
        offsets[39] = offset
    with pytest.raises(CheckpointError, match=message):
        folder.load(CLASSIC, CLASSIC_TENSORS | {"d2t": offsets})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sliding_window": 8}, "sliding_window is 8, which is not supported"),
        ({"draft_window_size": 512}, "draft_window_size is 512, which is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types is \['sliding_attention'\]"),
        ({"rope_scaling": {"factor": 4}}, r"rope_scaling is \{'factor': 4\}"),
        ({"norm_before_residual": True}, "norm_before_residual is True"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which is not supported; supported: 'silu'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2"),
        ({"architectures": ["MedusaModel"]}, r"architectures is \['MedusaModel'\].* one line of tokens"),
        ({"rope_theta": "absent"}, "lacks rope_theta"),
        ({"fc_norm": 1}, "fc_norm is 1; it has to be true or false"),
        ({"norm_before_fc": True}, "norm_before_fc is True, and False in eagle_config"),
        ({"eagle_config": {"norm_before_fc": True}}, "fc_norm and norm_before_fc are both true"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is False"),
        ({"eagle_config": 3}, "eagle_config is 3"),
        ({"vocab_size": 80}, "the drafter's vocab_size is 80, the target's 64"),
        ({"draft_vocab_size": 65}, "draft_vocab_size 65 exceeds vocab_size 64"),
        ({"hidden_size": 128}, "the drafter's hidden_size is 128, the target's 64"),
        ({"target_hidden_size": 128}, "target_hidden_size 128 is not hidden_size 64"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 31}, "head_dim is 31"),
        ({"head_dim": "absent", "num_attention_heads": 5, "num_key_value_heads": 5}, "has to divide hidden_size 64"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 5]}}, r"\[1, 2, 5\]; .* the target's 4 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "has to list numbers of layers run"),
    ],
)
def test_configurations_that_are_not_computed_are_refused_with_key_and_value(
    changes: dict[str, Any], message: str, folder: Folder
) -> None:
    with pytest.raises(ConfigError, match=message):
        folder.load(DraftShape(), **changes)


def test_unknown_keys_are_reported_and_have_no_effect(folder: Folder, caplog: pytest.LogCaptureFixture) -> None:
    section = {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "colour": 1}
    drafter = folder.load(DraftShape(), eagle_config=section, sliding_window=None, outline="round")
    assert "unknown keys without effect: eagle_config.colour, outline" in caplog.text
    assert torch.equal(first_pass(drafter), first_pass(folder.load(DraftShape())))


def test_a_head_dim_that_is_not_given_follows_from_the_hidden_size() -> None:
    config = draft_config(DraftShape(head_dim=16))
    del config["head_dim"]
    assert Eagle3Config.from_dict(config).head_dim == TARGET.hidden // 4


def test_the_reference_and_the_cpu_layers_join_states_alike(folder: Folder) -> None:
    for shape in (DraftShape(), CLASSIC, DraftShape(fc_norm=False, norm_before_fc=True)):
        drafter = folder.load(shape)
        path = folder.path / f"drafter{folder.num_drafters}"
        weights = open_weights(folder.path / "target", folder.config)
        plain = load_drafter(path, folder.target, weights, torch.float32, ReferenceOps())
        torch.testing.assert_close(first_pass(plain), first_pass(drafter), rtol=1e-5, atol=1e-5)


class UntapedBackend(CpuBackend):
    """The same kernels, called one by one."""

    kernels_only = False


@pytest.mark.parametrize("shape", [DraftShape(), CLASSIC], ids=["eagle 3.1", "classic"])
def test_taped_passes_give_the_bits_of_untaped_ones_and_keep_what_they_returned(
    folder: Folder, shape: DraftShape
) -> None:
    drafter = folder.load(shape)
    cache = layout.CacheLayout(tile_specs(drafter.config, drafter.layer, layout.ElementType.FP32), 16)
    limits = Limits(
        max_seats=2,
        max_tokens=64,
        max_rows=2,
        max_model_len=96,
        tokens_per_page=16,
        max_pages=6,
        max_draft_len=0,
        num_slots=6,
    )
    state = SeatState(limits)
    state.block_table[1] = torch.tensor([3, 0, 5, 2, 1, 4])
    geometry = [attention_geometry(drafter.config, drafter.layer)]
    backends = [
        kind(cache, torch.full((6 * cache.slot_bytes,), 0xFF, dtype=torch.uint8), limits, state, geometry)
        for kind in (CpuBackend, UntapedBackend)
    ]
    rng = torch.Generator().manual_seed(4)
    position, returned = 0, []
    for size in [40, 1, 3, 1, 1, 3, 4, 1, 4]:
        index = torch.arange(position, position + size, dtype=torch.int32)
        slots = DraftSlots(torch.ones_like(index), index, index + 1, index + 2)
        tokens = torch.randint(TARGET.vocab, (size,), generator=rng).to(torch.int32)
        hidden = torch.randn((size, TARGET.hidden), generator=rng)
        returned.append([drafter.forward(tokens, hidden.clone(), slots, backend) for backend in backends])
        position += size
    for taped, untaped in returned:
        assert torch.equal(taped.carried, untaped.carried)
        assert torch.equal(taped.normed, untaped.normed)
