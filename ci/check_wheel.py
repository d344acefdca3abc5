"""Builds the wheel as a user's pip would, checks what is in it, and uses it in a clean environment.

The build is isolated, from a copy of the sources into which a stale extension was planted: a developer's tree has such
files, and a wheel that picked one up would work here and nowhere else. The clean environment finds the heavy
dependencies (torch and the like) in .venv by a path file, and has a `tandem` of its own before them.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "wheel"
sys.path.insert(0, str(ROOT))

from tools.lint.sources import project_files  # noqa: E402  (the path above makes it importable)

STALE = b"not an extension"
MAX_DEMO_BYTES = 24 << 20  # what the package may spend on the demo model: target and drafter together


def copy_sources(destination: Path) -> None:
    """The project's files, and extensions of other builds where a developer's tree has them."""
    for path in project_files():
        target = destination / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
    for name in (f"_core{sysconfig.get_config_var('EXT_SUFFIX')}", "_core.cpython-39-stale.so"):
        (destination / "python" / "tandem" / "core" / name).write_bytes(STALE)


def build_wheel(sources: Path) -> Path:
    """An isolated build; its environment holds what pyproject.toml requires, at the pinned versions, and no torch."""
    constraints = str(ROOT / "ci" / "constraints.txt")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(WORK), str(sources)]
    environment = os.environ | {"CMAKE_BUILD_PARALLEL_LEVEL": "2"}
    subprocess.run([*command, "--build-constraint", constraints], check=True, env=environment)
    (wheel,) = WORK.glob("*.whl")
    return wheel


def faults_of_contents(wheel: Path, expected: list[str]) -> list[str]:
    """What is wrong with the files in `wheel`; `expected` are the package files that must be there."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        extensions = [name for name in names if name.endswith((".so", ".pyd", ".dylib"))]
        if len(extensions) != 1 or not extensions[0].startswith("tandem/core/_core."):
            found.append(f"extensions in the wheel are {extensions}, not the one tandem/core/_core")
        found += [f"{name} is a stale build" for name in extensions if archive.read(name) == STALE]
        found += [f"{name} is missing" for name in expected if name not in names]
        top = {name.split("/")[0] for name in names}
        found += [f"{name} does not belong in the wheel" for name in sorted(top) if not name.startswith("tandem")]
        demo_bytes = sum(info.file_size for info in archive.infolist() if info.filename.startswith("tandem/demo/"))
        if demo_bytes > MAX_DEMO_BYTES:
            found.append(f"the demo model takes {demo_bytes} bytes, more than {MAX_DEMO_BYTES}")
    return found


def install(wheel: Path, folder: Path) -> Path:
    """Installs `wheel` alone into a new environment, lets it see .venv's packages, and returns its folder of programs.

    The path file comes after the install, since pip would take .venv's own `tandem` for the one to replace; the
    requirements are then checked without an index, so that one which is missing is an error.
    """
    venv.create(folder, with_pip=False, clear=True)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)}))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run([*pip, "--dry-run", "tandem-serve"], check=True)
    return folder / "bin"


def use(binaries: Path, elsewhere: Path) -> list[str]:
    """Imports the installed package and generates text with it, from a folder that is not the source tree."""
    python = str(binaries / "python")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def output(*command: str) -> str:
        done = subprocess.run(command, check=True, cwd=elsewhere, env=environment, stdout=subprocess.PIPE, text=True)
        return done.stdout

    found = []
    home = output(python, "-c", "import tandem, tandem.core as c; print(tandem.__file__); print(c.layout.__name__)")
    if not home.startswith(str(binaries.parent)):
        found.append(f"imported {home.splitlines()[0]}, not the wheel's own copy")
    question = "Tom has 3 apples and buys 4 more. How many apples does Tom have?"
    options = ["--model", "demo", "--chat", "--prompt", question, "--max-tokens", "200", "--json"]
    answer = json.loads(output(str(binaries / "tandem"), "generate", *options))
    if answer["completion_tokens"] < 1 or not answer["text"]:
        found.append(f"tandem generate gave no text: {answer}")
    return found


def main() -> int:
    """Exit code 1 when the wheel lacks or holds what it should not, or does not work."""
    shutil.rmtree(WORK, ignore_errors=True)
    sources, elsewhere = WORK / "sources", WORK / "elsewhere"
    copy_sources(sources)
    elsewhere.mkdir()
    wheel = build_wheel(sources)
    package = ROOT / "python"
    expected = [str(path.relative_to(package)) for path in project_files(["python/tandem"])]
    found = faults_of_contents(wheel, expected)
    found += use(install(wheel, WORK / "environment"), elsewhere)
    for fault in found:
        print(f"wheel: {fault}", file=sys.stderr)
    print(f"{wheel.name}: {wheel.stat().st_size / 2**20:.1f} MiB, {'wrong' if found else 'right'}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
