# `make demo` and `make test` are all that a newcomer needs. The work is in the package:
# see `jgraph --help`.

PYTHON ?= python3
BIN := .venv/bin
# Every process of a cluster imports JAX: three times as fast from bytecode, which the
# first one leaves (where this variable does not forbid it). What is never imported need
# not be compiled.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/pip --disable-pip-version-check install --quiet --no-compile

.PHONY: demo test nightly chaos sim fuzz check docs bench peers clean
.DELETE_ON_ERROR:

demo: .venv/demo.stamp
	$(BIN)/jgraph demo

test: check
	-@$(MAKE) --no-print-directory peers-tritonclient  # asks a model server, see there
	$(BIN)/python scripts/second_python.py  # first: a test serves what one Python exported
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -n auto --dist worksteal \
		-m "not nightly and not chaos"

# What takes long and has a smaller one in `make test`.
nightly: fuzz
	-@$(MAKE) --no-print-directory peers-tensorflow  # loads a SavedModel
	$(BIN)/python -m pytest -n auto --dist worksteal -m nightly
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -n auto --dist worksteal \
		-m "hypothesis and not nightly and not chaos"
	JGRAPH_SIMULATIONS=400 $(BIN)/python -m pytest -n auto --dist worksteal tests/simulation

# Faults that need minutes; two at a time, as most of that is waiting. Then tasks killed and
# frozen by a seed that is printed: CHAOS_SEED=7 make chaos
chaos: .venv/dev.stamp
	$(BIN)/python -m pytest -n 2 --dist worksteal -m chaos \
		tests/faults tests/train/test_failpoints.py tests/planted \
		--ignore tests/faults/test_nemesis.py
	$(BIN)/python -m pytest -n 0 -s -m chaos tests/faults/test_nemesis.py

# Thousands of runs in virtual time; JGRAPH_SIMULATION=7 JGRAPH_SIMULATIONS=1 repeats one.
sim: .venv/dev.stamp
	JGRAPH_SIMULATIONS=$${JGRAPH_SIMULATIONS:-5000} $(BIN)/python -m pytest -n 0 \
		--timeout 3600 tests/simulation

# Random programs on clusters of any shape against JAX alone; an hour or so. Random bytes
# against every decoder, by coverage, where atheris can be had (else its tests are skipped).
fuzz: .venv/dev.stamp
	-$(PIP) -e '.[fuzz]'
	JGRAPH_FUZZ_CASES=2000 $(BIN)/python -m pytest -n auto --dist worksteal \
		tests/fuzz tests/plan/partition/test_updates.py

check: .venv/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/hadolint Dockerfile
	$(BIN)/pip check

# The outputs of the notebooks anew, where more than measured values differs; then the
# pages as a site, build/site/index.html.
docs: .venv/docs.stamp
	$(BIN)/python scripts/notebook_outputs.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

bench: .venv/dev.stamp
	$(BIN)/python -m benchmarks selection

# What benchmarks/compare.py compares with; nothing else needs it. Each has an
# environment of its own: one that cannot be had does not stop the others.
peers:
	$(MAKE) --keep-going peers-tensorflow peers-ray peers-torch

peers-%: .venv-peers-%/installed.stamp
	@:

.PRECIOUS: .venv-peers-%/installed.stamp
.venv-peers-%/installed.stamp: benchmarks/peers/%.txt
	$(PYTHON) -m venv .venv-peers-$*
	.venv-peers-$*/bin/pip --disable-pip-version-check install --quiet -r $<
	@touch $@

clean:
	rm -rf .venv .venv-newest .venv-peers* demo-output build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo \
	  "jgraph needs Python 3.11 or newer and '$(PYTHON)' is not;" \
	  "name one: make PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/%.stamp: pyproject.toml | $(BIN)/python
	@echo "installing jgraph[$*] into .venv; the first time takes a minute or two"
	$(PIP) -e '.[$*]'
	@touch $@
