"""Trainer ranks are killed and training begins again inside the run: it is the one without kills,
and its engine was started once."""

import pytest

from tests.e2e import runs
from tests.e2e.test_hangs import wait_for
from tests.e2e.test_rejoin import ENDLESS, kill_in, more_steps, pid_of, reference

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

HELD = ""
"""The run is held there, after two steps: before there is a checkpoint."""
KILLS = [("trainer-1", HELD), ("trainer-0", "train"), ("trainer-1", "publish")]


def test_training_begins_again_whenever_a_rank_is_killed_until_the_limit(tmp_path):
    run = tmp_path / "killed"
    process = runs.start(
        "train",
        runs.RECIPE,
        f"runs_dir={tmp_path}",
        f"name={run.name}",
        *ENDLESS,
        *runs.HELD,
        "checkpoint.interval=4",
        f"trainer.max_restarts={len(KILLS)}",
        environment=runs.hold(run, 2),
    )
    runs.wait_for_steps(run, 2, process)
    for place, (role, phase) in enumerate(KILLS):
        if phase == HELD:
            runs.kill(pid_of(run, role))
            runs.release(run)
        else:
            kill_in(run, phase, role)
        wait_for(run, "restarted", role, place + 1, process)
        more_steps(run, 4, process)
    kill_in(run, "train", "trainer-1")
    code, output = runs.finish(process)
    assert code == 6, output
    assert output.count("training begins again at the newest checkpoint") == len(KILLS)
    assert f"after {len(KILLS)} restarts of training (trainer.max_restarts): trainer-1" in output
    assert output.count("\nerror: ") == 1
    assert runs.no_survivors(run), runs.survivors(run)
    # only the ranks died, and only training was started again
    died = [event["role"] for event in runs.events(run, "died")]
    assert died == [role for role, _ in KILLS] + ["trainer-1"]
    begun = {event["role"] for event in runs.events(run, "restarted")}
    assert begun == {"trainer-0", "trainer-1", "controller", "worker-0"}
    assert len(runs.events(run, "resumed")) == len(KILLS) - 1
    assert runs.events(run, "engine_dead") == runs.events(run, "hung") == []
    records = runs.metrics(run)
    assert [record["step"] for record in records] == list(range(len(records)))
    whole = reference(tmp_path, len(records), "checkpoint.interval=4")
    assert runs.timeless(records) == whole[: len(records)]
