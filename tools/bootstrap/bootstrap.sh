#!/usr/bin/env bash
# What a fresh machine lacks: `bootstrap.sh venv` makes .venv, `bootstrap.sh tests` gets the headers that C++ tests need.
# System packages are installed where that is allowed (root or passwordless sudo, with apt); elsewhere one line names them.
set -eu
cd "$(dirname "$0")/../.."

may_install() {
  command -v apt-get >/dev/null 2>&1 && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }
}

# install_packages WHY PACKAGE... : apt-get, or the one line that says what is missing.
install_packages() {
  local why=$1
  shift
  if ! may_install; then
    echo "bootstrap: $why; install with: apt-get install $* (or your system's equivalent), then run make again" >&2
    exit 1
  fi
  echo "bootstrap: $why; installing $*"
  local as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# A usable interpreter is 3.11 or newer, can make environments, and has the headers that the extension compiles against.
usable_python() {
  "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, pathlib, sys, sysconfig, venv
sys.exit(not (sys.version_info >= (3, 11) and pathlib.Path(sysconfig.get_path("include"), "Python.h").is_file()))
PY
}

# 3.11 comes first because the pins of ci/constraints.txt are tested with it.
find_python() {
  local candidate
  for candidate in python3.11 python3.12 python3.13 python3.14 python3; do
    if command -v "$candidate" >/dev/null 2>&1 && usable_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

make_venv() {
  local python
  if ! python=$(find_python); then
    install_packages "no Python 3.11+ with venv and headers found" python3 python3-venv python3-dev
    python=$(find_python) || { echo "bootstrap: the system's Python is older than 3.11" >&2; exit 1; }
  fi
  command -v c++ >/dev/null 2>&1 || install_packages "no C++ compiler found" g++
  [ -x .venv/bin/python ] || "$python" -m venv .venv
  # The pinned pip, since pins of the isolated build environment (--build-constraint) need a recent one.
  .venv/bin/python -m pip install --quiet --upgrade pip -c ci/constraints.txt
}

has_headers() {
  local header
  for header in gtest/gtest.h gmock/gmock.h benchmark/benchmark.h; do
    echo "#include <$header>" | c++ -std=c++20 -E -x c++ - >/dev/null 2>&1 || return 1
  done
}

case "${1:-}" in
  venv) make_venv ;;
  tests) has_headers || install_packages "GoogleTest or Google Benchmark not found" \
    libgtest-dev libgmock-dev libbenchmark-dev ;;
  *) echo "usage: bootstrap.sh venv|tests" >&2; exit 2 ;;
esac
