# One verb for each daily task. `make PY=python3 …` uses an environment you made yourself.

VENV ?= .venv
PY ?= $(VENV)/bin/python
STAMP := $(VENV)/.installed
OP ?= gemm
# Processes of GPU tests, eight for each GPU.
WORKERS ?= $(shell echo $$((8 * $$(nvidia-smi -L 2>/dev/null | wc -l))))

# With PY set to another interpreter there is nothing to install.
ifeq ($(PY),$(VENV)/bin/python)
INSTALLED := $(STAMP)
endif

# Images of Python for containers set it. Each process that a test starts would then compile our
# modules anew: 5 of the 48 s of CPU of five files of tests that start many.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help bench tune profiles fuzz test test-gpu lint format types audit results report clean

help:  ## what each verb does
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), once: PyTorch, Triton, CuPy and the tools for tests, 3 GB or more"
	python3 -m venv $(VENV)
	$(PY) -m pip install -c constraints.txt -e '.[dev]'
	@touch $@

bench: $(INSTALLED)  ## check and time every kernel of OP (default gemm) against its peers; M sets the size
	$(PY) -m jetfire.cli bench $(OP) $(if $(M),--m $(M))

tune: $(INSTALLED)  ## search configs of OP's kernels on this GPU, keep the best; M sets the size
	$(PY) -m jetfire.cli tune $(OP) $(if $(M),--m $(M))

profiles: $(INSTALLED)  ## tune on this GPU what profiles/ is shipped for and lacks
	tuned=$$($(PY) -m jetfire.tuner.problems) && echo "$$tuned" | while read -r words; do \
	  JETFIRE_PROFILES=profiles $(PY) -m jetfire.cli tune $$words --all --missing \
	    --strategy gp --budget 1h < /dev/null || exit 1; done
	for preset in gpt2-124m gpt2-350m gpt2-774m gpt2-1558m; do \
	  for recipe in int8 int8-block32 int8-block64 int8-block128; do \
	  JETFIRE_PROFILES=profiles $(PY) -m jetfire.cli train tune $$preset \
	    --recipe $$recipe --set tokenizer=gpt2 --missing --strategy gp --trials 40 \
	    --budget 10m --peer none || exit 1; done; done

fuzz: $(INSTALLED)  ## random problems against the reference: OP's kernels (default: all), EXAMPLES each
	$(PY) -m jetfire.cli fuzz $(if $(filter file,$(origin OP)),,$(OP)) \
	  $(if $(EXAMPLES),--examples $(EXAMPLES))

test: $(INSTALLED)  ## all tests; those that need a GPU run where there is one
	$(PY) -m pytest -q $(if $(shell command -v nvidia-smi),,-n auto --dist worksteal)

test-gpu: $(INSTALLED)  ## only the tests that need a GPU, or a machine on which nothing else runs
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal -m "gpu and not quiet"
	$(PY) -m pytest -q -m quiet

lint: $(INSTALLED)  ## ruff: style and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: $(INSTALLED)  ## rewrite to the style
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(INSTALLED) .typings/jetfire  ## mypy
	$(PY) -m mypy

.typings/jetfire:  # the package by its name, whatever the checkout is called; no sdist holds a link
	mkdir -p .typings && ln -s .. $@

audit: $(INSTALLED)  ## registers, spills and matrix instructions of every default config, by arch
	$(PY) -m jetfire.cli audit

results: $(INSTALLED)  ## measure docs/results/h200.json on this GPU, then its tables and plots
	$(PY) -m jetfire.cli bench --suite results -o docs/results/h200.json
	$(PY) -m jetfire.cli bench --suite promotion -o docs/results/h200.json --append
	$(PY) -m jetfire.cli bench --suite training -o docs/results/h200.json --append
	$(PY) -m jetfire.cli bench --suite export -o docs/results/h200.json --append
	$(PY) -m jetfire.cli report docs/results/h200.json
	$(PY) -m jetfire.bench.records

report: $(INSTALLED)  ## tables, plots and shipped peaks from docs/results/ and profiles/, without measuring
	$(PY) -m jetfire.cli report docs/results/h200.json
	$(PY) -m jetfire.cli report docs/results/h100.json
	$(PY) -m jetfire.bench.records

clean:  ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
