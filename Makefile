# demo and test make the virtual environment they need, torch first: without a version pip may take a CUDA build of
# several gigabytes. Another build: make demo TORCH="torch==2.13.0 --index-url …".
VENV ?= .venv
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PARALLEL := --numprocesses auto --maxprocesses 4 --dist loadfile
# tests that count on seconds, and run without those that compute
ALONE := tests/faults tests/test_workers.py tests/test_embedded.py

.PHONY: demo test check serve bench faults clean

demo: $(VENV)/.run  ## begin a take, kill the server, go on: the same bits
	@$(BIN)/longtake demo

test: $(VENV)/.dev  ## all tests, on up to four cores
	@$(BIN)/pytest $(PARALLEL) $(addprefix --ignore=,$(ALONE))
	@$(BIN)/pytest $(PARALLEL) $(ALONE)

check: $(VENV)/.dev  ## lint and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

serve: $(VENV)/.run  ## serve on http://127.0.0.1:8000
	@$(BIN)/longtake serve

bench: $(VENV)/.dev  ## measure; rows go to benchmarks/RESULTS.md
	@$(BIN)/python -m benchmarks.overhead --record
	@$(BIN)/python -m benchmarks.serving --record
	@$(BIN)/python -m benchmarks.state --record
	@$(BIN)/python -m benchmarks.resume --record

faults: $(VENV)/.dev  ## half an hour of random faults, or LONGTAKE_FAULT_MINUTES; seeds are printed
	@LONGTAKE_FAULT_MINUTES=$${LONGTAKE_FAULT_MINUTES:-30} $(BIN)/pytest tests/faults

clean:
	rm -rf $(VENV) longtake-demo build dist *.egg-info

$(BIN)/python:
	@echo "making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.torch: | $(BIN)/python
	@echo "installing torch (the largest part, a minute or two the first time)"
	@$(BIN)/pip install -q --disable-pip-version-check $(TORCH)
	@touch $@

$(VENV)/.run: pyproject.toml $(VENV)/.torch
	@echo "installing longtake"
	@$(BIN)/pip install -q --disable-pip-version-check -e .
	@touch $@

$(VENV)/.dev: pyproject.toml $(VENV)/.torch
	@echo "installing longtake and what its tests need"
	@$(BIN)/pip install -q --disable-pip-version-check -e '.[dev]'
	@touch $@ $(VENV)/.run
