"""How much memory is really free: what the machine has, and what the process's control groups leave of it."""

from __future__ import annotations

from pathlib import Path

_UNLIMITED = 2**60


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that could be allocated now without swapping or being killed.

    The least of the machine's ``MemAvailable`` and what each control group of the process, up to the root, has left
    below its limit; pages of files that the group could drop count as free.

    Args:
        root: where ``proc`` and ``sys`` are found.
    """
    free = _meminfo_available(root)
    for directory, limit_name, usage_name, stat_name in _groups(root):
        limit = _read_number(directory / limit_name)
        usage = _read_number(directory / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        free = min(free, max(0, limit - usage + _droppable(directory / "memory.stat", stat_name)))
    return free


def _meminfo_available(root: Path) -> int:
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{root / 'proc/meminfo'} has no MemAvailable; give kv_cache_bytes")


def _groups(root: Path) -> list[tuple[Path, str, str, str]]:
    """(directory, limit file, usage file, name of droppable bytes in memory.stat) of the process's groups, innermost
    first. A container often sees its own group as the root of the mount, so that root is always among them.
    """
    groups: list[tuple[Path, str, str, str]] = []
    listing = root / "proc/self/cgroup"
    if not listing.is_file():
        return groups
    for line in listing.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        parts = [part for part in path.split("/") if part]
        groups += [(mount.joinpath(*parts[:depth]), *names) for depth in range(len(parts), -1, -1)]
    return groups


def _read_number(path: Path) -> int | None:
    """The number in a file; None where there is no such file or it says ``max``."""
    if not path.is_file():
        return None
    text = path.read_text().strip()
    return None if text == "max" else int(text)


def _droppable(path: Path, name: str) -> int:
    if not path.is_file():
        return 0
    for line in path.read_text().splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0
