# Every target sets up what it needs in .venv, then does its work; a second call goes straight to the work.

VENV := .venv
# `make test PYTHON=python3.13` has an environment of its own, with the packages of CORE_EXTRAS, and with torch where
# there is a build of it without CUDA for that version.
ifeq ($(origin PYTHON),undefined)
TEST_VENV := $(VENV)
TEST_READY := $(VENV)/ready-dev
else
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(PYTHON_VERSION),)
$(error PYTHON must be an interpreter that runs, got $(PYTHON))
endif
TEST_VENV := $(VENV)-$(PYTHON_VERSION)
TEST_READY := $(TEST_VENV)/ready-core
endif
PYTHON ?= python3
BIN := $(VENV)/bin
PIP_INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# Uv unpacks packages in parallel. Pip knows more sources, such as folders of wheels: it installs torch, and everything
# where uv reaches no index.
INSTALL = install() { $(@D)/bin/python -m uv pip install --quiet "$$@" || $(@D)/bin/python $(PIP_INSTALL) "$$@"; }; install
# Pip compiles on one core, this on all, without the packages' own tests: a sixth of the code. Some packages have files
# for other versions of Python: these fail.
COMPILE = $(@D)/bin/python -m compileall -qq -j 0 -x '/tests/' $(@D)/lib || true
# Many tests wait for processes that they start: there is one process of tests more than there are cores.
WORKERS := $(shell expr $$(nproc) + 1)
PARALLEL = -n $(WORKERS) --dist worksteal --max-worker-restart 0
CORE_EXTRAS := cli envs hdf5 pandas plot
BENCH_FLAGS ?=
TESTS ?=
TORCH ?= $(shell grep ^torch== constraints.txt)+cpu
LONG_FLAGS ?=
MUTANTS ?= 500
MUTANTS_FLAGS ?=
# Files without a long test are not collected for the long tests: each worker would import all of them.
LONG_TESTS = $(shell grep -lr --include='test_*.py' 'mark\.long' tests)
SOAKS := $(addprefix tests/service/test_, soak.py queue_soak.py slow_links.py table_threads.py)

# Tests start hundreds of processes: without compiled modules each would compile the package again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-long soak mutants minimum lint package bench docs versions pictures serve clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(VENV)/ready-demo ## step simple_tag in 2 processes, write out/rollout.arrow, draw its episodes, read it back
	@mkdir -p out
	$(BIN)/samplebatch collect mpe2/simple_tag_v3 --workers 2 --steps 5000 --out out/rollout.arrow --plot out/episodes.png
	$(BIN)/samplebatch inspect out/rollout.arrow --html out/report.html

test test-long soak mutants: export OMP_NUM_THREADS := 1

test: $(TEST_READY) ## run the tests and all examples; with PYTHON=python3.13, those that run there; TESTS=tests/buffer: a part
	$(TEST_VENV)/bin/python -m pytest $(PARALLEL) $(TESTS)

test-long: $(VENV)/ready-dev ## run the long tests: more kills, more fuzz, more training, every row of the benchmarks
	$(BIN)/python -m pytest -m long $(PARALLEL) -o faulthandler_timeout=1800 $(LONG_FLAGS) $(or $(TESTS),$(LONG_TESTS))

soak: export SOAK_SECONDS ?= 600
soak: $(VENV)/ready-dev ## run the soaks of the replay service for ten minutes each, or for SOAK_SECONDS
	$(BIN)/python -m pytest -m long $(PARALLEL) -o faulthandler_timeout=7200 $(SOAKS)

mutants: $(VENV)/ready-mutants ## change the code in MUTANTS places, 500 by default, and list the changes that no test notices; takes hours
	$(BIN)/python -m tests.mutants --mutants $(MUTANTS) --json out/mutants.json $(MUTANTS_FLAGS)

minimum: $(VENV)-minimum/ready ## run the tests with the oldest supported versions
	$(VENV)-minimum/bin/python -m pytest

lint: $(VENV)/ready-dev ## check style, formatting and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

package: $(VENV)/ready-dev ## build both archives into dist/, and run the README's examples from the wheel in a new environment
	rm -rf dist $(VENV)-package
	$(BIN)/python -m build --outdir dist > $(VENV)/build.log || { cat $(VENV)/build.log; exit 1; }
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python tests/package_metadata.py dist/*.whl
	$(BIN)/python -m venv --without-pip $(VENV)-package
	$(BIN)/python -m pip --python $(VENV)-package/bin/python install --quiet --disable-pip-version-check --only-binary :all: \
		--constraint constraints.txt "$$(echo dist/*.whl)[cli,envs]" polars
	$(VENV)-package/bin/samplebatch --version
	$(VENV)-package/bin/python -P tests/examples.py README.md

bench: $(VENV)/ready-dev ## measure against RLlib, tensordict, pyarrow and bare NumPy; BENCH_FLAGS=--quick to see that it runs, --one-core for a busy machine
	$(BIN)/python -m benchmarks $(BENCH_FLAGS)

docs: $(VENV)/ready-dev ## build the documentation into site/, and check every link and anchor
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	$(BIN)/python docs/links.py site

versions: $(VENV)/ready-dev ## build the documentation of this version into public/, beside those of other versions
	$(BIN)/python docs/versions.py public

pictures: $(VENV)/ready-dev ## draw the pictures of the pages again
	$(BIN)/python docs/pictures.py

serve: $(VENV)/ready-dev ## serve the documentation at http://127.0.0.1:8000, rebuilt after each change
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean: ## remove what the targets made, .venv included
	rm -rf $(VENV) $(VENV)-* dist out site public

%/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "Python 3.11 or later is needed; name one with: make PYTHON=...")'
	$(PYTHON) -m venv $*
	$*/bin/python $(PIP_INSTALL) --constraint constraints.txt uv || echo "without uv, pip installs the packages"

$(VENV)/ready-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt torch
	$(INSTALL) --constraint constraints.txt --editable '.[cli,envs,learn,plot]'
	@$(COMPILE)
	@touch $@

$(VENV)/ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python $(PIP_INSTALL) --constraint constraints.txt torch
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@$(COMPILE)
	@touch $@ $(VENV)/ready-demo

$(VENV)/ready-mutants: $(VENV)/ready-dev
	$(INSTALL) --constraint constraints.txt --editable '.[mutants]'
	@touch $@

# Of torch only a build without CUDA will do: the others are gigabytes. TORCH= leaves it out.
$(TEST_VENV)/ready-core: pyproject.toml constraints.txt | $(TEST_VENV)/bin/python
	$(TEST_VENV)/bin/python -c "$$CORE_REQUIREMENTS" $(CORE_EXTRAS) > $(TEST_VENV)/requirements.txt
	$(INSTALL) --only-binary :all: --constraint constraints.txt --requirement $(TEST_VENV)/requirements.txt
	$(INSTALL) --no-deps --editable .
	$(TEST_VENV)/bin/python $(PIP_INSTALL) --only-binary :all: $(TORCH) 2> $(TEST_VENV)/torch.log || \
		echo "$(PYTHON): without torch, the tests that need torch are skipped"
	@$(COMPILE)
	@touch $@

define CORE_REQUIREMENTS
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
required = [*project["dependencies"]]
for extra in sys.argv[1:]:
    required += project["optional-dependencies"][extra]
print(*required, "duckdb", "hypothesis", "polars", "pytest", "pytest-xdist", sep="\n")
endef
export CORE_REQUIREMENTS

$(VENV)-minimum/ready: pyproject.toml constraints-min.txt | $(VENV)-minimum/bin/python
	$(VENV)-minimum/bin/python $(PIP_INSTALL) --constraint constraints-min.txt --editable '.[cli,envs,hdf5,learn,plot]' \
		duckdb hypothesis pandas polars pytest
	@$(COMPILE)
	@touch $@
