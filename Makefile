# Each target sets up what it needs; nothing has to be done before `make run` or `make test`.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := smollm2-135m-instruct

.PHONY: help run test test-fast check bench setup model clean

help: ## what there is
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

run: setup ## router and worker on this machine, a first answer, and what to try next
	@$(BIN)/legato up

test: setup model ## the tests (under 15 minutes on 2 cores)
	@$(BIN)/python -m pytest

test-fast: setup model ## the tests that take seconds
	@$(BIN)/python -m pytest -m "not slow"

check: setup ## format, lint, types, import contracts, proto lint, module sizes
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/buf lint
	@$(BIN)/python tests/sizes.py

bench: setup model ## continuous against static batching, and the scheduler's own cost
	@$(BIN)/python -m tests.bench.bench_scheduler
	@$(BIN)/python -m tests.bench.bench_batching

setup: $(READY)

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard protos/legato/v1/*.proto)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Legato needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

model: setup
	@$(BIN)/legato pull $(MODEL)

clean: ## remove the environment and what was generated
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find protos -name '*_pb2*' -delete
