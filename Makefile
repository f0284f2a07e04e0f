PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
TINY := examples/tiny
BUILD := $(TINY)/build

.PHONY: help install demo check lint types contracts site test test-plans test-runs gpu picture clean

help: ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED) ## make .venv and install the pinned dependencies

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(INSTALLED) ## the main job: make tiny models, profile, plan, train with PPO, compare
	$(BIN)/python $(TINY)/make.py --out $(BUILD)
	$(BIN)/meshwright profile $(TINY)/job.yaml -o $(BUILD)/table.json --fresh
	$(BIN)/meshwright plan $(TINY)/job.yaml --profile $(BUILD)/table.json -o $(BUILD)/plan.json
	$(BIN)/meshwright verify $(BUILD)/plan.json --profile $(BUILD)/table.json
	rm -rf $(BUILD)/run
	$(BIN)/meshwright run $(BUILD)/plan.json $(TINY)/job.yaml --steps 20 --out $(BUILD)/run

check: lint types contracts site test ## everything that CI runs

lint: $(INSTALLED) ## formatting and lint rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: $(INSTALLED) ## strict types
	$(BIN)/mypy -p meshwright

contracts: $(INSTALLED) ## imports go one way
	$(BIN)/lint-imports --no-cache

site: $(INSTALLED) ## the pages of docs/ in build/site; a link that leads nowhere fails
	$(BIN)/mkdocs build --strict --quiet

test: $(INSTALLED) ## all tests, slow ones included, in two processes side by side
	$(MAKE) --jobs 2 --keep-going --no-print-directory test-plans test-runs

test-plans: $(INSTALLED)
	$(BIN)/pytest --ignore tests/runtime --override-ini cache_dir=.pytest_cache/plans

test-runs: $(INSTALLED)
	$(BIN)/pytest tests/runtime --override-ini cache_dir=.pytest_cache/runs

gpu: ## measure this machine's GPU, in calls of under ten minutes; again until it says that nothing is left
	PYTHONPATH=src $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.accelerator --out build/gpu $(GPU)

picture: $(INSTALLED) ## draw the imports in docs/architecture.md anew
	$(BIN)/python docs/picture.py

clean: ## remove what make made
	rm -rf .venv $(BUILD) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
