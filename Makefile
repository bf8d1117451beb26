# `make quickstart` and `make test` set everything up on a machine with Python 3.11 or 3.12 and the network. The newest that
# runs is taken; libtpu 0.0.21, which torch_xla 2.9 needs, has no wheel for 3.13: there, `make test-at-newest` alone.
PYTHON ?= $(shell for python in python3.12 python3.11; do $$python --version >/dev/null 2>&1 && echo $$python && break; done)
VENV ?= .venv
BIN := $(VENV)/bin
# Processes that share the tests, by file. Each takes up to 4 GB.
TEST_WORKERS ?= 2
# Files in the order of their names. xdist's own order, by the number of tests, leaves files of a few long tests for the end,
# where one process waits for the other.
IN_PARALLEL := -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder
QUICKSTART := .cache/quickstart

# What the contract tests look into.
UPSTREAM := trl transformers accelerate peft
UPSTREAM_PATTERN := $(subst $() ,|,$(UPSTREAM))

.PHONY: setup quickstart test test-ci test-slow test-gpu test-torch-tpu test-torch-tpu-slow test-bounds test-torch quality style benchmark wheel docs clean help

help:  ## Show this help
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: $(VENV)/.installed  ## Create .venv with torch, torch_xla, trl and this package

$(VENV)/.installed: setup.cfg pyproject.toml
	@$(PYTHON) -c 'import platform; print(f"Python {platform.python_version()} makes $(VENV): PyTorch, torch_xla, TRL and tools for tests, 9 GB on disk, 3 minutes or more. pip is silent meanwhile")' || \
		{ echo "No Python 3.12 or 3.11 is installed here, or PYTHON=$(PYTHON) does not run: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[tpu,plan,report,quickstart,test]'
	@touch $@

$(QUICKSTART)/ready.json: | setup
	$(BIN)/python recipes/prepare_quickstart.py --output_dir $(QUICKSTART)

quickstart: setup $(QUICKSTART)/ready.json  ## Fine-tune SmolLM2-135M on this machine with the stock `trl` command
	HF_TPU_EXT_BACKEND=xla $(BIN)/trl sft --config recipes/quickstart.yaml

test: quality  ## Check style, lint and types, and run the tests
	$(BIN)/python -m pytest -q $(IN_PARALLEL) tests

test-ci: setup  ## The tests that CI runs besides: they take longer
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m 'ci and not slow' tests

test-slow: setup  ## Run the slow tests too
	$(BIN)/python -m pytest -q $(IN_PARALLEL) -m 'slow or not slow' tests

test-gpu:  ## The tests of a GPU, and every recipe on it, with the `python` of this machine
	python -m pytest -q -m 'slow or not slow' tests/trainers/test_gpu.py tests/cli/test_recipes.py -k 'gpu or test_recipe['

# torch_tpu and torch_xla need different versions of torch.
$(VENV)-torch-tpu/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)-torch-tpu
	$(VENV)-torch-tpu/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-torch-tpu/bin/python -m pip install --quiet -e '.[test_torch_tpu]'
	@touch $@

# What CI runs of torch_tpu: its programs, its choice of a device, a step and text.
TORCH_TPU_SHORT := $(patsubst %,tests/torch_tpu/test_torch_tpu_%.py,contract selection compiled generation)
# All tests of it, and those of trainers, whose backend is torch_tpu in its environment; and tests of which it runs what CI runs,
# since all would take many hours.
TORCH_TPU_ALL := tests/torch_tpu $(patsubst %,tests/trainers/test_%.py,trajectory checkpoints resumption kill distillation evaluation rollouts_written)
TORCH_TPU_DEFAULT := tests/distillation/test_cache_builder.py $(patsubst %,tests/trainers/test_%.py,two_lines preference_options reference_log_probs rollouts on_policy images differential kinds_of_user_code)

test-torch-tpu: $(VENV)-torch-tpu/.installed  ## The tests of torch_tpu that CI runs, in an environment of its own
	$(VENV)-torch-tpu/bin/python -m pytest -q $(IN_PARALLEL) -m 'not slow' $(TORCH_TPU_SHORT)

# A run of each trainer that is killed five times takes half an hour.
test-torch-tpu-slow: $(VENV)-torch-tpu/.installed  ## All tests of torch_tpu
	$(VENV)-torch-tpu/bin/python -m pytest -q $(IN_PARALLEL) -m 'slow or not slow' -k 'not five-times' $(TORCH_TPU_ALL)
	$(VENV)-torch-tpu/bin/python -m pytest -q $(IN_PARALLEL) -m 'not slow' $(TORCH_TPU_DEFAULT)

test-bounds: test-at-lowest test-at-newest  ## Contract tests at the bounds of setup.cfg

# From `trl>=1.16,<2` to `trl==1.16`. At the newest, pip takes what setup.cfg allows.
.cache/lowest.txt: setup.cfg
	@mkdir -p $(@D)
	sed -nE 's/^ +($(UPSTREAM_PATTERN))>=([^,]+).*/\1==\2/p' $< > $@

.cache/newest.txt .cache/torch-newest.txt:
	@mkdir -p $(@D)
	touch $@

test-at-%: .cache/%.txt
	test -d $(VENV)-$* || $(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/python -m pip install --quiet --upgrade -e '.[test]' 'torch_xla==2.9.*' 'torch==2.9.*' -c $< $(UPSTREAM)
	$(VENV)-$*/bin/python -m pip freeze | grep -E '^($(UPSTREAM_PATTERN))=='
	$(VENV)-$*/bin/python -m pytest -q -m 'not slow' tests/contract

# A GPU and the eager CPU take any torch that setup.cfg allows, where torch_xla takes one.
test-torch: test-torch-at-lowest test-torch-at-newest  ## Tests on the eager CPU at the bounds of torch in setup.cfg

.cache/torch-lowest.txt: setup.cfg
	@mkdir -p $(@D)
	sed -nE 's/^ +torch>=([0-9.]+)$$/torch==\1.*/p' $< > $@

test-torch-at-%: .cache/torch-%.txt
	test -d $(VENV)-torch-$* || $(PYTHON) -m venv $(VENV)-torch-$*
	$(VENV)-torch-$*/bin/python -m pip install --quiet --upgrade -e . 'pytest>=8' torch -c $<
	$(VENV)-torch-$*/bin/python -m pip freeze | grep ^torch==
	$(VENV)-torch-$*/bin/python -m pytest -q -m 'not slow and not ci' $(patsubst %,tests/%.py,cli/test_launch cli/test_several_processes trainers/test_processes)

quality: setup  ## Check style, lint and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: setup  ## Fix style and lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: setup  ## Stock TRL against this package against bare loops, as a table
	$(BIN)/python tests/benchmarks/step_overhead.py

wheel:  ## Build a wheel, with recipes and notebooks, into dist/
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir dist .

docs: setup  ## Build the documentation
	$(BIN)/python -m pip install --quiet -e '.[docs]'
	$(BIN)/mkdocs build --strict

clean:  ## Remove the environment and all caches
	rm -rf $(VENV) $(VENV)-torch-tpu $(VENV)-lowest $(VENV)-newest $(VENV)-torch-lowest $(VENV)-torch-newest .cache build dist *.egg-info
