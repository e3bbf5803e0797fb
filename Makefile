# Everything runs in a virtual environment of its own, made on first use.
# Another interpreter: make test PYTHON=python3.12 VENV=.venv312
PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
VERSIONS ?= constraints.txt
EXTRAS ?=
ARGS ?=

BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DEMO := $(VENV)/.installed-demo
DOCS := $(VENV)/.installed-docs
SMOKE := build/smoke

.DEFAULT_GOAL := help
.PHONY: help install demo docs docs-serve check test lint format types bench fuzz experiments figures wheel smoke smoke-frameworks clean

help:  ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /:/' | awk -F: '{printf "  make %-17s %s\n", $$1, $$2}'

install: $(STAMP)  ## make the virtual environment with everything in it

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[torch,jax,pyepo,dev]'
	touch $(DEMO) $@

# The kernels of the demo are compiled while pip is busy with torch.
KERNELS := import numpy, knapgrad as kg; x, limit = numpy.zeros((2, 2), "f4"), kg.Knapsack([1, 2], 2); \
	kg.solve(x, limit); [kg.relax(x, limit, kind()) for kind in (kg.Shannon, kg.Gini, kg.Tsallis)]

$(DEMO): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt numba
	PYTHONPATH=src $(BIN)/python -c '$(KERNELS)' 2>/dev/null & \
	$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --editable '.[demo]'; \
	status=$$?; wait; exit $$status
	touch $@

$(DOCS): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt --editable '.[docs]'
	touch $(DEMO) $@

demo: $(DEMO)  ## learn item values from observed decisions (installs torch and matplotlib, no more)
	$(BIN)/python examples/learn_from_decisions.py $(ARGS)

docs: $(DOCS)  ## build the site into build/site; recipes are run, and a broken link or example is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

docs-serve: $(DOCS)  ## read the site, and see changes as they are saved
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve $(ARGS)

check: $(STAMP)  ## style, types, and a test of each file of src: a minute, for the loop of edit and try
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q --representatives $(ARGS)

test: $(STAMP)  ## run all tests and doctests; a file stays in one process, so that each kernel is compiled once
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

lint: $(STAMP)  ## check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)  ## fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(STAMP)  ## check types
	$(BIN)/mypy

bench: $(STAMP)  ## measure speed and memory, save under benchmarks/results (ARGS=--quick for a short run)
	$(BIN)/python -m benchmarks $(ARGS)

fuzz: $(STAMP)  ## random instances of everything against an oracle, minutes (ARGS="--instances 1000000 --seed 0")
	$(BIN)/python -m fuzzing $(ARGS)

experiments: $(STAMP)  ## run the paper's experiments again (hours; ARGS=--quick for a look)
	$(BIN)/python -m experiments.pyepo --jobs $(WORKERS) $(ARGS)
	$(BIN)/python -m experiments.assortment --jobs $(WORKERS) $(ARGS)
	$(BIN)/python -m experiments.dvae $(ARGS)

figures: $(STAMP)  ## draw the pictures of the README
	$(BIN)/python docs/make_figures.py $(ARGS)

wheel:  ## build the wheel into dist/
	rm -rf dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

smoke: wheel  ## try the wheel in an empty environment, without torch (VERSIONS=.ci/lowest.txt ARGS=--lowest for the lowest)
	rm -rf $(SMOKE)
	$(PYTHON) -m venv $(SMOKE)
	wheel=$$(echo dist/knapgrad-*.whl) && $(SMOKE)/bin/python -m pip install --quiet -c $(VERSIONS) "$$wheel$(EXTRAS)"
	cd $(SMOKE) && bin/python -I -W error $(CURDIR)/.ci/smoke.py $(ARGS)

smoke-frameworks: smoke  ## the same, then with torch and JAX
	wheel=$$(echo dist/knapgrad-*.whl) && $(SMOKE)/bin/python -m pip install --quiet -c constraints.txt "$$wheel[torch,jax]"
	cd $(SMOKE) && bin/python -I -W error $(CURDIR)/.ci/smoke.py --torch --jax

clean:  ## remove what was built, and the virtual environment
	rm -rf $(VENV) build dist results .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
