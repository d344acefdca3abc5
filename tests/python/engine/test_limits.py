"""Sizes resolved from what was asked for and what is free."""

from pathlib import Path

import pytest

from tandem.engine.errors import InvalidParameterError, PoolTooSmallError
from tandem.engine.limits import SizeRequest, resolve_limits
from tandem.engine.memory import available_memory
from tandem.msa import Limits


def resolve(free_bytes: int = 1 << 30, **request: int) -> Limits:
    return resolve_limits(
        SizeRequest(**request), position_limit=1000, tokens_per_page=128, slot_bytes=1 << 20, free_bytes=free_bytes
    )


def test_by_default_half_the_free_memory_becomes_pages() -> None:
    limits = resolve(free_bytes=100 << 20)
    assert (limits.num_slots, limits.max_model_len, limits.max_pages) == (50, 1000, 8)


def test_the_pool_is_never_larger_than_the_seats_can_use() -> None:
    assert resolve(free_bytes=1 << 40, max_seats=3).num_slots == 3 * 8


def test_a_given_size_is_taken_as_it_is_in_whole_pages() -> None:
    assert resolve(free_bytes=0, kv_cache_bytes=(20 << 20) + 5).num_slots == 20


@pytest.mark.parametrize("request_bytes", [8 * (1 << 20) - 1, 0])
def test_a_pool_too_small_for_one_sequence_is_refused_with_both_numbers(request_bytes: int) -> None:
    with pytest.raises(PoolTooSmallError) as caught:
        resolve(kv_cache_bytes=request_bytes)
    assert (caught.value.given_bytes, caught.value.needed_bytes) == (request_bytes, 8 << 20)
    assert f"{request_bytes:,}" in str(caught.value)
    assert f"{8 << 20:,}" in str(caught.value)
    assert resolve(kv_cache_bytes=8 << 20).num_slots == 8


def test_too_little_free_memory_is_the_same_error() -> None:
    with pytest.raises(PoolTooSmallError):
        resolve(free_bytes=15 << 20)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 1),
        ("max_model_len", 1001),
        ("max_seats", 0),
        ("max_tokens_per_step", 0),
        ("kv_cache_bytes", -1),
        ("max_seats", True),
    ],
)
def test_sizes_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(InvalidParameterError, match=field):
        resolve(**{field: value})


def test_a_step_can_always_hold_every_seat() -> None:
    assert resolve(max_seats=700).max_tokens == 700
    assert resolve().max_tokens == 512


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def make_root(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_group_limit_the_machine_decides(tmp_path: Path) -> None:
    root = make_root(tmp_path, "0::/\n", {"memory.max": "max\n", "memory.current": "5\n"})
    assert available_memory(root) == 800 * 1024


def test_a_group_limit_counts_with_droppable_file_pages(tmp_path: Path) -> None:
    files = {"memory.max": "300000\n", "memory.current": "250000\n", "memory.stat": "anon 1\ninactive_file 20000\n"}
    root = make_root(tmp_path, "0::/a/b\n", {f"a/b/{name}": text for name, text in files.items()})
    assert available_memory(root) == 70_000


def test_the_tightest_group_on_the_way_up_decides(tmp_path: Path) -> None:
    files = {
        "a/memory.max": "100\n",
        "a/memory.current": "90\n",
        "a/b/memory.max": "500\n",
        "a/b/memory.current": "90\n",
    }
    assert available_memory(make_root(tmp_path, "0::/a/b\n", files)) == 10


def test_groups_of_the_first_version_are_read_too(tmp_path: Path) -> None:
    files = {"memory/c/memory.limit_in_bytes": "1000\n", "memory/c/memory.usage_in_bytes": "1200\n"}
    assert available_memory(make_root(tmp_path, "5:cpu,memory:/c\n4:pids:/c\n", files)) == 0


def test_this_machine_has_memory() -> None:
    assert available_memory() > 0
