"""`grpo-megatron replay`: a recorded step, trained again elsewhere."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.errors import DataError, MismatchError
from grpo_megatron.launch.offline import TOLERANCE, choose_step, offline_trainer
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics

_OTHER_EACH_TIME = (
    "time/",
    "idle/",
    "throughput/",
    "trainer/",
    "canary/",
    "evaluation/",
    "replay/",
)


def replay_step(path: Path, step: int | None, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a table.

    Raises MismatchError where loss or gradient norm are not reproduced; DataError where the step
    cannot be computed again, or its training was not recorded."""
    run_dir = RunDir(path)
    step = choose_step(run_dir, step)
    recorded = _metrics_of(run_dir, step)
    yield f"replaying step {step} of {path}"
    found, precision = asyncio.run(_replay(run_dir, step, overrides))
    yield from compare(recorded, found)
    problems = disagreements(recorded, found, TOLERANCE[precision])
    if problems:
        raise MismatchError(
            "; ".join(problems),
            where=f"{path}@{step}",
            remedy="another layout must give the same numbers: look at the "
            "metrics above, the first that differs is nearest the cause",
        )
    yield f"the step is reproduced (tolerance {TOLERANCE[precision]:g})"


def _metrics_of(run_dir: RunDir, step: int) -> Mapping[str, Any]:
    for record in read_metrics(run_dir.metrics):
        if record["step"] == step:
            return record
    raise DataError(
        f"metrics.jsonl has no step {step}",
        where=str(run_dir.metrics),
        remedy="the step was sampled, but its training was not recorded",
    )


async def _replay(
    run_dir: RunDir, step: int, overrides: Sequence[str]
) -> tuple[dict[str, float], str]:
    async with offline_trainer(run_dir, overrides, f"replay-{step}") as trainer:
        state = await trainer.go_to(step)
        report = await trainer.train_again(step, state)
        return report.metrics, trainer.config.trainer.precision


def compare(recorded: Mapping[str, Any], found: Mapping[str, float]) -> Iterator[str]:
    """Yield a line per metric that both have, below a line with the names of the columns; per-layer
    ones only where they differ. recorded: None was not finite."""
    names = []
    for name in found:
        if name in recorded and not name.startswith(_OTHER_EACH_TIME):
            names.append(name)
    width = max(map(len, ["metric", *names]))
    if names:
        yield f"  {'metric':<{width}}  {'recorded':>14}  {'now':>14}  {'change':>9}"
    for name in names:
        before = recorded[name]
        now = found[name]
        if before is None:
            yield f"  {name:<{width}}  {'not finite':>14}  {now:>14.8g}  {'–':>9}"
            continue
        change = abs(now - before)
        if "/layer_" not in name or change > 1e-6 * max(abs(before), 1e-3):
            yield f"  {name:<{width}}  {before:>14.8g}  {now:>14.8g}  {change:>9.2g}"
    changed = found.get("replay/decisions_changed", 0.0)
    if found.get("replay/decisions_recorded", 1.0) < 1:
        yield "  which tokens are clipped or masked was not recorded, or is lost: decided anew"
    else:
        yield (
            f"  tokens on the other side of a clip or mask bound now: {changed:.3%}, held as "
            "recorded"
        )
    flips = []
    for name, rate in found.items():
        if name.startswith("routing/rollout_token_flip_rate/") and rate > 0:
            layer = name.rpartition("_")[2]
            flips.append(f"layer {layer} {rate:.3%}")
    if flips:
        where = ", ".join(flips)
        yield f"  tokens that the live router would send elsewhere now: {where}"


_COMPARED = {
    "loss/value": "loss/abs_terms",
    "grad/norm": "grad/norm",
    "critic/loss": "critic/loss",
    "critic/grad_norm": "critic/grad_norm",
}
"""What a replay must reproduce, and what a difference is relative to."""


def disagreements(
    recorded: Mapping[str, Any], found: Mapping[str, float], tolerance: float
) -> list[str]:
    """Say what of loss and gradient norm, of policy and critic, differs by more than `tolerance`,
    relative to the sum of the loss's absolute terms and to the norm itself; empty where nothing
    does."""
    problems = []
    for name, scale in _COMPARED.items():
        if name not in recorded and name not in found:  # without a critic, or while it warms up
            continue
        if name not in recorded or name not in found:
            problems.append(f"{name} was {recorded.get(name)}, is {found.get(name)}")
            continue
        size = abs(recorded.get(scale, recorded[name]))
        if not abs(found[name] - recorded[name]) <= tolerance * size:
            problems.append(f"{name} was {recorded[name]:.8g}, is {found[name]:.8g}")
    return problems
