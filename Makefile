# Every target sets up what it needs in .venv, then does its work; a second call goes straight to the work.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Pip compiles on one core, this on all. Some packages have files for other versions of Python: these fail.
COMPILE = $(@D)/bin/python -m compileall -qq -j 0 $(@D)/lib || true
PARALLEL := -n auto --dist worksteal --max-worker-restart 0
BENCH_FLAGS ?=
LONG_FLAGS ?=

# Tests start hundreds of processes: without compiled modules each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long minimum lint bench docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/ready-demo ## step simple_tag in 2 processes, write out/rollout.arrow, draw its episodes, read it back
	@mkdir -p out
	$(BIN)/samplebatch collect mpe2/simple_tag_v3 --workers 2 --steps 5000 --out out/rollout.arrow --plot out/episodes.png
	$(BIN)/samplebatch inspect out/rollout.arrow --html out/report.html

# There is a process of tests for each core.
test test-long: export OMP_NUM_THREADS := 1

test: $(VENV)/ready-dev ## run the tests, the docstrings' examples and the documents' examples
	$(BIN)/python -m pytest $(PARALLEL)

test-long: $(VENV)/ready-dev ## run the long tests: more kills, more fuzz, more training, every row of the benchmarks
	$(BIN)/python -m pytest -m long $(PARALLEL) -o faulthandler_timeout=1800 $(LONG_FLAGS)

minimum: $(VENV)-minimum/ready ## run the tests with the oldest supported versions
	$(VENV)-minimum/bin/python -m pytest

lint: $(VENV)/ready-dev ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/ready-dev ## measure against RLlib, tensordict, pyarrow and bare NumPy; BENCH_FLAGS=--quick to see that it runs, --one-core for a busy machine
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

docs: $(VENV)/ready-dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean: ## remove what the targets made, .venv included
	rm -rf $(VENV) $(VENV)-minimum out site

%/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; name one with: make PYTHON=...")'
	$(PYTHON) -m venv $*

$(VENV)/ready-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[cli,envs,plot]'
	@$(COMPILE)
	@touch $@

$(VENV)/ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/ready-demo

$(VENV)-minimum/ready: pyproject.toml constraints-min.txt | $(VENV)-minimum/bin/python
	$(VENV)-minimum/bin/python $(PIP_INSTALL) --constraint constraints-min.txt --editable '.[cli,envs,hdf5,plot]' \
		duckdb hypothesis pandas polars pytest
	@$(COMPILE)
	@touch $@
