# Each target does the set-up it needs; `make setup` is quick when nothing changed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.tfpar-installed
WORKDIR ?= runs/quickstart
# Two test processes: on two cores more would only wait for each other.
TEST_PROCESSES ?= 2

.PHONY: help setup train test lint format bench clean

help:
	@echo "make train   train an image classifier on a 2-worker cluster on this machine"
	@echo "make test    run all tests"
	@echo "make lint    style, types, import rules"
	@echo "make bench   measure step overhead and input pipeline"
	@echo "make clean   remove what the build made (runs/ stays)"

setup: $(STAMP)

$(STAMP): setup.py pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "Python 3.10 or later is needed; name one with make PYTHON=/path/to/python3"; exit 1; }
	@test -x $(RUN) && $(RUN) -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || \
	  { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq && \
	    apt-get install -y -qq python3-venv && $(PYTHON) -m venv --clear $(VENV); } || \
	  { echo "Python's venv module is missing: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV) (TensorFlow is large: the first time takes a few minutes)"
	@$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade pip "setuptools>=77" wheel
	@$(RUN) -m pip install --quiet --disable-pip-version-check -e ".[test]"
	@touch $@

# A finished run of before is moved aside: its workdir would otherwise be resumed, and nothing would be left to do.
train: setup
	@if [ -e $(WORKDIR) ]; then \
	  aside="$(WORKDIR)-$$(date +%Y%m%d-%H%M%S)"; mv $(WORKDIR) $$aside; echo "the run of before is now in $$aside"; fi
	$(RUN) -m tfpar.launch --workers=2 -- experiments/image_classification.py \
	  --flagfile=experiments/recipes/quickstart.flags --workdir=$(WORKDIR)

test: setup
	$(RUN) -m pytest -n $(TEST_PROCESSES) --dist=worksteal

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

bench: setup
	$(RUN) experiments/benchmarks/step_overhead.py
	$(RUN) experiments/benchmarks/inputs.py

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
