# Everything sets itself up: the only need is a Python >= 3.12 somewhere.
#   make demo            one speculative step of a real model, checked byte for byte; then a serving loop
#   make test            the whole test suite (JAX=0.11.2 for that release instead of the newest)
#   make figures         the notebooks' figures, drawn again by running them
#   make lint            ruff, and buildifier where npm can bring it
#   make fuzz            random structures and values against the oracle, new ones every time
#   make soak            a hundred thousand random engine steps against the oracle
#   make sanitize        the kernel under compute-sanitizer, on an NVIDIA GPU
#   make audit           known vulnerabilities of the dependencies, where pip-audit can reach a database

JAX ?=
VENV := .venv$(if $(JAX),-jax-$(JAX))
BIN := $(VENV)/bin
PACKAGES := layouts pallas_kernels
SOURCES := $(shell find $(PACKAGES) -name '*.py')
TESTS ?= tests
PYTEST_ARGS ?= -n auto --dist loadgroup

.PHONY: venv demo test figures lint fuzz soak sanitize audit clean

venv: $(VENV)/.package

# The dependencies, once, without compiling every file of theirs, most of which nothing imports; then the package itself
# as a wheel, whenever its sources change.
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

# Whoever edits a notebook runs this: it also puts the notebooks into the form in which they are kept.
figures: venv
	$(BIN)/python notebooks/clean.py
	rm -f notebooks/figures/*.png
	cd notebooks && MAMBA_STATE_FIGURES=figures ../$(BIN)/jupyter-execute *.ipynb

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@if command -v npm >/dev/null; then .ci/buildifier.sh; else echo "npm is missing: BUILD is not checked"; fi

FUZZ_EXAMPLES ?= 500
fuzz: venv
	FUZZ_EXAMPLES=$(FUZZ_EXAMPLES) $(BIN)/pytest -n auto tests/test_fuzz.py

soak: venv
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

# Run with the Python that has JAX for the GPU: make sanitize PYTHON=python3. Each allocation is one of CUDA's, so that
# memcheck sees where it ends, and no launch is hidden in a CUDA graph. initcheck does not look at what the
# host copies: it takes only the first 32 bytes of a bulk store for written, and reported right values (vectors of 12 to
# 40 int32, none of 8: H200, JAX 0.11.2, 2026-11-30). The oracle looks at those bytes.
PYTHON ?= python3
sanitize:
	@set -e; for tool in memcheck racecheck "initcheck --check-api-memory-access no"; do \
	  echo "compute-sanitizer --tool $$tool"; \
	  PYTHONPATH=. XLA_PYTHON_CLIENT_ALLOCATOR=platform XLA_FLAGS=--xla_gpu_enable_command_buffer= \
	    compute-sanitizer --tool $$tool --error-exitcode 9 $(PYTHON) tests/sanitize.py $(SANITIZE_ARGS); \
	done

audit: venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --skip-editable

clean:
	rm -rf .venv .venv-jax-* build *.egg-info .pytest_cache .ruff_cache .hypothesis
