# One command per job. `make help` lists them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
QUICKSTART_DIR ?= quickstart
# The files that are checked: everything of ours, found by git, never listed by hand.
SOURCES := t5x_fwdloss configs tests scripts typings setup.py

.PHONY: help setup t5x quickstart test test-t5x-own test-bucket test-meshes test-peers lint format bench clean

help:
	@echo "setup       make $(VENV) from constraints.txt (nothing to do when up to date)"
	@echo "t5x         let $(VENV) find T5X: make t5x T5X_SOURCES='../t5x ../airio ../jestimator'"
	@echo "quickstart  train a tiny T5 on spelling to phonemes, and analyze its checkpoint"
	@echo "test        all tests; those that need T5X are skipped, and counted, without it"
	@echo "test-t5x-own T5X's own tests with our losses and models in their place"
	@echo "test-meshes every measurement of a T5 on meshes of eight simulated devices"
	@echo "test-bucket a run and a sweep with everything in a bucket, against a store in memory"
	@echo "test-peers  Hugging Face's checkpoints against transformers, with PyTorch for CPUs"
	@echo "lint        ruff, codespell, basedpyright"
	@echo "format      ruff format and import order"
	@echo "bench       measure again what README.md's tables say, and write them: an hour or two"
	@echo "clean       remove caches and builds; $(VENV) and results stay"

setup: $(VENV)/.complete

# The stamp is written last, so that an interrupted installation is done again.
$(VENV)/.complete: setup.py constraints.txt pyproject.toml
	@$(PYTHON) -c "import sys; v = sys.version_info[:2]; sys.exit(0 if v == (3, 11) else 'Python 3.11 is needed (constraints.txt is tested on it): got %d.%d; say make PYTHON=python3.11' % v)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[t5x-deps,test]'
	touch $@

# T5X is on no package index: its source folders are named in a .pth file.
t5x: setup
	$(BIN)/python scripts/link_t5x.py $(T5X_SOURCES)

quickstart: setup
	$(BIN)/python -m t5x_fwdloss.standalone.train \
	  --gin_file=t5x_fwdloss/configs/standalone/train.gin \
	  --gin_file=t5x_fwdloss/configs/standalone/tiny.gin \
	  --gin.CURVATURE_PERIOD=20 \
	  --gin.MODEL_DIR="'$(QUICKSTART_DIR)/model'"
	$(BIN)/python -m t5x_fwdloss.standalone.analyze \
	  --gin_file=t5x_fwdloss/configs/standalone/analyze.gin \
	  --gin_file=t5x_fwdloss/configs/standalone/tiny.gin \
	  --gin_file=t5x_fwdloss/configs/analysis/quick.gin \
	  --gin.CHECKPOINT_PATH="'$(QUICKSTART_DIR)/model'" \
	  --gin.ANALYSIS_OUTPUT_DIR="'$(QUICKSTART_DIR)/analysis'"

test: setup
	$(BIN)/python -m pytest -n 2
	$(BIN)/python scripts/check_readme.py README.md docs/*.md
	$(BIN)/python scripts/readme_tables.py --check

# T5 without its requirements, which are nightly builds of SeqIO and TFDS; without the
# run-time type checks, which refuse what T5X's mocks pass.
test-t5x-own: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[t5x-own-tests]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps t5==0.9.4
	$(BIN)/python -m pytest -n 2 --override-ini='addopts=--strict-markers --strict-config' tests/t5x_own

# Minutes long: TensorFlow's and TensorStore's own clients against a store in memory.
test-bucket: setup
	$(BIN)/python -m pytest -m bucket tests/standalone/test_bucket.py tests/analysis/test_sweep_in_bucket.py

# Minutes for each mesh: every program is compiled and its text read.
test-meshes: setup
	$(BIN)/python -m pytest -m meshes tests/t5x_host/test_meshes.py

# PyTorch's own index, since the package indexes have the builds for GPUs: gigabytes.
test-peers: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
	  --index-url https://download.pytorch.org/whl/cpu torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[peers]'
	$(BIN)/python -m pytest -m peers tests/standalone/test_hugging_face_peers.py

lint: setup
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/codespell $(SOURCES) docs README.md CHANGELOG.md Makefile
	$(BIN)/basedpyright --level error

format: setup
	$(BIN)/ruff check --fix-only $(SOURCES)
	$(BIN)/ruff format $(SOURCES)

# Whole training runs and their steps are measured only where T5X is.
bench: setup
	$(BIN)/python scripts/benchmark_loss.py --output=docs/benchmarks/loss_cpu.json \
	  $$($(BIN)/python -c "import t5x" 2>/dev/null && echo --train_step)
	$(BIN)/python scripts/benchmark_curvature.py --output=docs/benchmarks/curvature_cpu.json
	$(BIN)/python scripts/benchmark_sweep.py --output=docs/benchmarks/sweep_cpu.json
	$(BIN)/python scripts/edge_of_stability.py
	$(BIN)/python scripts/edge_of_stability_adaptive.py
	! $(BIN)/python -c "import t5x" 2>/dev/null || { \
	  $(BIN)/python scripts/benchmark_training_memory.py --output=docs/benchmarks/training_memory_cpu.json && \
	  $(BIN)/python scripts/benchmark_probes.py --output=docs/benchmarks/probes_cpu.json; }
	$(BIN)/python scripts/readme_tables.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
