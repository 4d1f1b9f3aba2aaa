"""PPO with a critic beside the demo's objective: accuracy, memory by component, seconds.

    python benchmarks/compare_ppo.py [KEY=VALUE ...] [--seeds 0,1] [--steps N] [--runs DIR]
        [--table]

For every seed the demo's cold start is made once; from its weights both recipes train for the same
number of steps, with as many samples of the same prompts, the steps in which the critic is warmed
up among them. A case whose run is finished is not run again, so a call that was ended goes on where
it was. `--table` runs nothing.

Prints markdown: held-out greedy accuracy before and after by seed, a dash where no answer could be
scored; seconds of a step, of its training and of the critic in it, on the mean; and the bytes that
the trainer's rank 0 holds between two steps, as it counted them on its tensors, beside the
planner's, of rank 0 and of the fullest rank, which is the row of `plan --compare ppo`. Ends with
exit code 1 where seen and planned bytes differ at all."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from grpo_megatron.config.evaluated_share import share_of
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import has_frozen_routers, vocabulary_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.ppo import comparison_of
from grpo_megatron.plan.rank_bytes import static_bytes
from grpo_megatron.plan.weights import sizes_of
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events
from grpo_megatron.telemetry.metrics import read_metrics

RECIPES = {"without a critic": "demo/gspo-moe-cpu", "PPO": "demo/ppo-moe-cpu"}
SHORT = {"without a critic": "group", "PPO": "ppo"}
COMPONENTS = ("weights", "gradients", "optimizer", "buffers")
_MIB = 2**20
_LARGEST_PADDING = 2**16
"""Bytes that the fullest rank, of which `plan --compare ppo` tells, may hold more than rank 0."""


@dataclass(frozen=True)
class Case:
    """One run."""

    algorithm: str
    seed: int

    @property
    def name(self) -> str:
        return f"{SHORT[self.algorithm]}-seed{self.seed}"


def main() -> None:
    options = _options()
    cases = []
    for algorithm in RECIPES:
        cases += [Case(algorithm, seed) for seed in options.seeds]
    if not options.table:
        options.runs.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            prepare(options, seed)
        for case in cases:
            run_case(options, case)
    finished = [case for case in cases if RunDir(options.runs / case.name).result.exists()]
    print(results(options.runs, finished))
    lines, is_as_planned = memory(options.runs, finished)
    print("\n".join(lines))
    if not is_as_planned:
        sys.exit("what the trainer holds is not what the planner says")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for all runs")
    parser.add_argument("--seeds", type=_numbers, default=[0])
    parser.add_argument("--steps", type=int, help="RL steps; default: the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs/compare-ppo"))
    parser.add_argument("--table", action="store_true", help="only print what is finished")
    return parser.parse_intermixed_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


# --- runs


def prepare(options: argparse.Namespace, seed: int) -> None:
    """Make the weights from which all cases of a seed begin."""
    name = f"start-seed{seed}"
    if RunDir(options.runs / name).result.exists():
        return
    _train(options, RECIPES["without a critic"], name, [f"seed={seed}", "num_steps=0"])


def run_case(options: argparse.Namespace, case: Case) -> None:
    """Run one case, or what is left of it; a failed one is told, and the others go on."""
    if RunDir(options.runs / case.name).result.exists():
        return
    start = RunDir(options.runs / f"start-seed{case.seed}").export.absolute()
    settings = [
        f"seed={case.seed}",
        "model.preset=null",
        f"model.path={json.dumps(str(start))}",
        "cold_start=null",
    ]
    if options.steps is not None:
        settings.append(f"num_steps={options.steps}")
    _train(options, RECIPES[case.algorithm], case.name, settings)


def _train(options: argparse.Namespace, recipe: str, name: str, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "grpo_megatron.cli.main"]
    root = options.runs / name
    if RunDir(root).config.exists():
        command += ["resume", str(root)]
    else:
        given = [*options.overrides, *settings, f"name={name}", f"runs_dir={options.runs}"]
        command += ["train", recipe, *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"{name}: exit code {done.returncode}", *done.stdout.splitlines()[-5:], sep="\n  ")
        return
    print(f"{name}: {done.stdout.splitlines()[-1]}", flush=True)


# --- tables


def results(runs: Path, cases: Sequence[Case]) -> str:
    """Accuracy of every run, and its seconds."""
    lines = [
        "| run | seed | steps | samples | before | after | seconds a step | training | critic |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        run_dir = RunDir(runs / case.name)
        result = json.loads(run_dir.result.read_text())
        steps = read_metrics(run_dir.metrics)
        batch = read_resolved(run_dir.config).config.batch
        columns = [
            case.algorithm,
            str(case.seed),
            str(len(steps)),
            f"{len(steps) * batch.num_prompts * batch.num_samples_per_prompt:,}",
            _accuracy(result["before"]),
            _accuracy(share_of(result["eval"]["all"], "accuracy").value),
            _mean(steps, "time/step_s"),
            _mean(steps, "time/train_s"),
            _mean(steps, "time/critic_s"),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _accuracy(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.3f}"


def _mean(steps: Sequence[dict[str, Any]], name: str) -> str:
    values = [step[name] for step in steps if step.get(name) is not None]
    if not values:
        return "–"
    return f"{statistics.fmean(values):.2f}"


def memory(runs: Path, cases: Sequence[Case]) -> tuple[list[str], bool]:
    """Bytes of rank 0's models, seen and planned, of one run of each algorithm; and whether they
    are the same. What an algorithm needs of PPO's is that of its models; references stay on the
    host."""
    lines = [
        "",
        "| run | model | " + " | ".join(COMPONENTS) + " | seen | planned | fullest rank |",
        "|---|---|" + "---|" * (len(COMPONENTS) + 3),
    ]
    totals: dict[str, list[int]] = {}
    is_as_planned = True
    for case in cases:
        if case.algorithm in totals:
            continue
        totals[case.algorithm] = [0, 0]
        run_dir = RunDir(runs / case.name)
        config = read_resolved(run_dir.config).config
        rows = {model.model: model for model in comparison_of(config).models}
        for model, parts in _seen(run_dir).items():
            planned = _planned(config, model)
            sizes = [_mib(parts[name]) for name in COMPONENTS]
            seen_total = sum(parts.values())
            planned_total = sum(planned.values())
            columns = [case.algorithm, model, *sizes, _mib(seen_total), _mib(planned_total)]
            columns.append(_mib(rows[model].rank))
            lines.append("| " + " | ".join(columns) + " |")
            is_in_row = planned_total <= rows[model].rank <= planned_total + _LARGEST_PADDING
            is_as_planned = is_as_planned and parts == planned and is_in_row
            totals[case.algorithm][0] += seen_total
            totals[case.algorithm][1] += planned_total
    if len(totals) == len(RECIPES):
        shares = []
        for place in (0, 1):
            shares.append(totals["without a critic"][place] / totals["PPO"][place])
        lines += ["", "without a critic, of PPO's policy and critic: "]
        lines[-1] += f"{shares[0]:.1%} seen, {shares[1]:.1%} planned"
    return lines, is_as_planned


def _planned(config: RunConfig, model: str) -> dict[str, int]:
    """Bytes of rank 0 by component, as the planner's closed forms have them."""
    hf, _ = configuration_of(config.model)
    sizes = sizes_of(hf, vocabulary_of(hf, config.model), config.trainer)
    sizes = replace(sizes, num_scalars=int(model == "critic"))
    overlaps = bool(config.trainer.overlap_communication)
    frozen = has_frozen_routers(config)
    return static_bytes(sizes, 0, 0, frozen_routers=frozen, overlaps=overlaps)


def _seen(run_dir: RunDir) -> dict[str, dict[str, int]]:
    """Bytes by model and component, as the run's trainer counted them once both had a step."""
    for event in read_events(run_dir.events):
        if event["kind"] == "trainer_memory":
            found: dict[str, dict[str, int]] = event["bytes"]
            return found
    return {}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / _MIB:.2f} MiB"


if __name__ == "__main__":
    main()
