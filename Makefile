# Every target sets up what it needs in .venv, once; nothing outside this directory is touched.
PYTHON ?= python3
BIN := .venv/bin
CORE := .venv/.core
STAMP := .venv/.installed
DOCS := .venv/.docs
MADE := .venv/.made
FLOWER := .venv-flower
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt --no-build-isolation

# Compiled modules are kept: the tests start many processes.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo demo-peers test slow hostile fuzz inputs external typecheck-runtime lint format docs linkcheck wheel lock sbom flower test-flower clean

help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "make %-18s %s\n", $$1, $$2}' Makefile

install: $(STAMP) ## Make the virtual environment .venv with all pinned packages, for development

# Each seed draws its own test images. All samples of an agent train its model and validate those of its peers, in every method.
DEMO_SETTINGS := evaluate_on=redrawn agents.hold_out=false agents.validation=1.0
DEMO := $(addprefix digits-,fedcbo fedcb2o-paper fedcb2o-released fedassay oracle-min oracle-max)
demo: $(CORE) ## Run the main job on scikit-learn's digits: a table, and figures in runs/demo-report
	rm -rf runs/demo runs/demo-report
	$(BIN)/fedcb2o run $(DEMO) --seeds 0-9 $(addprefix --set ,$(DEMO_SETTINGS)) --out runs/demo
	$(BIN)/fedcb2o report $(patsubst %,runs/demo/%,$(DEMO)) --out runs/demo-report

demo-peers: $(CORE) ## Run eight organisations on this machine, three of them hostile, for a minute
	$(INSTALL) --quiet --editable '.[peer]'
	rm -rf runs/peers-demo
	$(BIN)/fedcb2o peer demo

# The tests of a file stay together, because many share a slow fixture.
test: $(STAMP) ## Run the tests, all but the slow ones, on all processors
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

slow: $(STAMP) ## Run the slow tests alone
	$(BIN)/python -m pytest -m slow

hostile: $(STAMP) ## Attack nodes on this machine, directly and through a relay, for three quarters of an hour
	$(BIN)/python -m tests.hostile.run 40
	$(BIN)/python -m tests.hostile.relay 40

MINUTES := 60
SEED := 0
fuzz: $(STAMP) ## Fuzz every parser of bytes of others with coverage, for an hour or MINUTES=5
	$(INSTALL) --quiet atheris
	nice -n 19 $(BIN)/python -m tests.fuzz.run --minutes $(MINUTES) --seed $(SEED) $(TARGETS)

inputs: $(STAMP) ## Compare 1,000 random inputs with a plain loop: equal numbers, or one line that says why not
	$(BIN)/python -m tests.experiments.random_inputs 1000

external: $(STAMP) ## Run ByzFL's tests on this project's rules, and compare with byzfl, krum and byzpy, each in a folder of its own
	$(BIN)/python -m tests.external.libraries

# Comparisons of whole rounds and runs with plain loops call the same functions with other settings: one is enough.
WORKERS := auto
typecheck-runtime: $(STAMP) ## Run the tests of the core packages with run-time checks of types and shapes
	FEDCB2O_TYPECHECK=1 $(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile \
		-k 'not_dense or not (equal_the_oracle or equals_the_oracle or reference_loops)' \
		tests/federated tests/particles tests/test_consensus.py tests/test_nn.py

lint: $(STAMP) ## Check format, style, types and the direction of imports
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo

format: $(STAMP) ## Format the code and mend what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

SPHINX := $(BIN)/sphinx-build --fail-on-warning --quiet --doctree-dir build/docs/doctrees
docs: $(DOCS) ## Build the documentation site into build/docs/html; its notebooks run where they or the package changed
	$(SPHINX) docs build/docs/html
	tar -czf build/docs/fedcb2o-docs.tar.gz -C build/docs html
	@echo "open build/docs/html/index.html; packed: build/docs/fedcb2o-docs.tar.gz"

linkcheck: $(DOCS) ## Look whether what the documentation links to elsewhere is there
	$(SPHINX) --builder linkcheck docs build/docs/links

# Beside the packages of .venv, and before its own fedcb2o, which is that of this folder.
wheel: $(STAMP) ## Build the wheel into dist, and use it from another folder
	rm -rf dist build/wheel build/elsewhere
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	$(PIP) install --quiet --no-deps --target build/wheel dist/*.whl
	mkdir -p build/elsewhere
	cd build/elsewhere && export PYTHONPATH=../wheel && for job in \
		"run digits-fedassay --seeds 0 --set rounds=2" "report runs/digits-fedassay --out report" "schema" "presets"; do \
		../../$(BIN)/python -m fedcb2o $$job > said.txt || { cat said.txt; exit 1; }; done && \
		../../$(BIN)/python -c "import fedcb2o; assert 'build/wheel' in fedcb2o.__file__, fedcb2o.__file__"

# Hashes of all files, for all platforms, of the pinned packages that a node needs. PyTorch and its CUDA packages are apart,
# because another index has a build for processors.
lock: build/tools/.installed ## Write deploy/locked*.txt: the SHA-256 of each file of the packages that a node needs
	echo hatchling | build/tools/bin/uv pip compile --quiet --extra peer --extra metrics --extra privacy \
		--constraint constraints.txt --python-version 3.11 --universal --generate-hashes --no-annotate --no-header \
		pyproject.toml - --output-file build/tools/locked.txt
	awk '/^[^ ]/ { file = /^(torch|triton|nvidia-|cuda-)/ ? "-torch" : "" } { print > "deploy/locked" file ".txt" }' \
		build/tools/locked.txt

ENVIRONMENT := build/node
sbom: build/tools/.installed ## Write dist/fedcb2o.cdx.json: all packages of a node, or of ENVIRONMENT=/opt/fedcb2o, as CycloneDX
	if [ "$(ENVIRONMENT)" = build/node ]; then "$(PYTHON)" -m venv --clear build/node && build/node/bin/python -m pip \
		--disable-pip-version-check install --quiet --constraint constraints.txt '.[peer,metrics,privacy]'; fi
	mkdir -p dist
	build/tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --validate \
		--output-file dist/fedcb2o.cdx.json "$(ENVIRONMENT)"

# Tools of a release have an environment of their own: they are not among the packages that they list.
build/tools/.installed: Makefile
	"$(PYTHON)" -m venv --clear build/tools
	build/tools/bin/python -m pip --disable-pip-version-check install --quiet uv==0.13.9 cyclonedx-bom==7.5.0
	@touch $@

# Flower pins other versions of what this project uses, so that it has an environment of its own.
FLOWER_PINS := torch|numpy|scipy|pandas|scikit-learn|matplotlib|pydantic|safetensors|hatchling|hypothesis|pytest|pytest-timeout
flower: $(FLOWER)/.installed ## Make the environment .venv-flower with Flower and this project

test-flower: $(FLOWER)/.installed ## Run the tests of Flower, in its simulation and over its SuperNodes too
	$(FLOWER)/bin/python -m pytest tests/flower

$(FLOWER)/.installed: pyproject.toml constraints.txt
	@rm -f $@
	"$(PYTHON)" -m venv $(FLOWER)
	grep -E '^($(FLOWER_PINS))==' constraints.txt >$(FLOWER)/constraints.txt
	$(FLOWER)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint $(FLOWER)/constraints.txt \
		hatchling hypothesis pytest pytest-timeout
	$(FLOWER)/bin/python -m pip --disable-pip-version-check install --quiet --no-compile --constraint $(FLOWER)/constraints.txt \
		--no-build-isolation --editable '.[flower]'
	@touch $@

clean: ## Remove .venv, what the demos wrote, and all caches
	rm -rf .venv $(FLOWER) runs/demo runs/demo-report runs/peers-demo dist build .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name .git -prune -o -type d -name __pycache__ -exec rm -rf {} +

# Without a stamp the set-up was cut short, and pip takes a half-copied package for a whole one: the environment is made
# anew. With an old stamp, only what changed is installed.
$(CORE): pyproject.toml constraints.txt
	@if [ ! -f $(CORE) ] && [ ! -f $(STAMP) ]; then \
		command -v "$(PYTHON)" >/dev/null || { \
			echo "fedcb2o needs Python 3.11 or newer, and there is no $(PYTHON): name yours, as in make PYTHON=python3.12" >&2; exit 1; }; \
		"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
			echo "fedcb2o needs Python 3.11 or newer, and $(PYTHON) is $$("$(PYTHON)" --version 2>&1): name another, as in make PYTHON=python3.12" >&2; exit 1; }; \
		if { [ -e .venv ] && [ ! -f $(MADE) ]; } || [ -L .venv ]; then \
			echo "make has not made .venv, and would empty it: move it away, or remove it with make clean" >&2; exit 1; fi; \
		"$(PYTHON)" -m venv --clear .venv && touch $(MADE); \
	fi
	@rm -f $(CORE) $(STAMP)
	$(PIP) install --constraint constraints.txt hatchling
	$(INSTALL) --editable .
	@touch $(CORE)

$(STAMP): $(CORE)
	@rm -f $(CORE)
	$(INSTALL) --editable '.[dev]'
	@touch $(CORE) $(STAMP)

$(DOCS): $(STAMP)
	$(INSTALL) --editable '.[dev,docs]'
	@touch $@
