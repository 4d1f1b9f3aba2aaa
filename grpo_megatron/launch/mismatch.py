"""`grpo-megatron mismatch`: why trainer and engine disagree about a recorded step."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_megatron.batching.columns import read_columns
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.history import settings_of_step
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError, MismatchError
from grpo_megatron.launch.offline import TOLERANCE, choose_step, offline_trainer, recorded_steps
from grpo_megatron.plan.model_facts import model_facts
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.gap import GapParts, gap_page, split_gap, unlike_recorded
from grpo_megatron.telemetry.metrics import metrics_so_far
from grpo_megatron.trainer.requests import MeasureLogprobDiff


def report_mismatch(
    path: Path, step: int | None, overrides: Sequence[str], page: Path | None, *, by_layer: bool
) -> Iterator[str]:
    """Yield the lines of a table; writes the page with heat maps too.

    Raises DataError where no engine has sampled the step; MismatchError where the largest gap is
    not the one that was recorded when the step was trained: then it was measured at other weights,
    or with other settings."""
    run_dir = RunDir(path)
    step = choose_step(run_dir, step)
    _refuse_dataset(run_dir, step)
    yield f"log-prob gap of step {step} of {path}: engine - trainer with live routing"
    table = SampleTable(run_dir.step_store(step))
    gap, metrics, notes, problem = asyncio.run(_measure(run_dir, step, overrides, table, by_layer))
    yield f"  {'cause':<14}  {'mean':>11}  {'mean |.|':>11}  {'max |.|':>11}"
    for name, *numbers in gap.table():
        yield f"  {name:<14}  " + "  ".join(f"{x:>11.3e}" for x in numbers)
    yield f"  parts add up to the total within {gap.residual:.1e}"
    for layer, values in gap.by_layer.items():
        rate = metrics.get(f"routing/rollout_token_flip_rate/layer_{layer}", 0.0)
        yield (
            f"  routing, layer {layer:<4}  {values.mean():>11.3e}  "
            f"{np.abs(values).mean():>11.3e}  tokens routed elsewhere {rate:.3%}"
        )
    yield from (f"  note: {note}" for note in notes)
    page = page or run_dir.root / f"mismatch-{step}.html"
    page.write_text(gap_page(f"Mismatch of {run_dir.root.name}, step {step}", gap, metrics, notes))
    yield f"heat maps: {page}"
    if problem:
        raise MismatchError(
            problem,
            where=f"{path}@{step}",
            remedy="this is not the gap that the step had: leave out KEY=VALUE that change what "
            "is trained, and see whether replay reproduces the step",
        )


def _refuse_dataset(run_dir: RunDir, step: int) -> None:
    """DataError for a step whose answers are those of a data set."""
    config = read_resolved(settings_of_step(run_dir, step)).config
    if config.uses_dataset:
        raise DataError(
            f"a run of kind {config.kind} trains answers of its data set: no engine has sampled "
            "them, so there are no log-probs to compare with the trainer's",
            where=f"{run_dir.root}@{step}",
            remedy="replay computes the step again; mismatch is for runs that sample",
        )


async def _measure(
    run_dir: RunDir, step: int, overrides: Sequence[str], table: SampleTable, by_layer: bool
) -> tuple[GapParts, dict[str, float], list[str], str]:
    """Return the gap, metrics of its routes, notes on it, and why it is not the recorded one."""
    notes = []

    async def columns(weights_of: int, flags: Sequence[str], layers: bool) -> tuple:
        """Return log-probs by routing, their metrics, the recipe with `flags`."""
        async with offline_trainer(run_dir, flags, f"mismatch-{step}") as trainer:
            state = await trainer.go_to(weights_of, settings_of=step)
            to = trainer.scratch.root / "gaps.safetensors"
            request = MeasureLogprobDiff(
                directory=trainer.store(step), to=to, by_layer=layers, state=state.objective
            )
            metrics = await trainer.call(request)
            logprobs = {}
            for name, values in read_columns(to).items():
                logprobs[name] = np.array(values)  # the file goes with the trainer
            return (logprobs, metrics, trainer.config)

    run, metrics, config = await columns(step, overrides, by_layer)
    problem = _unlike_recorded(run_dir, step, config, run)
    if problem and _may_route_otherwise(config):
        notes.append(f"{problem}; in {config.trainer.precision} live routers may choose otherwise")
        problem = ""
    if not table.route_shapes:
        notes.append(
            "the engine recorded no routes (rollout.record_routes): a routing part cannot "
            "be told from the rest"
        )
    precise = None
    flags = [*overrides, f"trainer.precision={config.rollout.dtype}"]
    if config.rollout.dtype != config.trainer.precision:
        precise, _, _ = await columns(step, flags, False)
    versions: set[int] = set()
    for row in range(len(table)):
        of_policy = table.versions(row)[table.policy_places(row)]
        versions.update(np.unique(of_policy).tolist())
    sampled_by = None
    version = max(versions, default=step)
    if versions not in ({step}, set()):
        there = {*recorded_steps(run_dir), *complete_steps(run_dir.checkpoints)}
        if len(versions) == 1 and version in there:
            sampled_by, _, _ = await columns(version, flags, False)
        else:
            why = "whose checkpoint is gone"
            if len(versions) > 1:
                why = "and only samples of one version are computed again"
            notes.append(
                f"sampled by weight versions {sorted(versions)}, {why}: staleness is within the "
                "rest"
            )
    return (split_gap(run, precise, sampled_by, table.policy_lengths), metrics, notes, problem)


def _unlike_recorded(
    run_dir: RunDir, step: int, config: RunConfig, columns: Mapping[str, np.ndarray]
) -> str:
    """Say where the gap is not the one that the step had in training; empty where it may be, or
    where training did not record any."""
    recorded = None
    for record in metrics_so_far(run_dir.metrics):
        if record["step"] == step:
            recorded = record.get("mismatch/abs_max")
    if recorded is None or config.objective.proximal == "interpolated":  # of others then
        return ""
    when_trained = read_resolved(settings_of_step(run_dir, step)).config
    precisions = (when_trained.trainer.precision, config.trainer.precision)
    tolerance = max(TOLERANCE[precision] for precision in precisions)
    replayed = when_trained.routing.replay == "r3"
    return unlike_recorded(columns, recorded, tolerance, replayed=replayed)


def _may_route_otherwise(config: RunConfig) -> bool:
    """Whether rounding may send tokens to other experts than when the step was trained."""
    is_exact = config.trainer.precision == "float32" or config.routing.replay == "r3"
    return model_facts(config.model).is_moe and not is_exact
