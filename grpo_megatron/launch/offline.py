"""A trainer without engines, at any layout, on what a run recorded: for `replay`, `mismatch`."""

import asyncio
import json
import math
import shlex
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path

from grpo_megatron.batching.manifest import is_recorded, read_manifest
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.history import settings_of_step
from grpo_megatron.config.loader import ResolvedConfig, read_resolved, write_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import starting_steps, steps_in
from grpo_megatron.controller.trainer_link import RunState, TrainerLink
from grpo_megatron.errors import CheckpointError, DataError, TrainerError
from grpo_megatron.files import clear_directory
from grpo_megatron.launch.processes import ChildProcess, stop_all
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import metrics_so_far
from grpo_megatron.trainer.requests import (
    Answer,
    FindCorruptFiles,
    LoadCheckpoint,
    Request,
    SaveCheckpoint,
    SnapshotReference,
    Train,
    TrainReport,
)

TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2}
"""By precision, how far a step that is computed again may be from what was recorded, for another
layout adds in another order: of the loss by the sum of its absolute terms, of a gradient norm by
itself, of log-probs by the largest of them."""
_NOT_TRAINED = {"telemetry", "gates", "watch", "checkpoint"}
"""Tables of a recipe that change nothing of what ranks compute."""


def recorded_steps(run_dir: RunDir) -> list[int]:
    """List the steps in the store that can be computed again: every step from a start on is
    there."""
    stored = {step for step, directory in steps_in(run_dir.store) if is_recorded(directory)}
    if not stored or not run_dir.config.exists():
        return []
    found = set()
    for start in _starts(run_dir):
        step = start
        while step in stored:
            found.add(step)
            step += 1
    return sorted(found)


def choose_step(run_dir: RunDir, step: int | None) -> int:
    """Return `step`, by default the newest; DataError where it cannot be computed again."""
    steps = recorded_steps(run_dir)
    if not steps:
        raise _no_step(run_dir)
    if step is None:
        return steps[-1]
    if step not in steps:
        near = min(steps, key=lambda s: abs(s - step))
        shown = [str(known) for known in steps]
        if len(shown) >= 9:
            shown = [*shown[:4], "…", *shown[-4:]]
        raise DataError(
            f"step {step} cannot be computed again; these can: {', '.join(shown)}",
            where=str(run_dir.root),
            remedy="take " + shlex.quote(f"{run_dir.root}@{near}"),
        )
    return step


def _no_step(run_dir: RunDir) -> DataError:
    """Say why a run has no step that can be computed again."""
    if run_dir.config.exists():
        config = read_resolved(run_dir.config).config
        if not config.trains:
            return DataError(
                f"a run of kind {config.kind} trains nothing, and records no steps",
                where=str(run_dir.config),
                remedy="name a run that trains",
            )
    if not metrics_so_far(run_dir.metrics):
        return DataError(
            "no step of this run is trained yet",
            where=str(run_dir.metrics),
            remedy="wait for the first one (`grpo-megatron status` shows how far the run is)",
        )
    return DataError(
        "no recorded step of this run has its checkpoint any more",
        where=str(run_dir.store),
        remedy="raise checkpoint.keep and checkpoint.keep_steps, which retain them",
    )


class OfflineTrainer:
    """Trainer ranks that compute a run's recorded steps, each with the settings that trained it and
    `overrides` on top; the run itself is not touched.

    scratch: a directory of the ranks' own."""

    def __init__(self, run_dir: RunDir, overrides: Sequence[str], scratch: RunDir):
        self.run_dir = run_dir
        self.scratch = scratch
        self._overrides = overrides
        self._resolved: ResolvedConfig | None = None
        self._children: Sequence[ChildProcess] = ()
        self._link: TrainerLink | None = None

    @property
    def config(self) -> RunConfig:
        """With which the ranks compute now; they were started by `go_to`."""
        assert self._resolved is not None
        return self._resolved.config

    async def call(self, request: Request[Answer]) -> Answer:
        """Have the ranks execute `request`.

        Raises TrainerError with the log's last lines when a rank dies."""
        assert self._link is not None
        answer = asyncio.ensure_future(self._link.call(request))
        try:
            while True:
                done, _ = await asyncio.wait([answer], timeout=0.2)
                if done:
                    return answer.result()
                self._raise_if_died()
        finally:
            answer.cancel()

    def _raise_if_died(self) -> None:
        for child in self._children:
            if child.exit_code:
                raise TrainerError(str(child.end()), where=str(child.log))

    async def train_again(self, step: int, state: RunState) -> TrainReport:
        """Train a recorded step with the decisions that were recorded."""
        request = Train(
            directory=self.store(step),
            first_update=state.updates,
            num_updates=self.config.num_steps * self.config.batch.updates_per_step,
            state=state.objective,
            replayed=True,
        )
        return await self.call(request)

    async def go_to(self, step: int, *, settings_of: int | None = None) -> RunState:
        """Bring weights, optimizer and references to where they were before `step`. The ranks have
        the settings of step `settings_of` then, by default those of `step`.

        Raises ConfigError where settings of a step on the way cannot be used any more,
        CheckpointError where the checkpoint to begin with is damaged."""
        if settings_of is None:
            settings_of = step
        starts = _starts(self.run_dir)
        start = max(known for known in starts if known <= step)
        has_checkpoint = start in complete_steps(self.run_dir.checkpoints)
        settings = {}
        for number in {*range(start, step), start, settings_of}:
            settings[number] = self._settings(number)
        begins_with = start
        if start == step and has_checkpoint:  # which any settings of the run can load
            begins_with = settings_of
        await self._begin(settings[begins_with], loads=has_checkpoint)
        state = await self._start_at(start, has_checkpoint=has_checkpoint)
        for earlier in range(start, step):
            state = await self._go_on_with(settings[earlier], state, start)
            updates = state.updates
            objective = state.objective
            if not read_manifest(self.store(earlier)).is_skipped:
                report = await self.train_again(earlier, state)
                updates = updates + report.updates
                objective = report.state
            state = replace(state, step=earlier + 1, updates=updates, objective=objective)
        return await self._go_on_with(settings[settings_of], state, start)

    def _settings(self, step: int) -> ResolvedConfig:
        return resolve_run(settings_of_step(self.run_dir, step), self._overrides)

    async def _start_at(self, start: int, *, has_checkpoint: bool) -> RunState:
        if has_checkpoint:
            directory = self.run_dir.step_checkpoint(start).absolute()
            await self._refuse_damaged(directory)
            return RunState(**await self.call(LoadCheckpoint(directory)))
        # the ranks have read the weights that the run was given
        await self.call(SnapshotReference())
        return RunState(step=0, updates=0, sampler={}, heldout_before=math.nan, seconds=0.0)

    async def _refuse_damaged(self, checkpoint: Path) -> None:
        """Raise CheckpointError where its files are not as they were written: with other numbers
        nothing is computed again."""
        corrupt_files = await self.call(FindCorruptFiles(checkpoint))
        if corrupt_files:
            raise CheckpointError(
                f"the checkpoint that this step is computed from is damaged: {corrupt_files[0]}",
                where=str(checkpoint),
                remedy="restore it from a backup, or take a step before it; without its directory, "
                "the step is computed from the checkpoint before it",
            )

    async def _go_on_with(self, resolved: ResolvedConfig, state: RunState, start: int) -> RunState:
        """Have ranks with other settings go on, as in the run: by a checkpoint, here in scratch.
        start: the step that the ranks began with, whose checkpoint may name a reference."""
        if _trains_alike(resolved.config, self.config):
            return state
        checkpoint = self.scratch.step_checkpoint(state.step)
        self._link_reference_of(start)
        await self.call(SaveCheckpoint(directory=checkpoint, state=asdict(state)))
        await self._begin(resolved, loads=True)
        return RunState(**await self.call(LoadCheckpoint(checkpoint)))

    def _link_reference_of(self, start: int) -> None:
        """Let a reference that lies beside the run's checkpoint also lie beside those in scratch,
        which may name it."""
        record = self.run_dir.step_checkpoint(start) / "complete.json"
        name = None
        if record.exists():
            name = json.loads(record.read_text()).get("reference")
        if not name:
            return
        link = self.scratch.checkpoints / name
        if not link.exists():
            link.symlink_to((self.run_dir.checkpoints / name).absolute())

    def store(self, step: int) -> Path:
        """Absolute path of a recorded step of the run."""
        return self.run_dir.step_store(step).absolute()

    async def _begin(self, resolved: ResolvedConfig, *, loads: bool) -> None:
        """Start ranks with these settings, in the place of those that there are. loads: they are to
        load a checkpoint next."""
        await self.end()
        shutil.rmtree(self.scratch.endpoints, ignore_errors=True)  # of ranks that have ended
        self.scratch.endpoints.mkdir()
        of_ranks = resolved
        if loads:
            config = resolved.config.after_a_checkpoint
            of_ranks = resolved.model_copy(update={"config": config})
        write_resolved(self.scratch.config, of_ranks)
        self._resolved = resolved
        self._children = LocalProcesses(resolved.config, self.scratch).trainers()
        self._link = TrainerLink(resolved.config.trainer.command_timeout_s)
        await self._link.listen(self.scratch.endpoints / "controller.json")
        for child in self._children:
            child.start()

    async def end(self) -> None:
        """Tell the ranks to end, if there are any, and wait until they have."""
        try:
            if self._link is not None:
                await self._link.close()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """End the ranks, whatever they are doing."""
        await asyncio.to_thread(stop_all, self._children)
        self._children = ()
        self._link = None


@asynccontextmanager
async def offline_trainer(
    run_dir: RunDir, overrides: Sequence[str], name: str
) -> AsyncIterator[OfflineTrainer]:
    """Make a trainer in a scratch directory of the run, which is removed at the end; its ranks
    start where it goes to a step. After an error the directory stays, with their logs.

    Raises RunLockedError where another process computes under this name."""
    scratch = RunDir(run_dir.root.absolute() / "offline" / name)
    with run_lock(scratch):
        clear_directory(scratch.root, kept=(scratch.lock,))
        scratch.create()
        if run_dir.model.exists():
            scratch.model.symlink_to(run_dir.model.absolute())
        trainer = OfflineTrainer(run_dir, overrides, scratch)
        try:
            yield trainer
            await trainer.end()
        finally:
            await trainer.stop()
        shutil.rmtree(scratch.root, ignore_errors=True)


def _trains_alike(one: RunConfig, other: RunConfig) -> bool:
    """Whether ranks with either configuration train the same."""
    return one.model_dump(exclude=_NOT_TRAINED) == other.model_dump(exclude=_NOT_TRAINED)


def _starts(run_dir: RunDir) -> list[int]:
    """Return the steps from which the run can be computed again, ascending: by the settings that
    trained its first step, for a cold start may have been taken out of the recipe since."""
    first = read_resolved(settings_of_step(run_dir, 0)).config
    return starting_steps(first, run_dir)
