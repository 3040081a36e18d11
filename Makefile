# `make` lists the targets. Everything runs in .venv, which `make setup` builds from .ci/constraints.txt.

PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
RECIPES := recipes/g2p.toml recipes/wiki.toml

include tests/bench/peers.mk

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint data recipes recipes-ci report bench-sweep bench-quant bench-promise readme clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1 \2/' | \
	    while read -r name text; do printf '  make %-13s %s\n' "$$name" "$$text"; done

setup: $(STAMP)  ## make .venv and install everything into it (a second run installs nothing)

$(STAMP): pyproject.toml .ci/constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed; say which: make PYTHON=/path/to/python3")'
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c .ci/constraints.txt -e '.[convert,report,cluster,dev]'
	@touch $@

demo: setup  ## convert the g2p and wiki models at 5% loss, run them in little memory, print the table
	$(PY) recipes/demo.py

test: lint  ## lint, types and all tests that take seconds
	$(PY) -m pytest -m "not slow"

test-slow: setup  ## the tests that take minutes
	@$(PY) -m pytest -m slow || { status=$$?; test $$status -eq 5 || exit $$status; echo 'no test is marked slow'; }

lint: setup  ## ruff (rules and format) and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

data: setup  ## build the calibration sets from their public sources, where they are not there
	$(PY) calib_data/g2p.py
	$(PY) calib_data/wiki.py

recipes: data  ## convert every recipe and check what must come out
	$(PY) calib_data/docline.py
	$(VENV)/bin/moeconv recipe run $(RECIPES) recipes/docline.toml

recipes-ci: data  ## the same for the recipes that continuous integration runs
	$(VENV)/bin/moeconv recipe run $(RECIPES)

report: setup  ## baselines and routing of the reference models
	$(PY) calib_data/g2p.py --splits train calibration heldout
	$(PY) calib_data/wiki.py --splits train calibration heldout
	$(PY) -m recipes.train.baselines g2p
	$(PY) -m recipes.train.baselines wiki
	$(PY) -m recipes.train.routing g2p
	$(PY) -m recipes.train.routing wiki

bench-sweep: data  ## the exact sweep beside full evaluations: the same result, at what share of the cost
	$(PY) calib_data/docline.py
	$(PY) -m tests.bench.sweep

bench-quant: data $(PEERS_DIR)/.built  ## our quantizers beside HQQ and llama.cpp's at equal effective bits
	$(PY) -m tests.bench.quant

bench-promise: data  ## whole conversions over 20 random splits: how often the held-out loss met the target
	$(PY) -m tests.bench.promise

readme: setup  ## write the generated parts of README.md anew
	$(PY) tests/rules/readme_help.py --write

clean:  ## remove build outputs and caches (not .venv)
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
