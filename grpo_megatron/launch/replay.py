"""`grpo-megatron replay`: a recorded step, trained again elsewhere."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.errors import DataError, MismatchError
from grpo_megatron.launch.offline import choose_step, offline_trainer
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics

# of the loss by the sum of its absolute terms; of the gradient norm by itself
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
_OTHER_EACH_TIME = ("time/", "throughput/", "trainer/", "canary/", "evaluation/", "replay/")


def replay_step(path: Path, step: int | None, overrides: Sequence[str]) -> Iterator[str]:
    """Lines of a table; MismatchError where loss or gradient norm are not reproduced."""
    run_dir = RunDir(path)
    step = choose_step(run_dir, step)
    recorded = next((m for m in read_metrics(run_dir.metrics) if m["step"] == step), None)
    if recorded is None:
        raise DataError(
            f"metrics.jsonl has no step {step}",
            where=str(run_dir.metrics),
            remedy="the step was sampled, but its training was not recorded",
        )
    yield f"replaying step {step} of {path}"
    found, precision = asyncio.run(_replay(run_dir, step, overrides))
    yield from compare(recorded, found)
    if problems := disagreements(recorded, found, TOLERANCE[precision]):
        raise MismatchError(
            "; ".join(problems),
            where=f"{path}@{step}",
            remedy="another layout must give the same numbers: look at the "
            "metrics above, the first that differs is nearest the cause",
        )
    yield f"the step is reproduced (tolerance {TOLERANCE[precision]:g})"


async def _replay(
    run_dir: RunDir, step: int, overrides: Sequence[str]
) -> tuple[dict[str, float], str]:
    async with offline_trainer(run_dir, overrides, f"replay-{step}") as trainer:
        state = await trainer.go_to(step)
        report = await trainer.train_again(step, state)
        return report.metrics, trainer.config.trainer.precision


def compare(recorded: Mapping[str, Any], found: Mapping[str, float]) -> Iterator[str]:
    """A line per metric that both have; per-layer ones only where they differ."""
    names = [n for n in found if n in recorded and not n.startswith(_OTHER_EACH_TIME)]
    width = max(map(len, names), default=0)
    for name in names:
        before = recorded[name]
        now = found[name]
        change = abs(now - before)
        if "/layer_" not in name or change > 1e-6 * max(abs(before), 1e-3):
            yield f"  {name:<{width}}  {before:>14.8g}  {now:>14.8g}  {change:>9.2g}"
    changed = found.get("replay/decisions_changed", 0.0)
    yield f"  tokens on the other side of a clip or mask bound now: {changed:.3%}, held as recorded"
    flips = {
        n.rpartition("_")[2]: v
        for n, v in found.items()
        if n.startswith("routing/rollout_token_flip_rate/") and v > 0
    }
    if flips:
        where = ", ".join(f"layer {layer} {rate:.3%}" for layer, rate in flips.items())
        yield f"  tokens that the live router would send elsewhere now: {where}"


def disagreements(
    recorded: Mapping[str, Any], found: Mapping[str, float], tolerance: float
) -> list[str]:
    out = []
    for name, scale in (("loss/value", "loss/abs_terms"), ("grad/norm", "grad/norm")):
        size = abs(recorded.get(scale, recorded[name]))
        if not abs(found[name] - recorded[name]) <= tolerance * size:
            out.append(f"{name} was {recorded[name]:.8g}, is {found[name]:.8g}")
    return out
