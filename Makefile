# make bench    set up, build, run the main job
# make test     set up, build, lint, types, C++ tests, Python tests
#
# PYTHON  the interpreter to start from
# VENV    the environment to create and use; empty: use PYTHON as it is, install nothing
# TORCH   the torch to install into VENV
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
SCRIPTS := $(shell $(PYTHON) -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
READY :=
else
PY := $(VENV)/bin/python
SCRIPTS := $(abspath $(VENV))/bin
READY := $(VENV)/.ready-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.' _)
endif

export PATH := $(SCRIPTS):$(PATH)
BUILD_DIR := build/cmake
CXX_SOURCES = $(shell find csrc tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')

.DEFAULT_GOAL := build
.PHONY: bench test build lint lint-style lint-format lint-types lint-cpp test-cpp test-python test-long clean

bench: build
	$(PY) -m ulysses_ops.tools.replay_benchmark

# test-long: what takes minutes: each fault at each step, every way to leave, soaks, the largest models and searches.
test: lint build test-cpp test-python

# The last install builds the libraries, with what the others installed; of CUTLASS, the headers alone.
ifneq ($(READY),)
$(READY): pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	rm -f $(VENV)/.ready-*
	$(PY) -m pip install '$(TORCH)' numpy setuptools wheel cmake ninja
	$(PY) -m pip install --no-deps 'nvidia-cutlass>=4.2'
	$(PY) -m pip install --no-build-isolation -e '.[dev]'
	touch $@
endif

build: $(READY)
	$(PY) setup.py -q build_ext --inplace

test-cpp: build
	ctest --test-dir $(BUILD_DIR) --output-on-failure --no-tests=error

test-python: build
	$(PY) -m pytest -m "not long"

test-long: build
	$(PY) -m pytest -m long

# $(call run_if_installed,MODULE,COMMAND)
define run_if_installed
@if $(PY) -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("$(1)") is None)'; \
then set -x; $(2); \
else echo "$@: skipped, $(1) is not installed in $(PY)"; fi
endef

lint: lint-style lint-format lint-types lint-cpp

lint-style: $(READY)
	$(call run_if_installed,ruff,$(PY) -m ruff check)

lint-format: $(READY)
	$(call run_if_installed,ruff,$(PY) -m ruff format --check)

lint-types: $(READY)
	$(call run_if_installed,mypy,$(PY) -m mypy)

lint-cpp: $(READY)
	$(call run_if_installed,clang_format,$(SCRIPTS)/clang-format --dry-run -Werror $(CXX_SOURCES))

clean:
	rm -rf build dist *.egg-info ulysses_ops/*.so
