# $(call build,FOLDER,TARGET,OPTIONS): configures and builds a target in build/native/FOLDER.
# CMake and Ninja: those that `make setup` installed, else those of the machine.
ROOT := $(abspath $(dir $(abspath $(lastword $(MAKEFILE_LIST))))/../..)
BUILD ?= $(ROOT)/build/native
CLANG ?= clang++
CMAKE ?= $(firstword $(wildcard $(ROOT)/.venv/bin/cmake) cmake)
NINJA ?= $(firstword $(wildcard $(ROOT)/.venv/bin/ninja) $(shell command -v ninja))
GENERATOR := $(if $(NINJA),-G Ninja -DCMAKE_MAKE_PROGRAM=$(NINJA))
# Ninja would look for the job server of a `make --jobs`, which this recipe does not inherit.
build = env -u MAKEFLAGS $(CMAKE) --log-level=WARNING -S $(ROOT) -B $(BUILD)/$1 $(GENERATOR) -DTFPAR_TESTS=ON $3 > /dev/null \
  && NINJA_STATUS="$1 [%f/%t] " env -u MAKEFLAGS $(CMAKE) --build $(BUILD)/$1 --target $2
