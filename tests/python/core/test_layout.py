"""The layout as Python sees it: worked sizes, views over real bytes, the dict form, errors."""

import random
from typing import Any

import numpy as np
import pytest
import torch

from tandem.core import InvalidArgument, layout

CacheLayout = layout.CacheLayout
ElementType = layout.ElementType
Role = layout.Role
Shard = layout.Shard
TileSpec = layout.TileSpec

KIB = 1024


def m3_tiles(draft_heads: int = 4) -> list[layout.TileSpec]:
    tiles = []
    for layer in range(61):
        heads = draft_heads if layer == 60 else 4
        tiles += [TileSpec(layer, role, ElementType.BF16, heads, 128) for role in (Role.K, Role.V)]
    return tiles + [TileSpec(layer, Role.INDEX_K, ElementType.BF16, 1, 128, replicated=True) for layer in range(3, 60)]


def small_layout(shard: layout.Shard | None = None) -> layout.CacheLayout:
    tiles = [
        TileSpec(0, Role.K, ElementType.FP32, 4, 8),
        TileSpec(0, Role.V, ElementType.FP32, 4, 8),
        TileSpec(1, Role.K, ElementType.FP32, 4, 8),
        TileSpec(1, Role.V, ElementType.FP32, 4, 8),
        TileSpec(1, Role.INDEX_K, ElementType.FP32, 1, 6, replicated=True),
    ]
    return CacheLayout(tiles, 4, shard or Shard())


def strided(pool: torch.Tensor, view: layout.View, num_slots: int) -> torch.Tensor:
    """The view as a tensor `[num_slots, sub_pages, heads, tokens, dim]` of fp32 over the pool's own bytes."""
    strides = (view.slot_stride, view.sub_page_stride, view.head_stride, view.token_stride)
    shape = (num_slots, view.sub_pages, view.heads, view.tokens_per_page, view.dim)
    return pool.view(torch.float32).as_strided(shape, (*(s // 4 for s in strides), 1), view.base_offset // 4)


@pytest.mark.parametrize(
    ("draft_heads", "size", "slot_kib"),
    [(4, 1, 17440), (4, 4, 5728), (4, 8, 5728), (64, 1, 21280), (64, 4, 6688), (64, 8, 6176)],
)
def test_m3_slots_have_their_worked_sizes_on_every_rank(draft_heads: int, size: int, slot_kib: int) -> None:
    for rank in range(size):
        assert CacheLayout(m3_tiles(draft_heads), 128, Shard(size, rank)).slot_bytes == slot_kib * KIB


def test_sections_are_shown_in_order_with_what_the_rank_holds() -> None:
    made = CacheLayout(m3_tiles(64), 128, Shard(16, 13))
    shown = [(s.global_heads, s.first_head, s.heads, s.replicas, s.replicated) for s in made.sections]
    assert shown == [(4, 3, 1, 4, False), (64, 52, 4, 1, False), (1, 0, 1, 16, True)]
    assert [s.offset for s in made.sections] == [0, 3840 * KIB, 4096 * KIB]
    assert sum(s.bytes for s in made.sections) == made.slot_bytes


def test_bytes_per_token_leave_padding_out() -> None:
    assert CacheLayout(m3_tiles(), 128).bytes_per_token == 61 * 2048 + 57 * 256
    made = small_layout()
    assert made.bytes_per_token == 4 * 4 * 8 * 4 + 6 * 4
    assert made.slot_bytes > made.bytes_per_token * made.tokens_per_page


def test_writes_through_one_view_are_read_through_every_other_and_touch_no_other_tile(
    torch_rng: torch.Generator,
) -> None:
    made = small_layout()
    num_slots = 3
    pool = torch.zeros(num_slots * made.slot_bytes, dtype=torch.uint8)
    written = {}
    for tile in made.tiles:
        tensor = strided(pool, made.view(tile.layer, tile.role), num_slots)
        values = torch.rand(tensor.shape, generator=torch_rng) + 1
        tensor.copy_(values)
        written[tile] = values
    for tile, values in written.items():
        for page in (1, 2, 4):
            view = made.view(tile.layer, tile.role, page)
            seen = strided(pool, view, num_slots)
            assert torch.equal(seen.permute(0, 2, 1, 3, 4).reshape(num_slots, view.heads, 4, view.dim), values[:, 0])
    content = sum(values.numel() for values in written.values())
    assert int((pool.view(torch.float32) != 0).sum()) == content


def test_offsets_pass_two_gib() -> None:
    view = CacheLayout(m3_tiles(), 128).view(0, Role.K)
    assert view.offset(6500, 3, 0, 127) == 6500 * 17440 * KIB + 3 * 3904 * KIB + 127 * 256
    assert view.bound(6501) == view.offset(6500, 3, 0, 127) + 256


def test_flat_ids_keep_the_shape_of_the_table_and_mark_missing_pages() -> None:
    view = CacheLayout(m3_tiles(), 128).view(3, Role.INDEX_K, 32)
    table = np.array([[2, 0], [1, -1]], dtype=np.int32)
    ids = view.flat_ids(table, num_slots=3)
    assert ids.dtype == np.int32
    assert ids.shape == (2, 8)
    expected = [
        [view.offset(s, 0, q, 0) // view.sub_page_bytes for s in row for q in range(4)] for row in ([2, 0], [1])
    ]
    assert ids[0].tolist() == expected[0]
    assert ids[1].tolist() == expected[1] + [-1] * 4


def test_flat_ids_are_refused_with_the_reason() -> None:
    made = CacheLayout([TileSpec(0, Role.K, ElementType.BF16, 1, 48)], 4, alignment=256)
    with pytest.raises(InvalidArgument, match=r"slot stride of 512 bytes is no multiple of the sub-page's 384"):
        made.view(0, Role.K).flat_ids(np.zeros(1, np.int32), 1)
    view = CacheLayout(m3_tiles(), 128).view(0, Role.K)
    with pytest.raises(InvalidArgument, match="is 3, must be from 0 to 2"):
        view.flat_ids(np.array([3], np.int32), 3)


@pytest.mark.parametrize("table", [np.zeros(4, np.int64), np.zeros((4, 4), np.int32)[:, ::2]])
def test_flat_ids_take_only_contiguous_int32(table: Any) -> None:
    with pytest.raises(TypeError):
        CacheLayout(m3_tiles(), 128).view(0, Role.K).flat_ids(table, 1)


def test_the_dict_form_gives_the_same_layout_back(py_rng: random.Random) -> None:
    for _ in range(20):
        size = py_rng.choice([1, 2, 4])
        shard = Shard(size, py_rng.randrange(size))
        made = CacheLayout(
            m3_tiles(py_rng.choice([4, 64])), py_rng.choice([32, 128]), shard, py_rng.choice([128, 4096])
        )
        again = CacheLayout.from_dict(made.to_dict())
        assert again.to_dict() == made.to_dict()
        assert again.digest() == made.digest()
        assert again.tiles == made.tiles
        assert again.view(60, Role.V, 16) == made.view(60, Role.V, 16)


def test_a_dict_may_have_unknown_keys_and_lack_those_with_defaults() -> None:
    made = small_layout()
    described = made.to_dict()
    del described["shard"]
    del described["alignment"]
    described["colour"] = "green"
    for tile in described["tiles"]:
        tile["note"] = None
        if not tile["replicated"]:
            del tile["replicated"]
    assert CacheLayout.from_dict(described).digest() == made.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "has version 2, must be 1"),
        ({"version": None}, '"version" of a layout\'s dict has a value of the wrong type: None'),
        ({"tokens_per_page": "4"}, "\"tokens_per_page\" of a layout's dict has a value of the wrong type: '4'"),
        ({"tokens_per_page": 4.0}, '"tokens_per_page" of a layout\'s dict has a value of the wrong type: 4.0'),
        ({"tiles": {}}, '"tiles" of a layout\'s dict has a value of the wrong type'),
        ({"tiles": [3]}, '"tiles" of a layout\'s dict has a value of the wrong type: 3'),
        ({"shard": {"size": 3}}, "layer 0 K: shard size is 3, must divide the 4 heads"),
        ({"alignment": 100}, "alignment is 100, must be a power of two of at least 128"),
    ],
)
def test_a_dict_that_does_not_fit_is_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        CacheLayout.from_dict({**small_layout().to_dict(), **change})
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["version", "tiles", "tokens_per_page"])
def test_a_dict_without_a_key_that_has_no_default_is_refused(key: str) -> None:
    described = small_layout().to_dict()
    del described[key]
    with pytest.raises(InvalidArgument, match=f'the dict of a layout has no "{key}"'):
        CacheLayout.from_dict(described)


@pytest.mark.parametrize("key", ["layer", "role", "dtype", "heads", "dim"])
def test_a_tile_without_a_key_or_with_an_unknown_name_is_refused(key: str) -> None:
    described = small_layout().to_dict()
    value = described["tiles"][0].pop(key)
    with pytest.raises(InvalidArgument, match=f'the dict of a tile has no "{key}"'):
        CacheLayout.from_dict(described)
    if isinstance(value, str):
        described["tiles"][0][key] = "NOPE"
        with pytest.raises(InvalidArgument, match=f'"{key}" is "NOPE", must be one of '):
            CacheLayout.from_dict(described)


def test_digests_tell_content_from_place() -> None:
    one = CacheLayout(m3_tiles(), 128)
    four = CacheLayout(m3_tiles(), 128, Shard(4, 2))
    assert len(one.digest()) == 32
    assert int(one.digest(), 16) >= 0
    assert one.digest() != four.digest()
    assert one.content_digest() == four.content_digest()
    assert one.content_digest() != CacheLayout(m3_tiles(64), 128).content_digest()


def test_errors_are_value_errors_that_name_both_values() -> None:
    with pytest.raises(ValueError, match="layer 0 K: shard size is 3, must divide the 4 heads"):
        CacheLayout(m3_tiles(), 128, Shard(3, 0))
    with pytest.raises(InvalidArgument, match="a view's tokens_per_page is 48, must divide the layout's 128"):
        CacheLayout(m3_tiles(), 128).view(0, Role.K, 48)
    with pytest.raises(InvalidArgument, match="no tile layer 2 INDEX_K; that layer has K, V"):
        CacheLayout(m3_tiles(), 128).view(2, Role.INDEX_K)


def test_specs_are_values() -> None:
    tile = TileSpec(3, Role.V, ElementType.FP8_E4M3, 4, 128)
    assert tile == TileSpec(3, Role.V, ElementType.FP8_E4M3, 4, 128, replicated=False)
    assert tile != TileSpec(3, Role.V, ElementType.FP8_E4M3, 4, 64)
    assert len({tile, TileSpec(3, Role.V, ElementType.FP8_E4M3, 4, 128)}) == 1
    assert tile.row_bytes == 128
    assert TileSpec(3, Role.V, ElementType.NVFP4, 4, 128).row_bytes == 64
    assert tile != "layer 3 V"
    assert repr(tile) == "TileSpec(layer=3, role=V, dtype=FP8_E4M3, heads=4, dim=128, replicated=False)"
    assert Shard(4, 1) == Shard(size=4, rank=1)
    assert hash(Shard(4, 1)) == hash(Shard(4, 1))
    with pytest.raises(AttributeError):
        tile.heads = 8  # type: ignore[misc]
