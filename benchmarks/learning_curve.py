"""Draw success rates of runs by step: `python benchmarks/learning_curve.py RUN… > curve.svg`.

Of every step the mean success rate of its prompts (`accuracy/pass_at_1`), smoothed over ten steps,
and below it the held-out accuracy before and after that the run printed."""

import io
import json
import sys
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("svg")
import matplotlib.pyplot as plt  # after `use`

SMOOTHED_STEPS = 10


def success_by_step(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """Steps int64 [k] and smoothed success rates float64 [k]."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = np.array([record["step"] for record in records])
    rates = np.array([record["accuracy/pass_at_1"] for record in records], float)
    window = np.ones(SMOOTHED_STEPS) / SMOOTHED_STEPS
    smooth = np.convolve(rates, window, mode="valid")
    return steps[SMOOTHED_STEPS - 1 :], smooth


def label_of(run: Path) -> str:
    result = json.loads((run / "result.json").read_text())
    after = result["eval"]["all"]["accuracy"]
    return f"{run.name}: held-out {result['before']:.2f} before, {after:.2f} after"


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
