# make setup | demo | demo-control | test-fast | test | test-learning | test-families |
#      test-matrix | test-chaos | ... | lint
#
# Variables of the demo: seed=N, name=NAME, args="key=value ..."
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

bin := .venv/bin
recipe := recipes/demo/gspo-moe-cpu.toml
seed ?=
name ?=
args ?=
demo_flags = $(if $(seed),seed=$(seed)) $(args)
pytest := $(bin)/python -m pytest -q
# pytest's exit code 5 means that a tier has no test (yet): say so instead of failing.
or_empty = || { code=$$?; [[ $$code == 5 ]] && echo "$@: no test in this tier yet" || exit $$code; }

.PHONY: setup demo demo-control lint test-fast test test-learning test-families test-matrix test-chaos \
	test-slurm test-gpu clean

setup:
	@scripts/setup.sh

demo: setup
	$(bin)/grpo-megatron train $(recipe) --overwrite $(if $(name),name=$(name)) $(demo_flags)

# Shuffled advantages: the same run must not learn.
demo-control: setup
	$(bin)/grpo-megatron train $(recipe) --overwrite name=$(or $(name),demo-control) \
		objective.shuffle_advantages=true $(demo_flags)

lint: setup
	$(bin)/ruff check .
	$(bin)/lint-imports

test-fast: setup
	$(pytest) -m "not engine and not learning and not chaos and not slurm and not gpu and not families and not matrix"

test: lint
	$(pytest) -m "not learning and not chaos and not slurm and not gpu and not families and not matrix"

test-learning: setup
	$(pytest) -m learning $(or_empty)

# Every model family at every layout that it allows (make test runs a selection).
test-families: setup
	$(pytest) -m families

# More layouts and combinations than make test has.
test-matrix: setup
	$(pytest) -m matrix

test-chaos: setup
	$(pytest) -m chaos $(or_empty)

test-slurm: setup
	$(pytest) -m slurm $(or_empty)

test-gpu: setup
	$(pytest) -m gpu $(or_empty)

# Keeps .venv and runs/.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d \
		-exec rm -rf {} +
