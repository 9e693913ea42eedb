# Every target works from a fresh clone with nothing but Python 3.10 or newer: the first one that needs
# it makes .venv from requirements.lock. PYTHON picks the interpreter, PIP_ARGS is passed to pip (a CPU
# build of torch, for one: PIP_ARGS="--index-url https://download.pytorch.org/whl/cpu --extra-index-url https://pypi.org/simple").
PYTHON ?= python3
PIP_ARGS ?=
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TRITON := $(VENV)/triton
KERNELS := out/kernels

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint nightly test-library test-gpu bench-cpu bench-gpu bench-engine bench-http clean

help:            ## list the targets
	@grep -E '^[a-z-]+: .*##' Makefile | sed -E 's/:.*##/  -/'

setup: $(READY)  ## make the virtual environment

$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else f"Python 3.10 or newer is needed, {sys.executable} is {sys.version.split()[0]}: make PYTHON=/path/to/python3.1x")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_ARGS) -r requirements.lock
	$(BIN)/pip install --quiet --no-deps -e .
	touch $(READY)

demo: $(READY)   ## score a real case: selection, fidelity, timings, picture
	$(BIN)/nvfp4-indexer demo

lint: $(READY)   ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(TRITON)/.ready: requirements-triton.lock $(READY)
	mkdir -p $(TRITON)
	$(BIN)/pip install --quiet --upgrade --no-deps --target $(TRITON) -r requirements-triton.lock
	touch $@

# lint runs beside the tests, which leave a core idle at their start and end; its output comes last. Tests start many
# processes, which would each compile the project's sources again where bytecode may not be written.
test: $(READY) $(TRITON)/.ready ## lint and the whole test suite but the nightly sweeps
	@mkdir -p out; $(MAKE) --no-print-directory lint >out/lint.txt 2>&1 & lint=$$!; \
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n auto --dist loadgroup -m "not nightly"; tests=$$?; \
	wait $$lint; linted=$$?; cat out/lint.txt; exit $$((tests ? tests : linted))

nightly: $(READY) $(TRITON)/.ready ## the slow sweeps, and the contract through the kernel library
	$(BIN)/python -m pytest -n auto -m nightly
	$(MAKE) test-library

test-library: $(READY) ## the contract through the gfx950 kernel library, in processes that cannot import FlyDSL
	$(BIN)/nvfp4-indexer kernel export --out $(KERNELS)
	NVFP4_INDEXER_KERNEL_LIBRARY=$(KERNELS)/nvfp4-indexer-kernels.so $(BIN)/python -m pytest -n auto \
		-p tests.support.without_flydsl -m "not nightly" -k flydsl-sim tests/contract

test-gpu: $(READY) ## every test of the backends on this machine's GPU, the slow ones too
	NVFP4_INDEXER_TEST_BACKENDS=triton $(BIN)/python -m pytest -n 8 -m "" tests/contract tests/gpu

bench-gpu: $(READY) ## speed of the triton backend on this machine's GPU: every stage, cold and warm
	$(BIN)/python -m tests.benchmarks.bench_gpu

bench-cpu: $(READY) ## speed of the cpu backend against torch.mm and the oracle, alone and beside a busy process
	$(BIN)/python -m tests.benchmarks.bench_cpu

bench-http: $(READY) ## what HTTP costs over in-process calls, and calls a second, on loopback
	$(BIN)/python -m tests.benchmarks.bench_http

clean:           ## remove the environment and everything built
	rm -rf $(VENV) out build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
