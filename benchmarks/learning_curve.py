"""Draw success rates of runs by step: `python benchmarks/learning_curve.py RUN… > curve.svg`.

Of every step the mean success rate of its prompts (`accuracy/pass_at_1`), smoothed over ten steps,
and below it the held-out accuracy before and after that the run printed. Steps that could not be
scored are left out of the mean; ten of them in a row are a gap."""

import io
import json
import math
import sys
from pathlib import Path

import matplotlib
import numpy as np

from grpo_megatron.config.evaluated_share import share_of
from grpo_megatron.telemetry.metrics import read_metrics

matplotlib.use("svg")
import matplotlib.pyplot as plt  # after `use`

SMOOTHED_STEPS = 10


def success_by_step(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps int64 [k] and smoothed success rates float64 [k], NaN in a gap."""
    records = read_metrics(run / "metrics.jsonl")
    steps = np.array([record["step"] for record in records], np.int64)
    rates = np.array([record.get("accuracy/pass_at_1") for record in records], float)
    smooth = []
    for end in range(SMOOTHED_STEPS, len(rates) + 1):
        window = rates[end - SMOOTHED_STEPS : end]
        known = window[~np.isnan(window)]
        smooth.append(known.mean() if len(known) else math.nan)
    return steps[SMOOTHED_STEPS - 1 :], np.array(smooth)


def label_of(run: Path) -> str:
    result = json.loads((run / "result.json").read_text())
    before = _told(result["before"])
    after = _told(share_of(result["eval"]["all"], "accuracy").value)
    return f"{run.name}: held-out {before} before, {after} after"


def _told(accuracy: float | None) -> str:
    if accuracy is None or math.isnan(accuracy):
        return "not scored"
    return f"{accuracy:.2f}"


def main(*runs: str) -> None:
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    for run in map(Path, runs):
        steps, rates = success_by_step(run)
        axes.plot(steps, rates, label=label_of(run))
    axes.set_xlabel("RL step")
    axes.set_ylabel("success rate of samples")
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", frameon=False)
    text = io.StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    print(text.getvalue())


if __name__ == "__main__":
    main(*sys.argv[1:])
