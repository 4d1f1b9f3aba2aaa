"""Recorded steps are computed again with the settings that trained them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from grpo_megatron.config.history import record_first_settings, record_settings
from grpo_megatron.config.loader import read_resolved, write_resolved
from grpo_megatron.errors import CheckpointError, DataError, RunLockedError
from grpo_megatron.launch import offline
from grpo_megatron.launch.offline import offline_trainer, recorded_steps
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.requests import (
    FindCorruptFiles,
    LoadCheckpoint,
    SaveCheckpoint,
    Train,
    TrainReport,
)

DEMO = "demo/gspo-moe-cpu"


class Ranks:
    """What replaces trainer ranks and the connection to them: notes what they are asked, and with
    which learning rate they were started."""

    def __init__(self) -> None:
        self.asked: list[tuple[float, str, str]] = []
        self.num_updates: list[int] = []
        self.has_reference: list[bool] = []
        self.corrupt_files: list[str] = []
        self.verified: list[str] = []
        self.adapters: list[Path | None] = []
        self._rate = 0.0

    def __call__(self, timeout_s: float) -> Ranks:
        """Be a connection."""
        return self

    async def listen(self, path: Path) -> None:
        config = read_resolved(path.parent.parent / "config.json").config
        self._rate = config.optimizer.lr
        if config.lora is not None:
            self.adapters.append(config.lora.path)

    async def close(self) -> None:
        pass

    async def call(self, request):
        directory = getattr(request, "directory", None)
        where = "" if directory is None else directory.name
        if isinstance(request, FindCorruptFiles):
            self.verified.append(where)
            return self.corrupt_files
        self.asked.append((self._rate, type(request).__name__, where))
        if isinstance(request, Train):
            self.num_updates.append(request.num_updates)
            number = int(where.removeprefix("step_"))
            return TrainReport(metrics={}, updates=2, tokens=0, state={"trained": number})
        if isinstance(request, SaveCheckpoint):
            directory.mkdir()
            (directory / "complete.json").write_text(json.dumps(request.state))
        if isinstance(request, LoadCheckpoint):
            record = json.loads((directory / "complete.json").read_text())
            reference = record.pop("reference", None)
            if reference:
                self.has_reference.append(directory.with_name(reference).exists())
            return record
        return None


@pytest.fixture
def ranks(monkeypatch) -> Ranks:
    found = Ranks()
    monkeypatch.setattr(offline, "TrainerLink", found)
    no_processes = SimpleNamespace(trainers=list)
    monkeypatch.setattr(offline, "LocalProcesses", lambda config, run_dir: no_processes)
    manifest = SimpleNamespace(is_skipped=False)
    monkeypatch.setattr(offline, "read_manifest", lambda directory: manifest)
    return found


def set_recipe(run_dir: RunDir, *flags: str) -> None:
    write_resolved(run_dir.config, resolve(DEMO, ["cold_start=null", *flags]))


def make_run(root: Path, num_steps: int, *flags: str) -> RunDir:
    """A run with recorded steps and no checkpoint."""
    run_dir = RunDir(root)
    run_dir.create()
    for step in range(num_steps):
        run_dir.step_store(step).mkdir()
        (run_dir.step_store(step) / "manifest.json").write_text("{}")
    set_recipe(run_dir, *flags)
    return run_dir


def add_checkpoint(run_dir: RunDir, step: int, **record: object) -> None:
    run_dir.step_checkpoint(step).mkdir()
    state = {"step": step, "updates": 2 * step, "sampler": {}, "heldout_before": 0.0}
    text = json.dumps({**state, "seconds": 0.0, **record})
    (run_dir.step_checkpoint(step) / "complete.json").write_text(text)


def go_to(run_dir: RunDir, step: int, *overrides: str, settings_of: int | None = None):
    async def main():
        async with offline_trainer(run_dir, overrides, "test") as trainer:
            state = await trainer.go_to(step, settings_of=settings_of)
            return state, trainer.config

    state, config = asyncio.run(main())
    assert not (run_dir.root / "offline" / "test").exists()
    return state, config


def test_a_step_before_a_resume_has_its_own_settings(tmp_path, ranks):
    run_dir = make_run(tmp_path, 6, "num_steps=3", "optimizer.lr=1e-3")
    record_settings(run_dir, 0)
    set_recipe(run_dir, "num_steps=6", "optimizer.lr=2e-3")
    record_settings(run_dir, 3)
    add_checkpoint(run_dir, 3)
    state, config = go_to(run_dir, 2)
    assert (state.step, state.updates, state.objective) == (2, 4, {"trained": 1})
    assert config.num_steps == 3
    trained = [(1e-3, "Train", f"step_00000{step}") for step in (0, 1)]
    assert ranks.asked == [(1e-3, "SnapshotReference", ""), *trained]
    assert set(ranks.num_updates) == {3 * config.batch.updates_per_step}
    ranks.asked.clear()
    state, config = go_to(run_dir, 3)
    assert config.num_steps == 6 and ranks.asked == [(2e-3, "LoadCheckpoint", "step_000003")]
    ranks.asked.clear()
    go_to(run_dir, 2, "optimizer.lr=5e-3")
    assert {rate for rate, _, _ in ranks.asked} == {5e-3}


def test_a_checkpoint_has_the_adapters_that_the_run_began_with(tmp_path, ranks):
    adapters = tmp_path / "adapters"
    run_dir = make_run(tmp_path / "run", 4, "lora.rank=2", f"lora.path={adapters}")
    record_settings(run_dir, 0)
    add_checkpoint(run_dir, 2)
    _, config = go_to(run_dir, 3)
    assert ranks.adapters == [None] and config.lora.path == adapters
    go_to(run_dir, 1)
    assert ranks.adapters == [None, adapters]


def test_every_step_on_the_way_is_trained_with_its_own_settings(tmp_path, ranks):
    """The checkpoint of the resume is gone: ranks with other settings go on from one in scratch,
    beside which the reference lies."""
    run_dir = make_run(tmp_path, 5, "optimizer.lr=1e-3")
    record_settings(run_dir, 0)
    add_checkpoint(run_dir, 1, reference="reference_step_000000")
    (run_dir.checkpoints / "reference_step_000000").mkdir()
    set_recipe(run_dir, "optimizer.lr=2e-3")
    record_settings(run_dir, 3)
    before = sorted(run_dir.checkpoints.rglob("*"))
    state, config = go_to(run_dir, 4)
    assert ranks.asked == [
        (1e-3, "LoadCheckpoint", "step_000001"),
        (1e-3, "Train", "step_000001"),
        (1e-3, "Train", "step_000002"),
        (1e-3, "SaveCheckpoint", "step_000003"),
        (2e-3, "LoadCheckpoint", "step_000003"),
        (2e-3, "Train", "step_000003"),
    ]
    assert (state.step, state.updates, config.optimizer.lr) == (4, 8, 2e-3)
    assert ranks.has_reference == [True] and sorted(run_dir.checkpoints.rglob("*")) == before


def test_settings_that_train_the_same_need_no_other_ranks(tmp_path, ranks):
    run_dir = make_run(tmp_path, 3)
    record_settings(run_dir, 0)
    set_recipe(run_dir, "telemetry.tensorboard=true", "checkpoint.keep=7")
    record_settings(run_dir, 1)
    go_to(run_dir, 2)
    asked = [request for _, request, _ in ranks.asked]
    assert asked == ["SnapshotReference", "Train", "Train"]


def test_samples_of_older_weights_are_measured_with_the_settings_of_their_step(tmp_path, ranks):
    run_dir = make_run(tmp_path, 4, "optimizer.lr=1e-3")
    record_settings(run_dir, 0)
    set_recipe(run_dir, "optimizer.lr=2e-3")
    record_settings(run_dir, 2)
    state, config = go_to(run_dir, 1, settings_of=3)
    assert state.step == 1 and config.optimizer.lr == 2e-3
    assert ranks.asked[:2] == [(1e-3, "SnapshotReference", ""), (1e-3, "Train", "step_000000")]
    assert ranks.asked[-1] == (2e-3, "LoadCheckpoint", "step_000001")


def test_a_run_without_a_record_has_the_settings_of_its_newest_attempt(tmp_path, ranks):
    run_dir = make_run(tmp_path, 3, "optimizer.lr=1e-3")
    _, config = go_to(run_dir, 2)
    assert config.optimizer.lr == 1e-3
    record_first_settings(run_dir)  # it is resumed by this release
    set_recipe(run_dir, "optimizer.lr=2e-3")
    record_settings(run_dir, 2)
    _, config = go_to(run_dir, 1)
    assert config.optimizer.lr == 1e-3


def test_a_cold_start_that_a_resume_took_out_was_there(tmp_path):
    """Weights of step 0 are not those that the run was given."""
    run_dir = make_run(tmp_path, 2)
    write_resolved(run_dir.config, resolve(DEMO))
    record_settings(run_dir, 0)
    assert recorded_steps(run_dir) == []
    set_recipe(run_dir)
    record_settings(run_dir, 1)
    assert recorded_steps(run_dir) == []
    add_checkpoint(run_dir, 0)
    assert recorded_steps(run_dir) == [0, 1]


def test_a_damaged_checkpoint_is_named_before_anything_is_computed(tmp_path, ranks):
    """With its numbers, a whole step would look as if it were not reproduced."""
    run_dir = make_run(tmp_path, 4)
    add_checkpoint(run_dir, 2)
    go_to(run_dir, 3)
    assert ranks.verified == ["step_000002"]
    ranks.asked.clear()
    ranks.corrupt_files = ["step_000002/weights/__0_0.distcp"]
    with pytest.raises(CheckpointError, match=r"weights/__0_0\.distcp") as refused:
        go_to(run_dir, 3)
    assert refused.value.where == str(run_dir.step_checkpoint(2)) and ranks.asked == []
    go_to(run_dir, 1)  # computed from the weights that the run was given


def test_two_at_once_do_not_share_their_scratch(tmp_path, ranks):
    """The later one removed the files of the ranks of the first."""
    run_dir = make_run(tmp_path, 2)

    async def main() -> None:
        async with offline_trainer(run_dir, (), "replay-1") as first:
            await first.go_to(1)
            kept = sorted(first.scratch.root.rglob("*"))
            with pytest.raises(RunLockedError, match="is being written by process"):
                async with offline_trainer(run_dir, (), "replay-1"):
                    pass
            assert sorted(first.scratch.root.rglob("*")) == kept
            async with offline_trainer(run_dir, (), "replay-0") as other:
                await other.go_to(0)

    asyncio.run(main())
    assert list((run_dir.root / "offline").iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "records", "words"),
    [
        (["kind=eval", "num_steps=0", "cold_start=null"], "", "a run of kind eval trains nothing"),
        ([], "", "no step of this run is trained yet"),
        ([], '{"step": 0}\n', "has its checkpoint any more"),
    ],
)
def test_a_run_without_steps_says_why(tmp_path, flags, records, words):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    write_resolved(run_dir.config, resolve(DEMO, flags))
    run_dir.metrics.write_text(records)
    with pytest.raises(DataError, match=words):
        offline.choose_step(run_dir, None)
