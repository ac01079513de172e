# Shortcuts; everything works without make (see CONTRIBUTING.md).
SETUP = set -euo pipefail; source launch/setup.sh; helix_setup test demo
SHELL = /usr/bin/env bash

.PHONY: check lint format test fast gpu demo

check: ## what .ci runs
	@bash .ci/run

lint: ## format, lint, types
	@$(SETUP); helix_lint

format: ## rewrite files as ruff wants them
	@$(SETUP); "$$HELIX_BIN/ruff" format .; "$$HELIX_BIN/ruff" check --fix .

test: ## the whole CPU suite
	@bash launch/test.sh

fast: ## the CPU suite without its slow tests
	@bash launch/test.sh -m "not gpu and not multi_gpu and not slow"

gpu: ## the tests that need GPUs
	@$(SETUP); "$$HELIX_BIN/python" -m pytest -m "gpu or multi_gpu"

demo: ## real text from a real model on three CPU ranks
	@bash launch/demo.sh
