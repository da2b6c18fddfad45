# make demo   train on four local MPI ranks and write report/index.html
# make test   the whole test-suite, real mpirun included
# make check  linter, formatter, types, import directions
# make clean  remove the virtual environment and what was built

# Set them as `make test ARGS=-x`. What the environment holds under these common names is somebody
# else's: `clean` would remove that VENV.
PYTHON := python3
VENV := .venv
ARGS :=
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet -c constraints.txt

.PHONY: demo test check format clean

demo: $(VENV)/.demo
	$(VENV)/bin/gtopk demo $(ARGS)

test: $(VENV)/.dev
	$(VENV)/bin/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYTHONPATH=. $(VENV)/bin/lint-imports

format: $(VENV)/.dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

clean:
	rm -rf $(VENV) build dist *.egg-info report .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[demo]"
	touch $@

$(VENV)/.dev: setup.cfg constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[dev]"
	touch $@ $(VENV)/.demo
