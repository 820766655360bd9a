# The targets a newcomer would guess. `make setup` is a part of all of them and costs nothing when up to date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready

.PHONY: setup setup-system demo test kill-phases bucket-campaign dropin-campaign corruption-campaign lint format clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[trainer,test,lint]'
	@touch $@

# What only some tests need from Debian's packages; a test that needs one and does not find it says so.
setup-system:
	apt-get update --quiet=2
	apt-get install --yes --quiet=2 --no-install-recommends strace chromium

demo: setup
	$(BIN)/python -m tools.demo

test: setup
	$(BIN)/python -m pytest

# Long campaigns; a short version of each is in `make test`.
kill-phases: setup
	$(BIN)/python -m pytest -m slow tests/multiprocess

bucket-campaign: setup
	$(BIN)/python -m pytest -m slow tests/bucket tests/manager/test_bucket_requests.py

dropin-campaign: setup
	$(BIN)/python -m pytest -m slow tests/dropin

corruption-campaign: setup
	$(BIN)/python -m bench corruption --full

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/basedpyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs
