"""Engines are removed from a running run and added to it: it is the run in which none was."""

import pytest

from tests.e2e import runs
from tests.e2e.test_hangs import wait_for
from tests.e2e.test_rejoin import kill_in, more_steps, reference, start, stop

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

SETTINGS = ("rollout.num_replicas=2", "checkpoint.interval=4")


def engines(*arguments: object) -> str:
    done = runs.command("engines", *map(str, arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def refused(*arguments: object) -> str:
    done = runs.command("engines", *map(str, arguments))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("error: ") == 1 and "Traceback" not in done.stderr
    return done.stderr


def test_engines_come_and_go(tmp_path):
    run, process = start(tmp_path, "elastic", *SETTINGS)
    first, second = engines("list", run).splitlines()
    assert first.startswith("rollout-0    serves") and second.startswith("rollout-1    serves")
    assert "the run has no engine 5" in refused("remove", run, 5)
    assert "rollout-0 gets no more requests" in engines("remove", run, 0)
    wait_for(run, "removed", "rollout-0", 1, process)
    more_steps(run, 3, process)
    [left] = engines("list", run).splitlines()
    assert left.startswith("rollout-1    serves")
    assert "rollout-1 is the only engine of the run" in refused("remove", run, 1)
    # the newcomer gets the present weights alone, and what trains can begin again without the other
    assert "rollout-0 starts" in engines("add", run)
    joined = wait_for(run, "joined", "rollout-0", 1, process)
    assert joined["version"] > 3
    more_steps(run, 3, process)
    engines("remove", run, 1)
    wait_for(run, "removed", "rollout-1", 1, process)
    kill_in(run, "rollout", "trainer-1")
    wait_for(run, "restarted", "trainer-1", 1, process)
    more_steps(run, 4, process)
    stop(process)
    assert "is not running" in refused("add", run)
    assert runs.no_survivors(run), runs.survivors(run)
    assert [event["role"] for event in runs.events(run, "died")] == ["trainer-1"]
    assert runs.events(run, "engine_dead") == runs.events(run, "worker_lost") == []
    records = runs.timeless(runs.metrics(run))
    whole = reference(tmp_path, len(records), *SETTINGS)
    assert records == whole[: len(records)]


def test_no_run_is_one_message(tmp_path):
    assert "is not a run" in refused("list", tmp_path / "nothing")
