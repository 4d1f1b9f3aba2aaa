# make setup | demo | demo-control | demo-agent | demo-agent-control | stages-demo | stages-compare | compare-ppo | test-fast | test |
#      test-learning | test-families | test-matrix | test-chaos | ... | lint
#
# Variables of the demo: seed=N, name=NAME, args="key=value ..."
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

bin := .venv/bin
recipe := recipes/demo/gspo-moe-cpu.toml
agent_recipe := recipes/demo/agent-calculator-cpu.toml
seed ?=
seeds ?=
name ?=
args ?=
demo_flags = $(if $(seed),seed=$(seed)) $(args)
pytest := $(bin)/python -m pytest -q -rs --durations=25 --durations-min=5
gate := not learning and not chaos and not slurm and not gpu and not families and not matrix \
	and not recipes and not contract and not device and not trace
# pytest's exit code 5 means that a tier has no test (yet): say so instead of failing.
or_empty = || { code=$$?; [[ $$code == 5 ]] && echo "$@: no test in this tier yet" || exit $$code; }

# A gate starts more than a hundred processes: where this is set, each compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: setup setup-gpu demo demo-control demo-agent demo-agent-control stages-demo stages-compare compare-ppo lint style test-fast test test-learning test-families test-recipes test-matrix test-chaos \
	test-trace test-slurm test-contract test-device test-openenv test-gpu test-properties clean

setup:
	@scripts/setup.sh

demo: setup
	$(bin)/grpo-megatron train $(recipe) --overwrite $(if $(name),name=$(name)) $(demo_flags)

# Shuffled advantages: the same run must not learn.
demo-control: setup
	$(bin)/grpo-megatron train $(recipe) --overwrite name=$(or $(name),demo-control) \
		objective.shuffle_advantages=true $(demo_flags)

# The same for an agent: it learns to call a calculator, and must not learn with shuffled advantages.
demo-agent: setup
	$(bin)/grpo-megatron train $(agent_recipe) --overwrite $(if $(name),name=$(name)) $(demo_flags)

demo-agent-control: setup
	$(bin)/grpo-megatron train $(agent_recipe) --overwrite name=$(or $(name),demo-agent-control) \
		objective.shuffle_advantages=true $(demo_flags)

# Experts for three domains, one model distilled from them.
stages-demo: setup
	$(bin)/grpo-megatron stages run tiny-deepseek_v4

# The same budget of mixed-domain RL; its table is followed by that of the experts and the student.
stages-compare: setup
	$(bin)/grpo-megatron stages run tiny-compare
	@echo; echo "beside it, of 'make stages-demo':"; \
	$(bin)/grpo-megatron stages status tiny-deepseek_v4

# PPO with a critic and the demo's objective, from the same weights, with the same samples: accuracy,
# seconds, memory by component as seen and as planned. seeds=0,1 for several.
compare-ppo: setup
	$(bin)/python benchmarks/compare_ppo.py --seeds $(or $(seeds),0) $(args)

lint: style
	$(bin)/mypy

style: setup
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	$(bin)/lint-imports

test-fast: setup
	$(pytest) -n 2 -m "not engine and $(gate)"

# Both halves at once, each with two workers: one waits for processes most of the time (its files are
# shared in their order, which has the long ones first), the other computes. Each has a session of
# its own, so that no signal to a process group reaches both. The type checker, one process, computes
# beside them.
test: style
	@fast_log=$$(mktemp); types_log=$$(mktemp); code=0; \
	setsid $(bin)/mypy > $$types_log 2>&1 & types=$$!; \
	setsid $(pytest) -n 2 -p no:cacheprovider -m "not engine and $(gate)" > $$fast_log 2>&1 & fast=$$!; \
	trap 'kill -- -$$fast -$$types 2> /dev/null || true; rm -f $$fast_log $$types_log' EXIT; \
	echo "tests with engines (types and those without run beside them and are shown after them)"; \
	$(pytest) -n 2 --dist loadscope --no-loadscope-reorder -m "engine and $(gate)" || code=$$?; \
	wait $$fast || code=$$?; \
	cat $$fast_log; \
	wait $$types || code=$$?; \
	cat $$types_log; exit $$code

# Properties, each with examples that were not tried before: run it as often as there is time.
test-properties: setup
	$(pytest) -n 2 --hypothesis-profile=new_examples -m "hypothesis and not engine and $(gate)"

test-learning: setup
	$(pytest) -m learning $(or_empty)

# Every model family at every layout that it allows (make test runs a selection), and through the
# real command with the real engine.
test-families: setup
	$(pytest) -m families

# Every shipped recipe and graph, rehearsed: with a tiny model of its family, on this machine.
test-recipes: setup
	$(pytest) -m recipes

# More layouts and combinations than make test has.
test-matrix: setup
	$(pytest) -m matrix

test-chaos: setup
	$(pytest) -m chaos $(or_empty)

test-slurm: setup
	$(pytest) -m slurm $(or_empty)

# Ranks of recipes at their real sizes, without memory, held against the plan.
test-trace: setup
	$(pytest) -m trace

# The CUDA build of vLLM in place of the CPU's, on a machine without a GPU.
test-contract: setup
	@scripts/setup_contract.sh
	PYTHONPATH=$(CURDIR)/.contract/packages LD_LIBRARY_PATH=$(CURDIR)/.contract/lib \
		$(pytest) -m contract tests/contract

# The trainer's CUDA branch on the CPU, with tensors that say they are on a GPU.
test-device: setup
	$(pytest) -m device tests/device

# The library of OpenEnv serves its environments, in a Python environment of its own (.openenv): it
# wants an older `mcp` than this project's.
test-openenv: setup
	@test -x .openenv/bin/python || $(bin)/python -m venv .openenv
	@.openenv/bin/python -m pip install --quiet "openenv==0.10.0"
	OPENENV_PYTHON=$(CURDIR)/.openenv/bin/python $(pytest) tests/environments/test_openenv.py

# The environment for GPUs, beside that for CPUs (.venv-gpu). No GPU is needed to make it.
setup-gpu:
	@scripts/setup_gpu.sh

test-gpu: setup-gpu
	$(subst $(bin),.venv-gpu/bin,$(pytest)) -m gpu $(or_empty)

# Keeps .venv and runs/.
clean:
	rm -rf build dist .pytest_cache .ruff_cache .mypy_cache .hypothesis .import_linter_cache
	find . -path ./.venv -prune -o -path ./runs -prune -o -name __pycache__ -type d \
		-exec rm -rf {} +
