"""Accuracy by staleness and correction, from the same weights and with equally many samples.

    python benchmarks/staleness.py [RECIPE] [KEY=VALUE ...] [--staleness 0,1,2,4,8]
        [--presets gspo,topr,...] [--seeds 0,1,2] [--steps N] [--runs DIR] [--table]

For every seed the recipe's weights before RL (its cold start) are made once; every case trains
them for the same number of steps of the same prompts. A case whose run is finished is not run
again, so a call that was ended goes on where it was. `--table` runs nothing. Prints a markdown
table: held-out greedy accuracy before and after on the mean over seeds, how many seeds collapsed
(ended below their accuracy before), the effective share of the tokens, and seen and predicted
staleness (docs/staleness.md), both on the mean over the second half of the steps. What no seed
could be scored for, or says, is a dash."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.evaluated_share import share_of
from grpo_megatron.config.objective import PRESETS
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics

DEMO = "demo/gspo-moe-cpu"
CORRECTIONS = (
    "gspo",
    "deepseek_v3_2",
    "vespo",
    "topr",
    "minpro",
    "trm",
    "m2po",
    "a3po",
    "vcpo",
    "kimi_k2_5",
    "dppo",
    "drpo",
    "rspo",
    "fipo",
    "luspo",
)
"""Presets that do something about old samples, and the demo's own, in this order."""
_ESS = "mismatch/rho/ess_fraction"
"""Of tokens, by what the trainer's policy makes of them against the one that sampled them."""


@dataclass(frozen=True)
class Case:
    """One run."""

    preset: str
    staleness: int
    seed: int

    @property
    def name(self) -> str:
        return f"{self.preset}-{self.staleness}-seed{self.seed}"


@dataclass(frozen=True)
class Outcome:
    """What a finished run came to; NaN where it did not say."""

    before: float
    after: float
    ess: float
    seen: float
    predicted: float

    @property
    def collapsed(self) -> float:
        """1 where it ended below its accuracy before, else 0; NaN where one of them is unknown."""
        if math.isnan(self.before) or math.isnan(self.after):
            return math.nan
        return float(self.after < self.before)


def main() -> None:
    options = _options()
    runs = options.runs
    cases = []
    for preset in options.presets:
        for staleness in options.staleness:
            cases += [Case(preset, staleness, seed) for seed in options.seeds]
    if not options.table:
        runs.mkdir(parents=True, exist_ok=True)
        for seed in options.seeds:
            prepare(options, seed)
        for case in cases:
            run_case(options, case)
    print(table(runs, cases))


def _options() -> argparse.Namespace:
    known = [preset for preset in CORRECTIONS if preset in PRESETS]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", nargs="?", default=DEMO)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE for all runs")
    parser.add_argument("--staleness", type=_numbers, default=[0, 1, 2, 4, 8])
    parser.add_argument("--presets", type=lambda text: text.split(","), default=known)
    parser.add_argument("--seeds", type=_numbers, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="RL steps; default: the recipe's")
    parser.add_argument("--runs", type=Path, default=Path("runs/staleness"))
    parser.add_argument("--table", action="store_true", help="only print what is finished")
    options = parser.parse_intermixed_args()
    unknown = [preset for preset in options.presets if preset not in PRESETS]
    if unknown:
        parser.error(f"no such preset: {', '.join(unknown)}")
    return options


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def prepare(options: argparse.Namespace, seed: int) -> None:
    """Make the weights from which all cases of a seed begin."""
    name = _start_name(seed)
    if RunDir(options.runs / name).result.exists():
        return
    _train(options, name, [f"seed={seed}", "num_steps=0"])


def run_case(options: argparse.Namespace, case: Case) -> None:
    """Run one case, or what is left of it; a failed one is told, and the others go on."""
    if RunDir(options.runs / case.name).result.exists():
        return
    start = RunDir(options.runs / _start_name(case.seed)).export.absolute()
    settings = [
        f"seed={case.seed}",
        "model.preset=null",
        f"model.path={json.dumps(str(start))}",
        "cold_start=null",
        f"objective.preset={case.preset}",
        f"batch.max_staleness={case.staleness}",
    ]
    if case.staleness:
        settings.append("publish.pause=keep")
    if options.steps is not None:
        settings.append(f"num_steps={options.steps}")
    _train(options, case.name, settings)


def _start_name(seed: int) -> str:
    return f"start-seed{seed}"


def _train(options: argparse.Namespace, name: str, settings: Sequence[str]) -> None:
    command = [sys.executable, "-m", "grpo_megatron.cli.main"]
    root = options.runs / name
    if RunDir(root).config.exists():
        command += ["resume", str(root)]
    else:
        given = [*options.overrides, *settings, f"name={name}", f"runs_dir={options.runs}"]
        command += ["train", options.recipe, *given]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        print(f"{name}: exit code {done.returncode}", *done.stdout.splitlines()[-5:], sep="\n  ")
        return
    print(f"{name}: {done.stdout.splitlines()[-1]}", flush=True)


def outcome_of(run_dir: RunDir) -> Outcome:
    """Read what a finished run came to."""
    result = json.loads(run_dir.result.read_text())
    steps = read_metrics(run_dir.metrics)
    newest = steps[len(steps) // 2 :]
    before = math.nan
    if result["before"] is not None:
        before = result["before"]
    return Outcome(
        before=before,
        after=share_of(result["eval"]["all"], "accuracy").value,
        ess=_mean(newest, _ESS),
        seen=_mean(newest, "staleness/seen_mean"),
        predicted=_mean(newest, "staleness/predicted_mean"),
    )


def _mean(steps: Sequence[dict[str, Any]], name: str) -> float:
    values = [step[name] for step in steps if step.get(name) is not None]
    if not values:
        return math.nan
    return statistics.fmean(values)


def table(runs: Path, cases: Sequence[Case]) -> str:
    """A row for each preset and bound of which any seed is finished."""
    lines = [
        "| preset | bound | seeds | before | after | collapsed | effective | seen | predicted |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    rows: dict[tuple[str, int], list[Outcome]] = {}
    for case in cases:
        run_dir = RunDir(runs / case.name)
        if run_dir.result.exists():
            rows.setdefault((case.preset, case.staleness), []).append(outcome_of(run_dir))
    for (preset, staleness), found in rows.items():
        columns = [
            preset,
            str(staleness),
            str(len(found)),
            _shown([one.before for one in found]),
            _shown([one.after for one in found]),
            _counted([one.collapsed for one in found]),
            _shown([one.ess for one in found]),
            _shown([one.seen for one in found]),
            _shown([one.predicted for one in found]),
        ]
        lines.append("| " + " | ".join(columns) + " |")
    return "\n".join(lines)


def _shown(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    return f"{statistics.fmean(known):.2f}"


def _counted(values: Sequence[float]) -> str:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return "–"
    return f"{sum(known):.0f}"


if __name__ == "__main__":
    main()
