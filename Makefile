# make demo | serve | test | lint | clean.  Everything lives in .venv and build/; nothing else is touched.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VENV := .venv
PY := $(VENV)/bin/python
TINY := build/tiny
PORT ?= 30000
PYTHON ?=
PIP_FLAGS ?=
PYTEST_ARGS ?=
# Two processes, a file each in its order: the files that start servers are the long ones, and come first.
PARALLEL ?= -n 2 --dist loadfile --no-loadscope-reorder
PIP := $(PY) -m pip --disable-pip-version-check install -qq $(PIP_FLAGS)

# SGLang without a GPU: a stand-in for the CUDA-only sgl_kernel, importable by every process that SGLang spawns.
# It goes on the path here and nowhere else; an installed wheel never sees it.
export PYTHONPATH := $(CURDIR)/tools/cpu_shim$(if $(PYTHONPATH),:$(PYTHONPATH))
export SGLANG_USE_CPU_ENGINE := 1
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TRANSFORMERS_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help env demo serve test lint clean

help:
	@echo "make demo    write a tiny checkpoint, serve it, replay chats warm and cold"
	@echo "make serve   leave that server running (PORT=$(PORT))"
	@echo "make test    ruff, mypy, pytest (PYTEST_ARGS=...)"
	@echo "make lint    ruff and mypy only"

# One marker for each step: a step runs again only when what it installs has changed.
$(VENV)/.python:
	@if [ ! -x $(PY) ]; then \
	  for p in $(PYTHON) python3.11 python3.12 python3; do \
	    if "$$p" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null; then \
	      echo "environment: $(VENV), $$("$$p" --version)"; "$$p" -m venv $(VENV); break; fi; done; fi
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || { \
	  echo "make: needs Python 3.11 or 3.12 with venv; name one with PYTHON=/path/to/python" >&2; exit 1; }
	@touch $@

$(VENV)/.cpu: requirements/torch.txt requirements/cpu.txt | $(VENV)/.python
	@echo "installing torch and SGLang's imports (once, a few minutes)"
	@$(PIP) -c requirements/cpu.txt -r requirements/torch.txt
	@$(PIP) --no-deps -r requirements/cpu.txt
	@touch $@

$(VENV)/.package: pyproject.toml $(VENV)/.cpu
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.test: requirements/test.txt $(VENV)/.cpu
	@echo "installing the test tools (once)"
	@$(PIP) --no-deps -r requirements/test.txt
	@touch $@

env: $(VENV)/.package

# Written again whenever its writer changes.
$(TINY)/model.safetensors: sglang_dsv4/tiny.py sglang_dsv4/geometry.py configs/tiny.json | env
	@echo "writing the tiny checkpoint"
	@$(PY) -m sglang_dsv4.tiny $(TINY)

demo: env $(TINY)/model.safetensors
	@$(VENV)/bin/sglang-dsv4 demo --model $(TINY)

serve: env $(TINY)/model.safetensors
	@$(VENV)/bin/sglang-dsv4 serve --model $(TINY) --port $(PORT)

lint: $(VENV)/.package $(VENV)/.test
	@$(PY) -m ruff check .
	@$(PY) -m mypy

test: lint
	@$(PY) -m pytest $(PARALLEL) $(PYTEST_ARGS)

clean:
	rm -rf build .pytest_cache .mypy_cache .ruff_cache
