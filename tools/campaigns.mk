# The long tests, as `make campaign NAME=...`. A line with `## ` is in the list; the Makefile has the variables.
.PHONY: $(NAME)

# Whole benchmarks, real schedulers, the tutorial, a browser; CI runs them with the others.
# Only files with such a test: to import all others takes each worker half a minute.
long: setup ## Tests that take minutes and are not about one module
	$(BIN)/python -m pytest -m long --numprocesses $(WORKERS) --dist loadfile --no-loadscope-reorder \
	  $$(grep --recursive --files-with-matches --include='test_*.py' 'mark\.long\|long_except' tests | sort)

KILLS ?= 50
kill: setup ## Four processes killed at KILLS=50 random moments
	$(BIN)/python -m bench kill --processes 4 --kills $(KILLS)

kill-phases: setup ## Two processes killed at every phase of a save
	$(BIN)/python -m pytest -m slow tests/multiprocess/test_kill_phases.py

signals: setup ## A signal at 500 moments of a call; CKPTKIT_TEST_SEED repeats one run
	$(BIN)/python -m pytest -m slow -s -o faulthandler_timeout=3600 tests/multiprocess/test_signals.py

crashpoints: setup ## Power failures between all system calls of a save; needs `make setup-system`
	$(BIN)/python -m bench crashpoints --full

corruption: setup ## Damaged files of every kind
	$(BIN)/python -m bench corruption --full

elastic: setup ## Restores on other numbers of processes and other meshes
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1200 tests/multiprocess/test_elastic.py

bucket: setup ## A bucket that fails, request by request
	$(BIN)/python -m pytest -m slow tests/testing/bucket tests/durable/test_bucket_requests.py

dropin: setup ## The calls of Orbax's manager, against stock Orbax
	$(BIN)/python -m pytest -m slow tests/dropin

zoo: setup ## Every command over every root of tests/roots, on a disk, in a bucket and on a mounted bucket
	$(BIN)/python -m tests.roots --full

pairs: setup ## Each pair of commands over one root, at every storage operation of the first one
	$(BIN)/python -m tests.pairs --full

killed: setup ## Each command that writes, killed after every storage operation, on a disk and in the bucket
	$(BIN)/python -m tests.killed --full

protocol: setup ## Saves and restores of simulated jobs under faults: SEEDS=10000 FIRST=0
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000) --first $(or $(FIRST),0)

book: setup ## Histories of jobs with real processes against an oracle: SEEDS=1000 FIRST=0
	$(BIN)/python -m tests.book --seeds $(or $(SEEDS),1000) --first $(or $(FIRST),0)

imports: setup ## Programs that read, set and draw at their import, under the launcher's template
	$(BIN)/python -m pytest -m slow tests/launch/imports

faults: setup ## ckptkit and stock Orbax under faults, on a quiet machine: 60 to 80 minutes
	$(BIN)/python -m bench all --only faults

broadcast: setup ## A restore that one replica reads and sends to the others
	$(BIN)/python -m bench broadcast

proof: setup ## What checksums cost a restore
	$(BIN)/python -m bench proof

TURNS ?= 3
slower: setup ## stall, commit and restore in turns with the code of the last stored result: TURNS=3, 13 minutes
	$(BIN)/python -m bench slower --turns $(TURNS)

simulator: setup ## Predicted against measured goodput, on a quiet machine
	$(BIN)/python -m bench simulator

policy: setup ## Save intervals over recorded failures in TRACES=DIRECTORY, see docs/GOODPUT.md
	$(BIN)/python -m bench policy --traces $(TRACES)

mpi: setup ## The tests of several processes, started by mpirun; needs `make setup-system`
	$(BIN)/python -m pytest -m "not slow" tests/multiprocess -k mpirun

slurm: setup ## The same, started by Slurm; needs `make setup-system`
	$(BIN)/python -m pytest -m "slow or not slow" tests/multiprocess tests/goodput/test_account_under_slurm.py \
	  -k "srun or slurm or batch_script"

telemetry: setup ## Exporters against Prometheus, an OTLP collector, TensorBoard and W&B; needs `make setup-system`
	$(call require,$(VENV),telemetry-test)
	$(BIN)/python -m pytest -m "not slow" tests/goodput/exporters tests/bench/test_exporters.py

others: setup ## Formats of torch and compressed-tensors, programs of Keras and Hydra, with those libraries
	$(call require,$(VENV),others)
	$(BIN)/python -m pytest tests/formats tests/conversion tests/launch/test_programs.py \
	  -k 'torch or hugging_face_loads or same_logits or killed_twice'

# An environment of its own: botocore wants an older python-dateutil than kubernetes.
s3: .venv-s3/.ready ## S3 against moto's server
	.venv-s3/bin/python -m pytest tests/manager/test_s3.py tests/store/test_remote.py

.venv-s3/.ready: pyproject.toml
	$(call new_venv,$(PYTHON),.venv-s3)
	$(call require,.venv-s3,trainer test-core s3)
	.venv-s3/bin/python -m pip freeze --exclude-editable | grep -i botocore | sed 's/^botocore==/boto3==/' > .venv-s3/boto.txt
	$(call require,.venv-s3,s3-test,-c .venv-s3/boto.txt)
	$(call link,.venv-s3)
	@touch $@

wheel: setup ## The wheel and its dependencies from the registry, in a fresh environment
	$(BIN)/python -m pytest -m "slow or not slow" -o faulthandler_timeout=1200 tests/packaging

VERSION_TESTS := tests/model tests/util tests/job tests/store tests/slots tests/durable tests/snapshot tests/save \
  tests/restore tests/manager tests/goodput tests/dropin tests/interop tests/v1 tests/surgery tests/test_events.py
floor: ## The lowest versions that pyproject.toml allows
	$(call new_venv,$(PYTHON),.venv-floor)
	$(PYTHON) tools/requirements.py --lowest trainer gcs > .venv-floor/floor.txt
	.venv-floor/bin/python $(INSTALL) -c .venv-floor/floor.txt -e '.[trainer,test-core]'
	.venv-floor/bin/python -m pytest $(VERSION_TESTS)

# With PYTHON=python3.12 they may be newer still.
newest: ## The newest versions
	$(call new_venv,$(PYTHON),.venv-newest)
	.venv-newest/bin/python $(INSTALL) --upgrade --upgrade-strategy eager -e '.[trainer,test]'
	.venv-newest/bin/python -m pytest $(VERSION_TESTS)

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
strangers: $(STRANGERS:%=stranger-%) ## Public trainers over ckptkit, each in an environment of its own

# The one that installs and trains fastest; NAME=long has that of Flax itself.
strangers-ci: stranger-blaxbird ## One of them

.venv-stranger-%/.ready: pyproject.toml
	$(call new_venv,$(or $(PYTHON_$*),$(PYTHON)),.venv-stranger-$*)
	$(call require,.venv-stranger-$*,,$(PACKAGES_$*) pytest)
	$(call link,.venv-stranger-$*,$(LONE_$*))
	@touch $@

.PRECIOUS: .venv-stranger-%/.ready
stranger-%: .venv-stranger-%/.ready
	.venv-stranger-$*/bin/python -m pytest -o addopts= -o faulthandler_timeout=1200 -k $* tests/strangers

environments: .venv-s3/.ready .venv-stranger-blaxbird/.ready ## The environments of s3 and strangers-ci, for CI

demo-guard: setup ## A poisoned stretch of data without a guard and with one; draws runs/demo-guard/guard.png
	$(BIN)/python -m tools.demo_guard

demo-certify: setup ## One flipped bit on one device, found with the step, the leaf and the device
	$(BIN)/python -m tools.demo_certify

# The second runs the tutorial in /dev/shm/story and runs/story.
pictures: setup ## The pictures of README and TUTORIAL
	$(BIN)/python -m tools.session
	$(BIN)/python -m tools.tutorial

picture-dashboard: setup ## docs/dashboard.png from deploy/grafana.json; needs `make setup-system`
	$(BIN)/python -m tools.dashboard
