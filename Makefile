# `make serve` and `make test` are all a newcomer needs; both set up .venv on first use.
.DEFAULT_GOAL := help
.PHONY: help serve test format clean

# The first Python that is new enough; override with `make PYTHON=python3.12 ...`.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,\
  $(shell $(p) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $(p))))
# Extras of pyproject.toml to install: `make serve EXTRAS=cuda13` on a machine with an NVIDIA GPU.
EXTRAS ?=
ARGS ?=

# A stamp per set of extras: while pyproject.toml stays as it is, nothing is installed twice.
INSTALLED = .venv/.installed-$(or $(EXTRAS),plain)

help: ## show this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

serve: $(INSTALLED) ## serve the built-in model on port 8000; ARGS="MODEL --port 9000 ..." for more
	.venv/bin/jaxpaged serve $(ARGS)

test format: EXTRAS := $(or $(EXTRAS),test)
test: ## check style, types, imports and behaviour: the same as CI
	@$(MAKE) --silent --no-print-directory $(INSTALLED) EXTRAS=$(EXTRAS)
	PATH="$(CURDIR)/.venv/bin:$$PATH" scripts/check.sh $(ARGS)

format: ## let ruff rewrite the tree in the house style
	@$(MAKE) --silent --no-print-directory $(INSTALLED) EXTRAS=$(EXTRAS)
	.venv/bin/ruff format
	.venv/bin/ruff check --fix

clean: ## remove .venv and caches
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

.venv/.installed-%: pyproject.toml
	@test -n "$(PYTHON)" || { echo "jaxpaged needs Python 3.11 or newer" >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	@echo "installing jaxpaged$(if $(EXTRAS), with $(EXTRAS)) into .venv: once, some minutes"
	.venv/bin/python -m pip install --disable-pip-version-check --editable '.$(if $(EXTRAS),[$(EXTRAS)])'
	@touch $@
