# `make help` lists the targets, `make campaign` the long tests. `make setup` is a part of all and costs nothing when up to date.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.ready
# Without compiling: it takes longer than all else, and an import compiles what is needed.
INSTALL := -m pip install --quiet --disable-pip-version-check --no-compile
# $(call new_venv,PYTHON,DIR): the pip of Python 3.11 takes two minutes to choose the versions, a newer one half a minute.
new_venv = $(1) -m venv $(2) && $(2)/bin/python $(INSTALL) --upgrade pip
# $(call require,DIR,EXTRAS,MORE): what the project and its extras need, without the project.
require = $(1)/bin/python tools/requirements.py $(2) > $(1)/required.txt && $(1)/bin/python $(INSTALL) $(3) -r $(1)/required.txt
# $(call link,DIR,MORE): the project itself. pip builds it in place, so one environment at a time.
link = flock pyproject.toml $(1)/bin/python $(INSTALL) --no-deps $(2) -e .
# tests/skips.py: what a target may skip in CI because another one runs it.
export CKPTKIT_TARGET = $@

.DEFAULT_GOAL := help
.PHONY: help setup setup-system demo quick test lint format docs pages campaign bench figures release clean

# A line `##@ GROUP`, then targets with `## what they do`.
help:
	@awk -F ':.*## ' '/^##@/ {print "\n" substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-14s%s\n", $$1, $$2}' Makefile

##@ Begin
# CONSTRAINTS: a file with releases that pip is not to go beyond.
EXTRAS ?= trainer test lint
# `pip install .` leaves a copy in the environment, and every command would run that: the project is linked again.
setup: $(STAMP) ## Make .venv with everything; part of every other target
	@$(BIN)/python -I tools/linked.py || { $(call link,$(VENV)); }

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { $(call new_venv,$(PYTHON),$(VENV)); }
	$(call require,$(VENV),$(EXTRAS),$(CONSTRAINTS:%=-c %))
	$(call link,$(VENV))
	@touch $@

# A test that needs one of them and does not find it says so.
DEBIAN := strace chromium prometheus zsh openssl openmpi-bin slurm-wlm
setup-system: ## Debian's packages for some tests: strace, a browser, Prometheus, mpirun, Slurm
	dpkg --status $(DEBIAN) >/dev/null 2>&1 \
	  || { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends $(DEBIAN); }

demo: setup ## Train on two processes, kill one, lose a host, compare the bits: 2 to 3 minutes, a first setup apart
	$(BIN)/python -m tools.demo

##@ Change
# Half a minute of processor time, imports included. The two files of hostile input take as long again.
QUICK := tests/model tests/util tests/store tests/formats tests/manager/test_manager.py::test_each_tier_is_restored_when_faster_ones_are_lost
quick: setup ## Tests of model, util, store and formats, and a save and a restore: half a minute
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(QUICK) \
	  --ignore tests/formats/test_hostile.py --ignore tests/model/test_hostile_manifests.py

# More than cores: many tests wait for processes, timeouts and fsync.
WORKERS ?= 3
# MARKS: other tests than those of pyproject.toml, as `make test MARKS='not slow'`.
test: setup ## All tests: 8 to 20 minutes on two cores
	$(BIN)/python -m pytest $(if $(MARKS),-m '$(MARKS)') --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

lint: setup ## Style, layers, prose and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/basedpyright # with the usual heap it forgets types as it goes: thrice the time

format: setup ## Mend what the formatter and the linter can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## The pages as a site in site/, with the API from the docstrings
	$(call require,$(VENV),docs)
	$(BIN)/python -m mkdocs build --strict --quiet

pages: setup ## Write the parts of docs/CLI.md and docs/api.md that come from the code
	$(BIN)/python -m tools.cli_docs
	$(BIN)/python -m tools.api_docs

##@ Campaigns and figures
# tools/campaigns.mk has one target each. By way of the list: NAME=clean is not a campaign.
CAMPAIGNS := tools/campaigns.mk
campaign: ## A long test by NAME=...; without NAME, the list
ifdef NAME
	@grep --quiet '^$(NAME):.*## ' $(CAMPAIGNS) || { echo "$(NAME) is not a campaign: make campaign lists them" >&2; exit 2; }
	@$(MAKE) --no-print-directory -f Makefile -f $(CAMPAIGNS) $(NAME)
else
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make campaign NAME=%-20s%s\n", $$1, $$2}' $(CAMPAIGNS)
endif

MINUTES ?= 250
bench: setup ## Every benchmark within MINUTES (250), on a quiet machine; then the report
	$(BIN)/python -m bench all --minutes $(MINUTES)

figures: setup ## bench/REPORT.md, its pictures and the README's table, from the newest results
	$(BIN)/python -m bench report

##@ Release
release: setup ## Build wheel and sdist of the commit in dist/ and check them in fresh environments
	$(BIN)/python -m tools.release

clean: ## Remove environments, builds and results of runs
	rm -rf $(VENV) .venv-floor .venv-newest .venv-s3 .venv-stranger-* site build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs
