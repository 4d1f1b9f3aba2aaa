"""Processes are killed and stopped at random moments, and the run is resumed: at staleness 0 it is
the run without faults, bit for bit; with rollouts ahead of training it trains every prompt once,
and what was recorded as it was recorded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from tests.e2e import runs
from tests.e2e.random_faults import RandomFaults, share_of_kills, timeout_of

NUM_KILLS = share_of_kills(0.4)
"""Of each test here."""
pytestmark = [
    pytest.mark.engine,
    pytest.mark.chaos,
    pytest.mark.timeout(timeout_of(NUM_KILLS)),
]

NUM_STEPS = 60
SETTINGS = (
    f"num_steps={NUM_STEPS}",
    "checkpoint.interval=3",
    f"checkpoint.keep_steps={NUM_STEPS}",
    "watch.silent_s=15",
    "watch.replace_after_s=1",
    "watch.kill_after_s=1",
)
AHEAD = (
    "batch.max_staleness=4",
    "publish.pause=keep",
    "publish.beside_decoding=true",
    "rollout.deterministic=false",
    "rollout.segment_tokens=4",
    "objective.preset=grpo",
)


class Trained(NamedTuple):
    """What a recorded step trains, with the weight version of every token."""

    prompts: list[tuple[int, ...]]
    completions: list[tuple[int, ...]]
    versions: list[tuple[int, ...]]


def test_a_run_with_faults_is_the_one_without(tmp_path):
    whole = tmp_path / "whole"
    finish(whole, ())
    for run in runs_with_faults(tmp_path, ()):
        assert runs.timeless(runs.metrics(run)) == runs.timeless(runs.metrics(whole))
        assert recorded_steps(run) == recorded_steps(whole)


def test_faults_of_a_run_that_is_ahead_lose_no_sample(tmp_path):
    whole = tmp_path / "whole"
    finish(whole, AHEAD)
    prompts = {step: trained.prompts for step, trained in recorded_steps(whole).items()}
    for run in runs_with_faults(tmp_path, AHEAD):
        recorded = recorded_steps(run)
        assert {step: trained.prompts for step, trained in recorded.items()} == prompts
        for record in runs.metrics(run):
            ages = record["step"] - np.concatenate(recorded[record["step"]].versions)
            assert ages.min() >= 0
            assert ages.max() <= 4
            assert record["staleness/seen_max"] == ages.max()
            assert record["staleness/seen_mean"] == pytest.approx(ages.mean())


def finish(run: Path, settings: Sequence[str]) -> None:
    """A run without faults."""
    done = runs.command(*train(run, settings))
    assert done.returncode == 0, done.stdout + done.stderr


def train(run: Path, settings: Sequence[str]) -> list[str]:
    named = (f"runs_dir={run.parent}", f"name={run.name}")
    return ["train", runs.RECIPE, *named, *SETTINGS, *settings]


def runs_with_faults(root: Path, settings: Sequence[str]) -> list[Path]:
    """Finished runs. One may finish between two faults: then there is another one."""
    faults = RandomFaults(NUM_KILLS)
    finished = []
    while faults.left:
        run = root / f"faults-{len(finished)}"
        finish_with_faults(run, settings, faults)
        finished.append(run)
    print(f"{NUM_KILLS} faults in {len(finished)} runs: {dict(faults.done)}")
    return finished


def finish_with_faults(run: Path, settings: Sequence[str], faults: RandomFaults) -> None:
    """A run to which faults happen, and which is resumed until it has finished."""
    recorded: dict[int, Trained] = {}
    while not (run / "result.json").exists():
        command = train(run, settings)
        if (run / "config.json").exists():
            command = ["resume", str(run)]
        saved, left = last_checkpoint(run), faults.left
        output = run.with_name(f"{run.name}.output")
        with output.open("w") as file:
            supervisor = runs.start(*command, output=file)
            code = faults.follow(run, supervisor)
        assert runs.no_survivors(run), runs.survivors(run)
        has_finished = (run / "result.json").exists()
        assert has_finished or code != 0, output.read_text()
        assert has_finished or faults.left < left, f"ended without a fault: {output.read_text()}"
        assert last_checkpoint(run) >= saved
        now = recorded_steps(run)
        assert recorded.items() <= now.items(), "a recorded step was sampled again"
        recorded = now
    records = runs.metrics(run)
    assert [record["step"] for record in records] == list(range(NUM_STEPS))
    assert sorted(recorded) == list(range(NUM_STEPS))


def last_checkpoint(run: Path) -> int:
    found = [0]
    for file in run.glob("checkpoints/step_*/complete.json"):
        number = file.parent.name.removeprefix("step_")
        if number.isdigit():
            found.append(int(number))
    return max(found)


def recorded_steps(run: Path) -> dict[int, Trained]:
    """By number; their checksums are verified."""
    found = {}
    for directory in run.glob("store/step_*[0-9]"):
        table = SampleTable(directory)
        rows = range(len(table))
        found[table.manifest.step] = Trained(
            prompts=[tuple(table.prompt_ids(row)) for row in rows],
            completions=[tuple(table.completion(row)[0]) for row in rows],
            versions=[tuple(table.versions(row)) for row in rows],
        )
    return found
