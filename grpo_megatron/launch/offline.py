"""A trainer without engines, at any layout, on what a run recorded: for `replay`, `mismatch`."""

import asyncio
import math
import shlex
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_megatron.batching.manifest import is_recorded, read_manifest
from grpo_megatron.checkpoints.retention import complete_steps
from grpo_megatron.config.loader import read_resolved, write_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import starting_steps, steps_in
from grpo_megatron.controller.trainer_link import RunState, TrainerLink
from grpo_megatron.errors import DataError, TrainerError
from grpo_megatron.launch.processes import ChildProcess, stop_all
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.requests import (
    Answer,
    LoadCheckpoint,
    Request,
    SnapshotReference,
    Train,
    TrainReport,
)


def recorded_steps(run_dir: RunDir) -> list[int]:
    """List the steps in the store that can be computed again: every step from a start on is
    there."""
    stored = {step for step, directory in steps_in(run_dir.store) if is_recorded(directory)}
    if not stored or not run_dir.config.exists():
        return []
    found = set()
    for start in starting_steps(read_resolved(run_dir.config).config, run_dir):
        step = start
        while step in stored:
            found.add(step)
            step += 1
    return sorted(found)


def choose_step(run_dir: RunDir, step: int | None) -> int:
    """Return `step`, by default the newest; DataError where it cannot be computed again."""
    steps = recorded_steps(run_dir)
    if not steps:
        raise DataError(
            "no recorded step of this run has its checkpoint any more",
            where=str(run_dir.store),
            remedy="raise checkpoint.keep and checkpoint.keep_steps, which retain them",
        )
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


@dataclass
class OfflineTrainer:
    """Trainer ranks that compute a run's recorded steps; the run itself is not touched."""

    config: RunConfig
    run_dir: RunDir
    scratch: RunDir
    children: Sequence[ChildProcess]
    link: TrainerLink

    async def call(self, request: Request[Answer]) -> Answer:
        """Have the ranks execute `request`.

        Raises TrainerError with the log's last lines when a rank dies."""
        answer = asyncio.ensure_future(self.link.call(request))
        try:
            while True:
                done, _ = await asyncio.wait([answer], timeout=0.2)
                if done:
                    return answer.result()
                self._raise_if_died()
        finally:
            answer.cancel()

    def _raise_if_died(self) -> None:
        for child in self.children:
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

    async def go_to(self, step: int) -> RunState:
        """Bring weights, optimizer and references to where they were before `step`."""
        starts = starting_steps(self.config, self.run_dir)
        start = max(known for known in starts if known <= step)
        state = await self._start_at(start)
        for earlier in range(start, step):
            updates = state.updates
            objective = state.objective
            if not read_manifest(self.store(earlier)).is_skipped:
                report = await self.train_again(earlier, state)
                updates = updates + report.updates
                objective = report.state
            state = replace(state, step=earlier + 1, updates=updates, objective=objective)
        return state

    async def _start_at(self, start: int) -> RunState:
        if start in complete_steps(self.run_dir.checkpoints):
            directory = self.run_dir.step_checkpoint(start).absolute()
            return RunState(**await self.call(LoadCheckpoint(directory)))
        # the ranks have read the weights that the run was given
        await self.call(SnapshotReference())
        return RunState(step=0, updates=0, sampler={}, heldout_before=math.nan, seconds=0.0)

    def store(self, step: int) -> Path:
        """Absolute path of a recorded step of the run."""
        return self.run_dir.step_store(step).absolute()


@asynccontextmanager
async def offline_trainer(
    run_dir: RunDir, overrides: Sequence[str], name: str
) -> AsyncIterator[OfflineTrainer]:
    """Start trainer ranks in a scratch directory of the run, which is removed at the end."""
    resolved = resolve_run(run_dir.config, overrides)
    config = resolved.config
    scratch = RunDir(run_dir.root.absolute() / "offline" / name)
    shutil.rmtree(scratch.root, ignore_errors=True)
    scratch.create()
    write_resolved(scratch.config, resolved)
    if run_dir.model.exists():
        scratch.model.symlink_to(run_dir.model.absolute())
    children = LocalProcesses(config, scratch).trainers()
    link = TrainerLink(config.trainer.command_timeout_s)
    try:
        await link.listen(scratch.endpoints / "controller.json")
        for child in children:
            child.start()
        yield OfflineTrainer(config, run_dir, scratch, children, link)
        await link.close()
    finally:
        await asyncio.to_thread(stop_all, children)
    shutil.rmtree(scratch.root, ignore_errors=True)
