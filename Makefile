# The two commands of the README, and what a contributor types. Everything builds .venv first; a second call costs nothing.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.moegate-stamp
MATRIX ?= matrix.yaml
RUN ?=
PYTEST ?=

.PHONY: help venv run test lint unit test-slow test-faults-long test-fuzz-long test-vllm wheelhouse image base-image constraints clean distclean

help:  ## print this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{t[NR] = $$1; d[NR] = $$2; if (length($$1) > w) w = length($$1)} \
		END {for (i = 1; i <= NR; i++) printf "  make %-" w "s  %s\n", t[i], d[i]}'

$(STAMP): pyproject.toml constraints/cpu.txt scripts/venv.sh
	@scripts/venv.sh $(STAMP)

venv: $(STAMP)  ## build .venv (Python, CPU torch and Triton, this project)
	@:

run: venv  ## run $(MATRIX): tune, measure, gate; the last lines give the verdict and the report (RUN= adds options)
	@if [ -d wheelhouse/third-party ]; then scripts/wheelhouse.sh; fi  # keeps the image's copy of us in step
	@$(VENV)/bin/orchestrator run $(MATRIX) $(RUN)

test: lint unit  ## lint, types and tests (what this machine lacks is skipped, with the reason)

lint: venv  ## ruff, mypy --strict and the import contracts
	@$(PY) -m ruff check .
	@$(PY) -m mypy
	@$(VENV)/bin/lint-imports --no-logo

unit: venv  ## the tests that take seconds (PYTEST= adds options: make unit PYTEST='-k configs')
	@$(PY) -m pytest -m "not slow" $(PYTEST)

test-slow: venv  ## the tests of ten seconds and more: whole runs, containers, compilers, expert parallelism
	@$(PY) -m pytest -m slow $(PYTEST)

test-faults-long: venv  ## 500 runs under random faults, and one for every point that can be hit (two hours or more)
	@MOEGATE_FAULT_ROUNDS=500 $(PY) -m pytest -s tests/faults $(PYTEST)

test-fuzz-long: venv  ## ten minutes of fuzzing for each reader of foreign data
	@MOEGATE_FUZZ_SECONDS=600 MOEGATE_FUZZ_SEED=$${MOEGATE_FUZZ_SEED:-0} $(PY) -m pytest tests/fuzz $(PYTEST)

test-vllm: venv  ## our engine file and load client against a real vLLM on the CPU (about 3 GB the first time)
	@scripts/test-vllm.sh

wheelhouse: venv  ## download what the CPU image installs into wheelhouse/
	@scripts/wheelhouse.sh

base-image:  ## make the local base image with debootstrap (root), where no registry can be reached
	@scripts/base-image.sh

image: venv wheelhouse  ## build the CPU image from dockerfiles/cpu.Dockerfile and the wheelhouse
	@$(PY) -m orchestrator.images dockerfiles/cpu.Dockerfile

constraints: venv  ## write constraints/cpu.txt from what is in .venv now
	@scripts/constraints.sh

clean:  ## remove caches, builds and the wheelhouse
	@rm -rf build dist wheelhouse .cache .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis ./*.egg-info
	@find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean  ## and .venv
	@rm -rf $(VENV) .venv.lock .venv-vllm
