"""Predicted against published seconds of every configuration of `published.toml`, and the fit.

    python benchmarks/predicted_time.py          # every row, median and worst error of each half
    python benchmarks/predicted_time.py --fit    # constants fitted again, on the fitted half only

The fit minimises the mean of the errors' logarithms (Huber's, so that no single row rules) and a
penalty that holds every constant near a value that hardware and literature make likely (`PRIORS`):
there are about half as many constants as rows. It never reads a row of the judged half.
"""

from __future__ import annotations

import argparse
import math
import statistics

from grpo_megatron.plan.timing.constants import Constants, shipped_constants
from grpo_megatron.plan.timing.published import (
    PublishedRow,
    error_of,
    predict,
    published_times,
)

PRIORS = {
    "matrix_efficiency": 0.65,
    "expert_efficiency": 0.4,
    "attention_efficiency": 0.5,
    "flash2_blackwell_share": 0.25,
    "activation_passes": 4.0,
    "logit_passes": 12.0,
    "layer_launch_s": 4e-4,
    "moe_layer_launch_s": 1.5e-3,
    "arm_host_slowdown": 1.5,
    "network_efficiency": 0.5,
    "decode_efficiency": 0.6,
    "decode_layer_s": 4e-5,
    "decode_sequence_s": 2e-5,
    "eager_layer_s": 1e-3,
    "far_reduce_latency_s": 1e-4,
    "step_overhead_s": 8.0,
}
"""Likely values, and where the fit begins."""
LIMITS = {
    "matrix_efficiency": 0.85,
    "expert_efficiency": 0.8,
    "attention_efficiency": 0.8,
    "decode_efficiency": 0.9,
    "network_efficiency": 0.9,
}
"""What cannot be more."""
PENALTY = 0.01
"""Of a constant twice or half as large as its prior."""
HUBER = 0.3
"""Logarithm of an error from which on it counts linearly."""
ROUNDS = 40


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--fit", action="store_true", help="fit the constants again")
    chosen = arguments.parse_args()
    constants = shipped_constants()
    if chosen.fit:
        constants = fit(constants)
        for name in PRIORS:
            print(f"{name} = {constants[name]:.4g}")
        print()
    show(constants)


def show(constants: Constants) -> None:
    """Print every row, then each half's median and worst error."""
    print("half\terror\tpredicted_s\tpublished_s\twhat\tconfiguration")
    for half in ("fitted", "judged"):
        found = []
        for row in published_times().rows:
            if row.half == half:
                found += print_row(row, constants)
        print(
            f"{half}: {len(found)} times, median error {statistics.median(found):.1%}, "
            f"worst {max(found):.1%}"
        )


def print_row(row: PublishedRow, constants: Constants) -> list[float]:
    """Print a row's times; return their errors."""
    found = []
    predicted = predict(row, constants)
    for what, seconds in row.seconds.items():
        error = error_of(predicted[what], seconds)
        sign = "+" if predicted[what] > seconds else "-"
        columns = (
            row.half,
            f"{sign}{error:.1%}",
            f"{predicted[what]:.1f}",
            f"{seconds:g}",
            what,
            row.name,
        )
        print("\t".join(columns))
        found.append(error)
    return found


def fit(constants: Constants) -> Constants:
    """Return the constants that the fitted half is best predicted with: each in turn is raised or
    lowered by a factor that shrinks where nothing helps."""
    rows = [row for row in published_times().rows if row.half == "fitted"]
    values = dict(PRIORS)
    factors = dict.fromkeys(values, 1.25)
    best = loss(rows, constants, values)
    for _ in range(ROUNDS):
        for name in values:
            for factor in (factors[name], 1 / factors[name]):
                tried = {**values, name: min(values[name] * factor, LIMITS.get(name, math.inf))}
                found = loss(rows, constants, tried)
                if found < best - 1e-9:
                    best, values = found, tried
                    break
            else:
                factors[name] = math.sqrt(factors[name])
    rounded = {name: float(f"{value:.3g}") for name, value in values.items()}
    return constants.with_values(rounded, "fitted", "fitted just now")


def loss(rows: list[PublishedRow], constants: Constants, values: dict[str, float]) -> float:
    """Return the mean Huber loss of log errors and the penalty."""
    tried = constants.with_values(values, "fitted", "tried")
    total = 0.0
    count = 0
    for row in rows:
        predicted = predict(row, tried)
        for what, seconds in row.seconds.items():
            total += huber(math.log(predicted[what] / seconds))
            count += 1
    penalty = 0.0
    for name, value in values.items():
        penalty += PENALTY * (math.log(value / PRIORS[name]) / math.log(2)) ** 2
    return total / count + penalty / len(values)


def huber(error: float) -> float:
    """Return the square of a small error, and a line beyond."""
    size = abs(error)
    if size <= HUBER:
        return size**2 / 2
    return HUBER * (size - HUBER / 2)


if __name__ == "__main__":
    main()
