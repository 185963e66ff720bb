# Every target makes what it needs: Python 3.11+ and make are enough on a fresh machine.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
WORKERS ?= 3

.PHONY: demo setup test test-all test-long check audit format bench docs soak clean

demo: $(VENV)/.demo
	$(BIN)/pliant demo

setup: $(VENV)/.setup

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

# What needs a browser or a data set that is not there is not run; the last line says so. TESTS=path for a part.
test: $(VENV)/.setup
	$(PYTEST) -m "not long" $(TESTS)

# Nothing is left out: what is missing is installed or downloaded first.
test-all: $(VENV)/.setup
	$(BIN)/python -m tests.get_requirements
	$(PYTEST) -m "not long" --require-all

test-long: $(VENV)/.setup
	$(BIN)/python -m tests.get_requirements
	$(PYTEST) -m long --require-all

check: $(VENV)/.setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/bandit --quiet --configfile pyproject.toml --recursive src

# Known vulnerabilities of what is installed: asks a service on the network. The list of findings is kept.
# pip-audit calls a package without an answer skipped and ends well; a mirror without advisories answers for none.
audit: $(VENV)/.setup
	$(PIP) pip-audit
	$(BIN)/pip-audit --skip-editable --progress-spinner off --format json --output $(VENV)/audit.json
	! grep -o '"name": "[^"]*", "skip_reason"' $(VENV)/audit.json | grep -v '"torch"\|"pliant"'
	cp $(VENV)/audit.json benchmarks/results/audit.json

format: $(VENV)/.setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The site, into docs/_build/html. It is built without the network, and a warning is an error.
docs: $(VENV)/.setup
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs docs/_build/html

bench: $(VENV)/.setup
	$(BIN)/python -m benchmarks

# Random kills, corruptions and restarts; MINUTES=10 for less.
soak: $(VENV)/.setup
	$(BIN)/python -m tests.hostile.soak $(or $(MINUTES),30)

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first and alone: a resolver that meets a bare `torch` requirement may pull gigabytes of CUDA.
$(VENV)/.torch: constraints.txt | $(BIN)/python
	$(PIP) -r constraints.txt
	touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[report]'
	touch $@

$(VENV)/.setup: $(VENV)/.torch pyproject.toml
	$(PIP) -e '.[all,dev]'
	$(PIP) --no-deps curvlinops-for-pytorch==3.0.1 # it asks for torchvision, which it never imports
	$(PIP) --no-deps rliable==1.2.0 # it asks for arch below 8, which does not import beside pandas 3
	touch $@ $(VENV)/.demo
