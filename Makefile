# Shortcuts; everything works without make (see CONTRIBUTING.md).
SHELL := bash
SETUP := set -euo pipefail; source launch/setup.sh; helix_setup test demo

.PHONY: help check lint format test slow gpu demo

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1\t/p' Makefile | expand -t 16

check: ## what CI runs: format, lint, types, the CPU suite
	@bash .ci/run

lint: ## format, lint and types only
	@$(SETUP); helix_lint

format: ## rewrite files as ruff wants them
	@$(SETUP); "$$HELIX_BIN/ruff" format .; "$$HELIX_BIN/ruff" check --fix .

test: ## the CPU suite without its slow tests
	@bash launch/test.sh

slow: ## the slow tests of the CPU suite
	@bash launch/test.sh -m "slow and not gpu and not multi_gpu"

gpu: ## the tests that need GPUs
	@$(SETUP); "$$HELIX_BIN/python" -m pytest -m "gpu or multi_gpu"

demo: ## real text from a real model on three CPU ranks
	@bash launch/demo.sh
