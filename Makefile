# make train | test | test-all | test-oldest | check | bench | clean. Each sets up .venv first; a second call finds it ready.

PYTHON ?= python3
EXTRAS ?= dev,tensorboard,plot,video
TORCH ?= torch==2.13.0
# More options for pip's first call, which installs torch, e.g. to choose between its CPU and CUDA builds.
TORCH_PIP_ARGS ?=
# Processes that share out the tests: each compiles, and takes about a gigabyte.
WORKERS ?= 2
# More overrides, e.g. make train ARGS="num_envs=64 compile=false"; make test ARGS="-k vtrace".
ARGS ?=
# Of benchmarks; all of them, agents anakin brax envs learning losses lowered multiagent population replay reuse scaling sebulba (and gpu), take over five hours.
SUITES ?= anakin

VENV := .venv
BIN := $(VENV)/bin
PEERS := .venv-peers
# The stamps are named after what they depend on, contents and not dates: a new branch with the same files keeps them.
hash = $(shell { cat $(1); echo "$(2)"; } 2>/dev/null | cksum | cut -d ' ' -f 1)
READY := $(VENV)/.ready-$(call hash,pyproject.toml setup.py constraints.txt,$(CURDIR) $(EXTRAS) $(TORCH))
HOST_READY := $(VENV)/.host-$(call hash,constraints.txt,$(CURDIR) $(TORCH))
PEERS_READY := $(PEERS)/.ready-$(call hash,bench/peers/requirements.txt,$(CURDIR))

.PHONY: train test test-all test-oldest check format lint types layers spelling bench setup clean
.DELETE_ON_ERROR:

train: setup
	$(BIN)/torchpod train experiment=cartpole $(ARGS)

test: setup $(HOST_READY)
	$(BIN)/python -m pytest -m "not gpu and not slow" -rs -n $(WORKERS) --dist worksteal $(ARGS)

# Everything that needs no GPU; the outcome goes to docs/test-all.md.
test-all: setup $(HOST_READY)
	@mkdir -p docs
	@log=$$(mktemp) && { $(BIN)/python -m pytest -m "not gpu" -rs -n $(WORKERS) --dist worksteal $(ARGS); echo $$? > $$log.rc; } | tee $$log; \
	dirty=$$(test -z "$$(git status --porcelain -- . ':!docs/test-all.md')" || echo " + changes"); \
	test -s docs/test-all.md || printf '# Runs of the whole suite\n\n| what | date | commit | result |\n|---|---|---|---|\n' > docs/test-all.md; \
	echo "| \`make test-all\` | $$(date -u +%F) | $$(git rev-parse --short HEAD 2>/dev/null || echo none)$$dirty | $$(tail -n 1 $$log | tr -d '=' | sed 's/^ *//; s/ *$$//') |" >> docs/test-all.md; \
	rc=$$(cat $$log.rc); rm -f $$log $$log.rc; exit $$rc

# The oldest TorchRL and TensorDict that are supported, in a folder that no other program sees.
test-oldest: setup
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/oldest torchrl==0.13.3 tensordict==0.13.0
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -m "not gpu" -rs tests/interop \
	tests/algos/test_torchrl_multi_agent.py tests/algos/test_torchrl_masks.py tests/docs/test_torchrl_losses.py tests/docs/test_torchrl_envs.py \
	tests/envs/host/test_torchrl.py tests/bench/test_losses.py $(ARGS)
	PYTHONPATH=$(VENV)/oldest $(BIN)/python -m pytest -m "not gpu" -rs -k "loss and not losses" tests/replay tests/test_config.py tests/test_compose.py \
	tests/learning $(ARGS)

# `make -k check` goes on after the first that fails.
check: format lint types layers spelling
format: setup
	$(BIN)/ruff format --check .
lint: setup
	$(BIN)/ruff check .
types: setup $(HOST_READY)
	$(BIN)/pyright
layers: setup
	$(BIN)/lint-imports --no-logo
spelling: setup
	$(BIN)/codespell

bench: setup $(HOST_READY) $(PEERS_READY)
	@failed=; for suite in $(SUITES); do $(BIN)/torchpod bench $$suite $(ARGS) || failed="$$failed $$suite"; done; \
	test -z "$$failed" || { echo "torchpod bench: failed:$$failed" >&2; exit 1; }

setup: $(READY)
	@command -v $(firstword $(CXX)) >/dev/null 2>&1 || echo "torchpod: no C++ compiler ($(firstword $(CXX))) found, so" \
	"torch.compile does not work on the CPU here: install g++, or pass compile=false, which is slower." >&2

# $(call venv,FOLDER) makes a virtual environment, or says in one sentence what is missing.
define venv
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
echo "torchpod needs Python 3.11 or newer, but '$(PYTHON)' is $$($(PYTHON) --version 2>&1 | tail -n 1): name" \
"another one, e.g. make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
@test -x $(1)/bin/python || $(PYTHON) -m venv $(1) || { rm -rf $(1); \
echo "torchpod: '$(PYTHON) -m venv' failed; on Debian and Ubuntu install python3-venv" >&2; exit 1; }
endef

$(READY):
	$(call venv,$(VENV))
	@echo "torchpod: setting up $(VENV), a minute or a few"
	$(BIN)/python -m pip install -q -c constraints.txt setuptools wheel
	$(BIN)/python -m pip install -q -c constraints.txt $(TORCH_PIP_ARGS) "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[$(EXTRAS)]"
	@rm -f $(VENV)/.ready-* && touch $@

# What only tests need: EnvPool, half a gigabyte; Brax and JAX for the CPU, 0.6 of one; PettingZoo with MPE, 40 megabytes;
# the package of MinAtar, of whose dependencies they need NumPy alone; and Triton, one gigabyte, in a folder that no other
# program sees (with torch for CUDA comes one of its own).
$(HOST_READY): $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt --no-build-isolation -e ".[envpool,brax,pettingzoo]" mpe2
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps MinAtar
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(VENV)/triton triton==3.9.0
	@rm -f $(VENV)/.host-* && touch $@

$(PEERS_READY): bench/peers/requirements.txt
	$(call venv,$(PEERS))
	$(PEERS)/bin/python -m pip install -q -r bench/peers/requirements.txt
	@rm -f $(PEERS)/.ready-* && touch $@

# Virtual environments and runs/ stay.
clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .import_linter_cache
	find torchpod envs algos configs bench tests -name __pycache__ -type d -prune -exec rm -rf {} +
