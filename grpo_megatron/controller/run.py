"""One run from start to end: cold start, RL, held-out accuracy before and after, export."""

import json
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from typing import Any

from grpo_megatron.config.gates import parse_gate
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.cold_start import ColdStart
from grpo_megatron.controller.display import show
from grpo_megatron.controller.evaluation import evaluate, greedy_accuracy
from grpo_megatron.controller.recorder import drop_disconnected
from grpo_megatron.controller.rejection import sample_dataset
from grpo_megatron.controller.restoring import newest_whole
from grpo_megatron.controller.rl_loop import RLLoop
from grpo_megatron.controller.session import Session, open_session
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.errors import GateError
from grpo_megatron.files import write_atomically
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import make_mirrors
from grpo_megatron.trainer.requests import (
    ExportModel,
    LoadCheckpoint,
    SaveCheckpoint,
    TakeReference,
)


async def run(config: RunConfig, run_dir: RunDir, on_start: Callable) -> bool:
    """False: it was told to stop and can be resumed. `on_start` gets the event that stops RL."""
    started = time.monotonic()
    async with open_session(config, run_dir) as session:
        _tell_unused(config)
        state = await _restore(session)
        if state is None:
            state = await _begin(session, started, on_start)
        if state is None:
            show("message", text=f"stopped in the cold start; grpo-megatron resume {run_dir.root}")
            return False
        began = time.monotonic() - state.seconds  # earlier attempts count
        if config.trains:
            state = await _train(session, state, on_start)
            if state.step < config.num_steps:
                show(
                    "message",
                    text=f"stopped after {state.step} steps; grpo-megatron resume {run_dir.root}",
                )
                return False
            num_bytes = await session.trainer.call(ExportModel(run_dir.export))
            show(
                "message",
                text=f"exported {num_bytes / 1e9:.3f} GB, read back whole: {run_dir.export}",
            )
        await session.publisher.ensure_version(state.step)
        made = await sample_dataset(session) if config.kind == "rejection_sample" else {}
        results = await evaluate(session, session.splits.heldout, config.evaluation.num_samples)
        seconds = time.monotonic() - began
        after = results["all"].get("accuracy", float("nan"))
        _conclude(
            session,
            {
                "eval": results,
                "dataset": made,
                "seconds": seconds,
                "before": state.heldout_before if config.trains else None,
                "steps": state.step,
                "accelerator_hours": config.num_devices * seconds / 3600,
            },
        )
        session.event("finished", before=state.heldout_before, after=after, seconds=seconds)
        before = f"before {state.heldout_before:.2f} after " if config.trains else ""
        show("result", text=f"held-out accuracy {before}{after:.2f} in {seconds:.0f} s")
        return True


def _tell_unused(config: RunConfig) -> None:
    """Say which setting of an older recipe decides nothing any more."""
    default = ObjectiveConfig.model_fields["correct_threshold"].default
    if config.objective.correct_threshold != default:
        show(
            "message",
            text="objective.correct_threshold is not used in training: the component "
            "domains.*.accuracy and its accuracy_threshold say what is correct",
        )


async def _train(session: Session, state: RunState, on_start: Callable) -> RunState:
    config = session.config
    run_dir = session.run_dir
    with (
        closing(MetricsWriter(run_dir)) as metrics,
        closing(
            make_mirrors(config.telemetry, run_dir, config.name, config.model_dump(mode="json"))
        ) as mirrors,
    ):
        metrics.truncate_after(state.step - 1)
        loop = RLLoop(session, state, metrics, mirrors)
        on_start(session.stopping)
        state = await loop.run()
    spent = ", ".join(f"{name} {s:.0f}" for name, s in loop.phase_seconds.most_common())
    show("message", text=f"seconds by phase of {state.step} RL steps: {spent}")
    return state


def _conclude(session: Session, result: dict[str, Any]) -> None:
    """Write `result.json`; GateError where it misses a gate of the recipe."""
    write_atomically(session.run_dir.result, json.dumps(result, indent=1))
    if closed := [
        f"{gate.text} (seen: {seen})"
        for gate in map(parse_gate, session.config.gates)
        if (seen := gate.check(result)) is not None
    ]:
        raise GateError(
            "; ".join(closed),
            where="gates",
            remedy=f"train more, or lower the gate; the weights are in {session.run_dir.export}",
        )


async def _begin(session: Session, started: float, on_start: Callable) -> RunState | None:
    """Prepare step 0; None: told to stop in the cold start."""
    cold_start = None
    if session.config.cold_start is not None:
        cold_start = ColdStart(session, session.config.cold_start, started)
        on_start(session.stopping)
    await session.publisher.publish(0)
    if cold_start and not await cold_start.run():
        return None
    await session.trainer.call(TakeReference())
    before = float("nan")
    if session.config.trains:
        show(
            "message",
            text=f"answering {len(session.splits.heldout)} held-out prompts, before training",
        )
        before = await greedy_accuracy(session, session.splits.heldout)
        show("message", text=f"held-out accuracy before training {before:.3f}")
    seconds = cold_start.seconds if cold_start else time.monotonic() - started
    state = RunState(0, 0, {}, before, seconds)
    if cold_start:  # not to be repeated by a resume
        directory = session.run_dir.step_checkpoint(0)
        await session.trainer.call(SaveCheckpoint(directory=directory, state=asdict(state)))
        cold_start.forget()
    return state


async def _restore(session: Session) -> RunState | None:
    """Go on after the newest checkpoint that is whole; None without any."""
    run_dir = session.run_dir
    directory = await newest_whole(session, run_dir.checkpoints)
    if directory is None:
        return None
    state = RunState(**await session.trainer.call(LoadCheckpoint(directory)))
    drop_disconnected(run_dir.store, state.step)
    await session.publisher.publish(state.step)
    show("message", text=f"resumed after step {state.step}")
    session.event("resumed", step=state.step)
    return state
