# make quickstart   prepare, train, evaluate and sample on the built-in corpus (minutes, no network)
# make test         the tests
# make lint         ruff and mypy
# Each target makes .venv and installs what it needs, so any of them may come first.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: quickstart test test-slow lint format

quickstart: .venv/installed
	$(BIN)/groundlm quickstart

test: .venv/installed-dev
	$(BIN)/pytest

test-slow: .venv/installed-dev
	$(BIN)/pytest -m slow

lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.venv/created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than 3.11: make PYTHON=python3.12 ..." >&2; exit 2; }
	$(PYTHON) -m venv .venv
	@touch $@

# The constraints pin what was tested; torch's open range would resolve to a build of several GB.
.venv/installed: .venv/created pyproject.toml constraints.txt
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

.venv/installed-dev: .venv/installed
	$(BIN)/pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
