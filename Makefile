# Two commands do all the set-up on a machine with Python 3.11+, a C++20 compiler and make: `make demo` and `make test`.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: demo test check soak bench stubs format install hooks clean

VENV := .venv
BIN := $(VENV)/bin
RELEASE := build/release
SOURCES := pyproject.toml CMakeLists.txt README.md LICENSE $(shell find cpp python -type f \
  -not -name '*.so' -not -name '*.pyc' -not -path '*/bench/*')

# Answers a held-out word problem with the demo model, streaming, then one line of tokens/s and where the time went.
demo: install
	$(BIN)/python tools/demo.py

# Everything that CI checks; ci/budget.toml lists the suites and their time budgets.
test: install $(VENV)/.stamp-tests
	$(BIN)/python ci/run_suites.py test

# The quick part: format, lint, types, C++ and unit tests.
check: install $(VENV)/.stamp-tests
	$(BIN)/python ci/run_suites.py check

# The full matrices and the long random runs.
soak: install $(VENV)/.stamp-tests
	$(BIN)/python ci/run_suites.py soak

bench: install $(VENV)/.stamp-tests
	$(BIN)/python ci/cpp.py build $(RELEASE)
	for binary in $(RELEASE)/cpp/bench/*_bench; do "$$binary"; done

# Generates the extension's type stubs from the installed extension, to be committed.
stubs: install
	$(BIN)/python tools/stubs.py

format: $(VENV)/.stamp-tools
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	git ls-files -z --cached --others --exclude-standard '*.h' '*.cpp' | xargs -0 -r $(BIN)/clang-format -i

# Installs the commit hooks of .pre-commit-config.yaml.
hooks: $(VENV)/.stamp-tools
	$(BIN)/pre-commit install --hook-type pre-commit --hook-type commit-msg

clean:
	rm -rf build

install: $(VENV)/.stamp-install

$(VENV)/.stamp-python: tools/bootstrap/bootstrap.sh
	tools/bootstrap/bootstrap.sh venv
	touch $@

# The tools are a dependency group of pyproject.toml; nothing of the project itself is built here.
$(VENV)/.stamp-tools: $(VENV)/.stamp-python pyproject.toml ci/constraints.txt
	$(BIN)/python -m pip install --quiet --group dev -c ci/constraints.txt
	touch $@

# Without build isolation, so that the build tree can be kept: an isolated one names tools in a folder that is gone.
$(VENV)/.stamp-install: $(VENV)/.stamp-tools $(SOURCES)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install --quiet . -c ci/constraints.txt \
	  --no-build-isolation -C build-dir=$(RELEASE)
	touch $@

$(VENV)/.stamp-tests: tools/bootstrap/bootstrap.sh
	tools/bootstrap/bootstrap.sh tests
	mkdir -p $(VENV) && touch $@
