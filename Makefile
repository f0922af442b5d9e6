# Two commands do everything on a fresh machine with Python 3.11+:  make demo   and   make test
#
# Settings:
#   PYTHON         interpreter that makes the environment                  (python3)
#   VENV           where the environment lies                              (.venv)
#   KVBOOST_CACHE  where models and documents are kept                     (~/.cache/kvboost-rag)
#   MODEL          Hugging Face id or folder of the model of `make demo`   (a small one, fetched)
#   DOCS           folder of .txt and .md files of `make demo`             (Python's own documentation)
#   ARGS           further arguments of `make demo`, `make test` or `make bench`
#   PIP_ARGS       further arguments of pip, for instance the index of PyTorch's CPU build

PYTHON ?= python3
VENV ?= .venv
XDG_CACHE_HOME ?= $(HOME)/.cache
KVBOOST_CACHE ?= $(XDG_CACHE_HOME)/kvboost-rag
export KVBOOST_CACHE

BIN := $(VENV)/bin
STAMP := $(VENV)/.kvboost-installed
MODEL ?=
DOCS ?=
ARGS ?=
PIP_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint typecheck check bench bench-peers docs examples clean

help: ## Show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):[^#]*## (.*)/  make \1\t\2/' | expand -t 20

$(STAMP): pyproject.toml constraints.txt scripts/install.py
	$(PYTHON) scripts/install.py --venv '$(VENV)' $(PIP_ARGS)
	@touch $@

setup: $(STAMP) ## Make the environment (once)

demo: $(STAMP) ## Answer eight questions over a document folder and compare with full recomputation
	@model=$$($(BIN)/python scripts/fetch_assets.py model $(if $(MODEL),--id '$(MODEL)')) && \
	embeddings=$$($(BIN)/python scripts/fetch_assets.py embeddings) && \
	$(BIN)/kvboost-rag demo --model "$$model" --embeddings "$$embeddings" $(if $(DOCS),--docs '$(DOCS)') $(ARGS)

test: $(STAMP) ## Run the tests
	@$(BIN)/python scripts/fetch_assets.py model >/dev/null
	$(BIN)/python -m pytest -m 'not slow' $(ARGS)

test-all: $(STAMP) ## Run the tests, the slow ones too
	@$(BIN)/python scripts/fetch_assets.py model >/dev/null
	@$(BIN)/python scripts/fetch_assets.py embeddings >/dev/null
	$(BIN)/python -m pytest $(ARGS)

lint: $(STAMP) ## Style, format and the layers' import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

typecheck: $(STAMP) ## Strict types
	$(BIN)/mypy

check: lint typecheck test ## Everything CI runs

bench: $(STAMP) ## Measure fidelity and time to first token (see benchmarks/README.md)
	@model=$$($(BIN)/python scripts/fetch_assets.py model $(if $(MODEL),--id '$(MODEL)')) && mkdir -p results && \
	$(BIN)/python benchmarks/fidelity.py --model "$$model" --json results/fidelity.json --markdown results/fidelity.md $(ARGS) && \
	$(BIN)/python benchmarks/ttft.py --model "$$model" --json results/ttft.json --markdown results/ttft.md $(ARGS)

bench-peers: $(STAMP) ## Compare with other ways to reuse KV, each in a process of its own
	@model=$$($(BIN)/python scripts/fetch_assets.py model $(if $(MODEL),--id '$(MODEL)')) && mkdir -p results && \
	$(BIN)/python benchmarks/peers.py --model "$$model" --json results/peers.json --markdown results/peers.md $(ARGS)

docs: $(STAMP) ## Build the documentation site in build/docs; a warning is an error
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs build/docs
	@echo build/docs/index.html

examples: $(STAMP) ## Make the notebooks in examples/ from the scripts beside them
	$(BIN)/python scripts/make_notebooks.py

clean: ## Remove the environment and everything built
	rm -rf $(VENV) build dist results .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
