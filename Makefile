# `make demo` and `make test` are all a newcomer needs: each makes .venv on its first run and installs nothing after.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
TORCH := $(shell grep '^torch==' constraints.txt)
WORKERS ?= 2
MINUTES ?= 5
# Most of the time of GPU tests goes into compiling kernels.
GPU_WORKERS ?= 8

.DEFAULT_GOAL := help
.PHONY: help demo test hostile browser check format slow native-check docs gpu-test sanitize gpu-proof bench evidence clean

help:  ## show this
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# Installing builds the C++ kernels, so it is done again when their sources change.
NATIVE := setup.py $(wildcard src/tamis/native/cpp/*)

# torch goes first and alone: a range would let another package pull in a different build of it.
$(VENV)/.user: pyproject.toml constraints.txt $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) --editable '.[train,plots,explore]'
	touch $@

$(VENV)/.dev: $(VENV)/.user
	$(PIP) --editable '.[train,plots,explore,dev,docs]'
	touch $@

demo: $(VENV)/.user  ## the whole story in pictures and a table, written to demo/
	$(BIN)/tamis demo

# Workers with threads of their own would stand in each other's way.  The C++ kernels must be there: without TAMIS_NATIVE a
# build that fails would only make everything slow.
test: $(VENV)/.dev  ## the fast CPU tests (about 9 minutes on two cores)
	@command -v chromedriver >/dev/null || echo 'no chromedriver: tests of the report in a browser are skipped, see make browser'
	TAMIS_NATIVE=require OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m 'not gpu and not slow' -n $(WORKERS) --dist loadfile

hostile: $(VENV)/.dev  ## kills, damage, garbage and random calls for five minutes; MINUTES=120 for two hours
	PYTHONPATH=tests TAMIS_NATIVE=require $(BIN)/python -m hostile --minutes $(MINUTES)

browser:  ## Chromium, its driver and axe for the tests of the report, where there are apt and npm
	command -v chromedriver >/dev/null || { apt-get update -qq && \
	DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; }
	test -f node_modules/axe-core/axe.min.js || ! command -v npm >/dev/null || \
	npm install --silent --no-save --no-package-lock --no-audit --no-fund axe-core@4.14.0

# Formulas are drawn by KaTeX, which the site brings along; npm has it.
docs/static/katex/katex.min.js:
	rm -rf $(@D) && mkdir -p $(@D)
	npm pack --silent --pack-destination $(@D) katex@0.19.1 >/dev/null
	tar -xzf $(@D)/katex-0.19.1.tgz -C $(@D) --strip-components=2 --wildcards \
		package/dist/katex.min.js package/dist/katex.min.css 'package/dist/fonts/*.woff2'
	rm $(@D)/katex-0.19.1.tgz

docs: $(VENV)/.dev docs/static/katex/katex.min.js  ## the documentation as a site, written to site/; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html docs site
	@echo 'site/index.html'

slow: $(VENV)/.dev  ## the slow tests
	$(BIN)/python -m pytest -m 'slow and not gpu'

native-check: $(VENV)/.dev  ## the C++ kernels under sanitizers, and 2,000 random calls of those for older CPUs
	$(BIN)/python tests/native/check.py

gpu-test: $(VENV)/.dev  ## the tests that need a CUDA device
	$(BIN)/python -m pytest -m gpu -n $(GPU_WORKERS)

# Compiled by the first run, because the sanitizer would watch the compilers too; memory from the driver, because in
# torch's own pool nothing is out of bounds.
sanitize: $(VENV)/.dev  ## the kernels under NVIDIA's compute-sanitizer
	$(BIN)/python tests/kernels/sanitize.py
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --error-exitcode 1 $(BIN)/python tests/kernels/sanitize.py

gpu-proof: $(VENV)/.dev  ## GPU tests, sanitizer and GPU benchmarks in one go, written to gpu-proof/
	$(BIN)/python benchmarks/gpu_proof.py --output gpu-proof --workers $(GPU_WORKERS)

check: $(VENV)/.dev  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev  ## make `check` happy where that is automatic
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.dev  ## the benchmarks this machine can run, as tables and JSON
	$(BIN)/tamis bench transforms --output benchmarks/results
	$(BIN)/tamis bench attention --output benchmarks/results
	$(BIN)/tamis bench solver --output benchmarks/results

# What is done is not done again, and what was interrupted goes on; the estimate of the hours comes first.
evidence: $(VENV)/.dev  ## what the papers claim, run on a CPU: hours, two runs at a time, a result file each
	TAMIS_NATIVE=require OMP_NUM_THREADS=1 $(BIN)/python benchmarks/evidence.py run
	$(BIN)/python benchmarks/evidence.py tables

clean:  ## remove the environment and everything made
	rm -rf $(VENV) site docs/static/katex demo gpu-proof build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
