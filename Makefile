# The targets a newcomer would guess. `make setup` is a part of all of them and costs nothing when up to date.
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

.PHONY: setup setup-system setup-cluster setup-s3 setup-stranger demo demo-guard demo-certify test test-long test-mpi test-slurm docs lint format clean
.PHONY: kill-phases signals bucket-campaign dropin-campaign corruption-campaign elastic-campaign kill-campaign crashpoints
.PHONY: proof-cost docs-cli imports-campaign docs-session docs-dashboard broadcast-campaign simulator-campaign policy-campaign faults bench-all
.PHONY: test-telemetry zoo pairs killed simulate-protocol book figures strangers strangers-ci test-wheel test-floor test-newest test-s3 test-others release

# CONSTRAINTS: a file with releases that pip is not to go beyond.
EXTRAS ?= trainer test lint
setup: $(STAMP)

$(STAMP): pyproject.toml
	@test -x $(BIN)/python || { $(call new_venv,$(PYTHON),$(VENV)); }
	$(call require,$(VENV),$(EXTRAS),$(CONSTRAINTS:%=-c %))
	$(call link,$(VENV))
	@touch $@

# What only some tests need from Debian's packages; a test that needs one and does not find it says so.
setup-system: DEBIAN := strace chromium prometheus zsh openssl
# What the tests under mpirun and Slurm need; without it they say that they are skipped.
setup-cluster: DEBIAN := openmpi-bin slurm-wlm
setup-system setup-cluster:
	dpkg --status $(DEBIAN) >/dev/null 2>&1 \
	  || { apt-get update --quiet=2 && apt-get install --yes --quiet=2 --no-install-recommends $(DEBIAN); }

demo: setup
	$(BIN)/python -m tools.demo

# A poisoned stretch of data without a guard and with one; the picture is runs/demo-guard/guard.png.
demo-guard: setup
	$(BIN)/python -m tools.demo_guard

# One flipped bit on one device: found, with the step, the leaf and the device.
demo-certify: setup
	$(BIN)/python -m tools.demo_certify

# More than cores: many tests wait for processes, timeouts and fsync.
WORKERS ?= 3
# MARKS: other tests than those of pyproject.toml, as `make test MARKS='not slow'`.
test: setup
	$(BIN)/python -m pytest $(if $(MARKS),-m '$(MARKS)') --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder

# What takes minutes and is not about one module: whole benchmarks, real schedulers, the tutorial, a browser. CI runs them with the others.
# Only files with such a test: to import all others takes each worker half a minute.
test-long: setup
	$(BIN)/python -m pytest -m long --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.long\|long_except' tests | sort)

# Long campaigns; a short version of each is in `make test`.
kill-phases: setup
	$(BIN)/python -m pytest -m slow tests/multiprocess/test_kill_phases.py

# 500 moments; CKPTKIT_TEST_SEED repeats one run.
signals: setup
	$(BIN)/python -m pytest -m slow -s -o faulthandler_timeout=3600 tests/multiprocess/test_signals.py

elastic-campaign: setup
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1200 tests/multiprocess/test_elastic.py

bucket-campaign: setup
	$(BIN)/python -m pytest -m slow tests/testing/bucket tests/durable/test_bucket_requests.py

dropin-campaign: setup
	$(BIN)/python -m pytest -m slow tests/dropin

corruption-campaign: setup
	$(BIN)/python -m bench corruption --full

# Needs `make setup-system`. Two processes at every phase: `make kill-phases`.
crashpoints: setup
	$(BIN)/python -m bench crashpoints --full

# Every command over every root of tests/roots, on a disk, in a bucket and on a mounted bucket.
zoo: setup
	$(BIN)/python -m tests.roots --full

# Each pair of commands over one root, at every storage operation of the first one.
pairs: setup
	$(BIN)/python -m tests.pairs --full

# Each command that writes, killed after every storage operation, on a disk and in the bucket.
killed: setup
	$(BIN)/python -m tests.killed --full

# The protocol of saves and restores in simulated jobs under faults, from a seed on: SEEDS=100000 FIRST=0.
simulate-protocol: setup
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0)

# Histories of jobs against an oracle of its own, with real processes: SEEDS=20000 FIRST=0. Every tenth has up to 4.
book: setup
	$(BIN)/python -m tests.book --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

broadcast-campaign: setup
	$(BIN)/python -m bench broadcast

proof-cost: setup
	$(BIN)/python -m bench proof

# Predicted against measured goodput; wants a machine to itself.
simulator-campaign: setup
	$(BIN)/python -m bench simulator

# TRACES: a directory with failure logs and spot availability, see docs/GOODPUT.md.
policy-campaign: setup
	$(BIN)/python -m bench policy --traces $(TRACES)

# Beside stock Orbax, on a quiet machine: 60 to 80 minutes.
faults: setup
	$(BIN)/python -m bench all --only faults

# Every benchmark within MINUTES, on a quiet machine; then the report.
MINUTES ?= 210
bench-all: setup
	$(BIN)/python -m bench all --minutes $(MINUTES)

# bench/REPORT.md, its pictures and the README's table from the newest stored results.
figures: setup
	$(BIN)/python -m bench report

KILLS ?= 50
kill-campaign: setup
	$(BIN)/python -m bench kill --processes 4 --kills $(KILLS)

# The multi-process tests as clusters start them.
test-mpi: setup
	$(BIN)/python -m pytest -m "not slow" tests/multiprocess -k mpirun

test-slurm: setup
	$(BIN)/python -m pytest -m "slow or not slow" tests/multiprocess tests/goodput/test_account_under_slurm.py \
	  -k "srun or slurm or batch_script"

# S3 against moto's server, in an environment of its own: botocore wants an older python-dateutil than kubernetes.
test-s3: .venv-s3/.ready
	.venv-s3/bin/python -m pytest tests/manager/test_s3.py tests/store/test_remote.py

.venv-s3/.ready: pyproject.toml
	$(call new_venv,$(PYTHON),.venv-s3)
	$(call require,.venv-s3,trainer test-core s3)
	.venv-s3/bin/python -m pip freeze --exclude-editable | grep -i botocore | sed 's/^botocore==/boto3==/' > .venv-s3/boto.txt
	$(call require,.venv-s3,s3-test,-c .venv-s3/boto.txt)
	$(call link,.venv-s3)
	@touch $@

# The formats of torch and of compressed-tensors, against the libraries that wrote them; programs of Keras and of Hydra.
test-others: setup
	$(call require,$(VENV),others)
	$(BIN)/python -m pytest tests/formats tests/conversion tests/launch/test_programs.py \
	  -k 'torch or hugging_face_loads or same_logits or killed_twice'

# Programs that read, set and draw at their import: each prints the same with a template and without.
imports-campaign: setup
	$(BIN)/python -m pytest -m slow tests/launch/imports

# What the pages show of the commands, from the commands themselves.
docs-cli: setup
	$(BIN)/python -m tools.cli_docs
	$(BIN)/python -m tools.api_docs

# The pictures of README and TUTORIAL; the second runs the tutorial in /dev/shm/story and runs/story.
docs-session: setup
	$(BIN)/python -m tools.session
	$(BIN)/python -m tools.tutorial

# docs/dashboard.png: the panels of deploy/grafana.json. Needs `make setup-system`.
docs-dashboard: setup
	$(BIN)/python -m tools.dashboard

# Installs the built wheel and its dependencies from the registry into a fresh environment, as a person does.
test-wheel: setup
	$(BIN)/python -m pytest -m "slow or not slow" -o faulthandler_timeout=1200 tests/packaging

# Wheel and sdist in dist/, of the commit alone, checked on every Python from 3.11 to 3.14 that is here. Uploads nothing.
release: setup
	$(BIN)/python -m tools.release

# The lowest versions that pyproject.toml allows, then the newest; with PYTHON=python3.12 those may be newer still.
VERSION_TESTS := tests/model tests/util tests/job tests/store tests/slots tests/durable tests/snapshot tests/save \
  tests/restore tests/manager tests/goodput tests/dropin tests/interop tests/v1 tests/surgery tests/test_events.py
test-floor:
	$(call new_venv,$(PYTHON),.venv-floor)
	$(PYTHON) tools/requirements.py --lowest trainer > .venv-floor/floor.txt
	.venv-floor/bin/python $(INSTALL) -c .venv-floor/floor.txt -e '.[trainer,test-core]'
	.venv-floor/bin/python -m pytest $(VERSION_TESTS)

test-newest:
	$(call new_venv,$(PYTHON),.venv-newest)
	.venv-newest/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e '.[trainer,test]'
	.venv-newest/bin/python -m pytest $(VERSION_TESTS)

# Public trainers over ckptkit, each in an environment of its own: docs/migrate.md has the table.
STRANGERS := artifex blaxbird flaxdiff keras maxtext mlip nnx_ppo opifex tunix
PACKAGES_artifex := flax optax
PACKAGES_blaxbird := flax optax
PACKAGES_flaxdiff := flax optax clu einops grain matplotlib tqdm termcolor
PACKAGES_maxtext := flax optax grain pydantic omegaconf pyyaml tensorboardx absl-py etils jsonlines aqtp qwix jaxtyping pathwaysutils \
  jinja2 huggingface_hub transformers sentencepiece datasets safetensors tokamax drjax pillow tiktoken sympy ml_collections
PYTHON_maxtext := python3.12
PACKAGES_opifex := flax optax beartype blackjax calibrax datarax diffrax distrax jaxtyping optimistix pydantic tensorly
# Installed without their requirements, which are large, and not needed for training.
LONE_artifex := avitai-artifex==0.1.3
LONE_blaxbird := blaxbird==0.2.0
LONE_flaxdiff := flaxdiff==0.2.11
LONE_maxtext := maxtext==0.2.5
LONE_opifex := avitai-artifex==0.1.3 opifex==0.2.0
PACKAGES_nnx_ppo := nnx-ppo==0.3.0
PACKAGES_mlip := mlip==0.2.5
PACKAGES_keras := keras==3.15.1
PACKAGES_tunix := google-tunix==0.1.7 transformers==5.4.0 datasets==5.2.0
strangers: $(STRANGERS:%=stranger-%)

# The one that installs and trains fastest; `make test` has that of Flax itself.
strangers-ci: stranger-blaxbird

.venv-stranger-%/.ready: pyproject.toml
	$(call new_venv,$(or $(PYTHON_$*),$(PYTHON)),.venv-stranger-$*)
	$(call require,.venv-stranger-$*,,$(PACKAGES_$*) pytest)
	$(call link,.venv-stranger-$*,$(LONE_$*))
	@touch $@

# The environments that CI needs besides .venv.
setup-s3: .venv-s3/.ready
setup-stranger: .venv-stranger-blaxbird/.ready

.PRECIOUS: .venv-stranger-%/.ready
stranger-%: .venv-stranger-%/.ready
	.venv-stranger-$*/bin/python -m pytest -o addopts= -o faulthandler_timeout=1200 -k $* tests/strangers

# Exporters and dashboards against Prometheus (`make setup-system`), an OTLP collector, TensorBoard and W&B.
test-telemetry: setup
	$(call require,$(VENV),telemetry-test)
	$(BIN)/python -m pytest -m "not slow" tests/goodput/exporters tests/bench/test_exporters.py

# The pages as a site in site/, with the API from the docstrings. Their code blocks run in `make test`.
docs: setup
	$(call require,$(VENV),docs)
	$(BIN)/python -m mkdocs build --strict --quiet

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/python -m tools.prose
	NODE_OPTIONS=--max-old-space-size=6144 $(BIN)/basedpyright # with the usual heap it forgets types as it goes: thrice the time

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .venv-floor .venv-newest .venv-s3 .venv-stranger-* site build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache runs
