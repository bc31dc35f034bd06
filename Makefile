# make demo: train a small Llama on four CPU ranks.  make test: every check.  Both make their own .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := $(VENV)/.pins-installed
PACKAGE := $(VENV)/.package-installed
CUDA := $(wildcard lightning_megatron/kernels/cuda/* tests/kernels/*.h tests/kernels/*.cpp)
ARGS ?=

.PHONY: help demo test lint style types suite format clean

help:
	@echo "make demo    train, save, resume and sample a small Llama on 4 CPU ranks (tp=2, pp=2); ARGS='--max-steps 50' passes options on"
	@echo "make test    lint, types, import layers and the test suite"
	@echo "make lint    the same without the test suite"
	@echo "make format  let ruff rewrite what it can"
	@echo "make clean   remove the virtual environment and everything generated"

# Made anew when the pins change, so that nothing of an older set stays behind.
$(PINS): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "the pinned development tools need Python 3.11 or later, this is %d.%d: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	@touch $@

$(PACKAGE): $(PINS) pyproject.toml
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	@touch $@

demo: $(PACKAGE)
	$(BIN)/python examples/pretrain.py $(ARGS)

lint: style types

style: $(PACKAGE)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CUDA)
	$(BIN)/lint-imports --no-logo

types: $(PACKAGE)
	$(BIN)/mypy

suite: $(PACKAGE)
	$(BIN)/python -m pytest -q $(ARGS)

# Types are checked beside the tests, which leave a core idle where they run one process.
test: style
	@$(MAKE) --no-print-directory --jobs=2 types suite

format: $(PACKAGE)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CUDA)

clean:
	rm -rf $(VENV) .demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache lightning_logs
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
