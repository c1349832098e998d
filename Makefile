# `make demo` and `make test` do all the set-up on a fresh Debian machine with Python 3.11 to 3.13.
# Variables: VENV (default .venv), PYTHON, TORCH_VERSION (default 2.13.0), ARGS (for pytest, the demo, the benchmarks).
SHELL := /bin/bash
VENV ?= .venv
export VENV
.DEFAULT_GOAL := help
.PHONY: help setup build demo docs linkcheck test lint format tidy sanitize matrix nccl-host soak model fuzz bench bench-native clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

setup: ## the development environment in .venv
	@scripts/setup.sh

build: setup ## the package, in place
	@scripts/build.sh

demo: build ## trains through killed, frozen and new workers, and a killed store; writes demo.png
	@$(VENV)/bin/python examples/train_digits.py $(ARGS)

docs: build ## the documentation site: build/docs/html/index.html
	@scripts/docs.sh

linkcheck: build ## whether the documentation's links to other sites still lead somewhere
	@scripts/docs.sh --linkcheck

test: ## builds; C++ tests, then Python tests
	@scripts/setup.sh --tests
	@scripts/test.sh $(ARGS)

lint: build ## formatting, lint, types, include direction
	@scripts/lint.sh

format: setup ## rewrites what clang-format and ruff can
	@scripts/lint.sh --fix

tidy: setup ## clang-tidy, with clang's thread-safety analysis
	@scripts/tidy.sh

sanitize: ## the C++ tests, C++ and C examples under ASan + UBSan, then TSan
	@scripts/setup.sh --all
	@scripts/sanitize.sh address
	@scripts/sanitize.sh thread

matrix: ## kills, freezes and cuts ranks in the midst of operations; goes on where it was interrupted (ARGS: --sample --minutes 3)
	@scripts/setup.sh --tests
	@mkdir -p build
	@scripts/matrix.sh $(if $(filter undefined,$(origin ARGS)),--done build/matrix.done,$(ARGS))

nccl-host: ## NCCL's own library on the simulated device: the device tests (ARGS for pytest)
	@scripts/setup.sh --tests
	@scripts/build.sh --tests
	@scripts/nccl_host.sh $(ARGS)

soak: build ## an elastic job that trains while processes die, freeze and join (MINUTES=15, ARGS: --rule store, --cuts as root)
	@$(VENV)/bin/python tests/soak --minutes $(or $(MINUTES),15) $(ARGS)

model: ## explores the membership protocol with the larger budgets, an hour and a half
	@scripts/setup.sh --tests
	@scripts/build.sh --tests
	@TORCHFT_EXT_MODEL=full build/dev/tests/cpp/torchft_ext_tests --gtest_filter='ElasticModel.*:ElasticSchedules.*'

fuzz: ## the parsers under libFuzzer (ARGS: --seconds 60)
	@scripts/setup.sh --all
	@scripts/fuzz.sh $(ARGS)

bench: ## all benchmarks that need no GPU: quick by default (ARGS= for the full length)
	@scripts/setup.sh --tests
	@scripts/build.sh --tests
	@$(VENV)/bin/python benchmarks/run.py $(if $(filter undefined,$(origin ARGS)),--quick,$(ARGS))

bench-native: build ## the engine's operations without Python (ARGS: --world 4 --op all --max 16M)
	@cmake -S . -B build/dev -DTORCHFT_EXT_BUILD_BENCHMARKS=ON >build/bench-native.log && cmake --build build/dev --target ft_bench shm_limit backend_call ddp_step >>build/bench-native.log
	@build/dev/benchmarks/native/ft_bench $(ARGS)

clean: ## everything built, not the environment
	rm -rf build dist torchft_ext.egg-info torchft_ext/lib torchft_ext/include torchft_ext/share torchft_ext/_C*.so \
	  torchft_ext/_build_info.py .mypy_cache .ruff_cache .pytest_cache demo.png
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -print0 | xargs -0 -r rm -rf
