# Everything sets itself up: the only need is a Python >= 3.12 somewhere.
#   make demo            one speculative step of a real model, checked byte for byte; then a serving loop
#   make test            the whole test suite (JAX=0.11.2 for that release instead of the newest)
#   make lint            ruff, and buildifier where npm can bring it

JAX ?=
VENV := .venv$(if $(JAX),-jax-$(JAX))
BIN := $(VENV)/bin
PACKAGES := layouts pallas_kernels
SOURCES := $(shell find $(PACKAGES) -name '*.py')
TESTS ?= tests
PYTEST_ARGS ?= -n auto --dist loadgroup

.PHONY: venv demo test lint clean

venv: $(VENV)/.package

# The dependencies, once, without compiling every file of theirs, most of which nothing imports; then the package itself as a wheel, whenever its sources change.
$(VENV)/.dependencies: pyproject.toml
	@set -e; \
	for python in python3.13 python3.12 python3 $$(ls -d "$${PYENV_ROOT:-$$HOME/.pyenv}"/versions/*/bin/python3 2>/dev/null | sort -rV); do \
	  if "$$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then found="$$python"; break; fi; \
	done; \
	if [ -z "$${found:-}" ]; then \
	  echo "No Python >= 3.12 found as python3.13, python3.12 or python3, nor among pyenv's versions." >&2; \
	  echo "Install one (for example: pyenv install 3.13) and run make again." >&2; \
	  exit 1; \
	fi; \
	echo "Setting up $(VENV) with $$("$$found" --version)"; \
	"$$found" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile '.[test]' $(if $(JAX),'jax==$(JAX)' 'jaxlib==$(JAX)')
	@touch $@

$(VENV)/.package: $(VENV)/.dependencies $(SOURCES)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --force-reinstall .
	@touch $@

demo: venv
	$(BIN)/python -P -m pallas_kernels.demo
	$(BIN)/python -P -m pallas_kernels.serving

test: venv
	$(BIN)/pytest $(PYTEST_ARGS) $(TESTS)

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npm >/dev/null; then .ci/buildifier.sh; else echo "npm is missing: BUILD is not checked"; fi

clean:
	rm -rf .venv .venv-jax-* build *.egg-info .pytest_cache .ruff_cache .hypothesis
