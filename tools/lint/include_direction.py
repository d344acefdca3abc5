"""Checks which C++ library includes which, from the #include lines.

CMake's link edges say the same, but a header-only use passes the linker unseen; this reads the lines themselves.
"""

import re
from pathlib import Path

# What each library under cpp/tandem may include besides itself.
ALLOWED: dict[str, frozenset[str]] = {
    "base": frozenset(),
    "layout": frozenset({"base"}),
    "kv": frozenset({"base", "layout"}),
    "sched": frozenset({"base", "kv", "layout"}),
    "transfer": frozenset({"base", "layout", "kv"}),
    "cpu": frozenset({"base"}),
}
# Headers of Python, torch and CUDA stay in cpp/bindings and above.
_FOREIGN = re.compile(r"^(Python\.h|pybind11/|nanobind/|torch/|ATen/|c10/|cuda|cublas|nccl|dlpack/)")
_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)


def faults(path: Path, source_root: Path) -> list[str]:
    """What `path`, a file under `source_root` (the folder `cpp`), includes against the direction."""
    parts = path.relative_to(source_root).parts
    if parts[0] != "tandem":
        return []
    library = parts[1]
    if library not in ALLOWED:
        return [f"{path}: library {library!r} has no place in the dependency order: {', '.join(ALLOWED)}"]
    found = []
    for match in _INCLUDE.finditer(path.read_text(encoding="utf-8")):
        header = match[1]
        if _FOREIGN.match(header):
            found.append(f"{path}: includes {header}; such headers belong in cpp/bindings")
        elif header.startswith("tandem/"):
            used = header.split("/")[1]
            if used != library and used not in ALLOWED[library]:
                allowed = ", ".join(sorted(ALLOWED[library])) or "nothing else"
                found.append(f"{path}: includes {header}, but {library} may use {allowed}")
        elif header.startswith("../"):
            found.append(f"{path}: includes {header}; name headers from the root of cpp/")
    return found
