"""Servers and workers that died are started again by the real supervisor, over small processes."""

import os
import signal

import pytest

from grpo_megatron.errors import EngineError, EpisodeError
from grpo_megatron.launch import restarts
from grpo_megatron.launch.restarts import Restarts
from tests.launch.test_supervisor_hangs import Run, wait_until


def test_pauses_double_and_end():
    now = [0.0]
    planned = Restarts(7, clock=lambda: now[0])
    assert [planned.plan("rollout-0") for _ in range(8)] == [2, 4, 8, 16, 32, 60, 60, None]
    assert planned.plan("rollout-1") == 2
    now[0] = 1.9
    assert not planned.take_due("rollout-1")
    now[0] = 2.0
    assert planned.take_due("rollout-1") and not planned.take_due("rollout-1")
    assert not planned.take_due("worker-5")


def test_nothing_is_started_again_where_the_recipe_says_so():
    assert Restarts(0).plan("rollout-0") is None


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.2)


def kill(run, role):
    os.kill(run.pid(role), signal.SIGKILL)


@pytest.mark.parametrize("role", ["rollout-1", "worker-0"])
def test_a_dead_one_is_started_again(tmp_path, monkeypatch, capsys, soon, role):
    run = Run(tmp_path, monkeypatch, kill_after_s=1.0, replace_after_s=1.0)
    endpoint = run.run_dir.endpoints / f"{role}.json"

    def meddle(run):
        endpoint.write_text("of the dead one")
        for number in (1, 2):
            kill(run, role)
            wait_until(lambda number=number: len(run.events("restarted")) == number)

    assert run.with_meddling(meddle) == 0
    assert not endpoint.exists()
    assert not (run.run_dir.endpoints / f"{role}.dead").exists()
    numbers = [(event["role"], event["number"]) for event in run.events("restarted")]
    assert numbers == [(role, 1), (role, 2)]
    told = capsys.readouterr().out
    assert f"{role} died with exit code 137" in told
    assert "it is started again in 0 s (1 of 3)" in told


def test_all_may_be_dead_while_one_is_started_again(tmp_path, monkeypatch, capsys, soon):
    run = Run(tmp_path, monkeypatch)

    def meddle(run):
        kill(run, "rollout-0")
        kill(run, "rollout-1")
        wait_until(lambda: len(run.events("restarted")) == 2)

    assert run.with_meddling(meddle) == 0
    assert "no rollout server is left, the run waits for it" in capsys.readouterr().out


SERVED = {"recipe": "demo/agent-calculator-cpu"}
TWO_SERVERS = "domains.0.environment.servers=2"


def test_a_server_of_an_environment_is_started_again(tmp_path, monkeypatch, capsys, soon):
    run = Run(tmp_path, monkeypatch, **SERVED, flags=[TWO_SERVERS, "rollout.max_restarts=1"])
    is_dead = run.run_dir.endpoints / "environment-1.dead"

    def meddle(run):
        kill(run, "environment-1")
        wait_until(lambda: run.events("restarted"))
        kill(run, "environment-1")
        wait_until(is_dead.exists)

    assert run.with_meddling(meddle) == 0
    [restarted] = run.events("restarted")
    assert (restarted["role"], restarted["number"]) == ("environment-1", 1)
    assert "it is started again in 0 s (1 of 1)" in capsys.readouterr().out


def test_the_last_server_of_a_domain_ends_the_run(tmp_path, monkeypatch):
    never = "rollout.max_restarts=0"
    run = Run(tmp_path, monkeypatch, **SERVED, flags=[TWO_SERVERS, never])

    def meddle(run):
        kill(run, "environment-0")
        kill(run, "environment-1")
        wait_until(lambda: run.supervisor.processes.watcher._closed.is_set())

    with pytest.raises(EpisodeError) as caught:
        run.with_meddling(meddle)
    assert caught.value.exit_code == 12
    assert "the last environment server of domain products died" in caught.value.message


def test_one_that_dies_at_every_start_ends_the_run_at_the_limit(tmp_path, monkeypatch, soon):
    run = Run(tmp_path, monkeypatch)
    make = run.supervisor.roles.replica

    def dies(index):
        child = make(index)
        child.argv = ["sh", "-c", "echo no memory for weights; exit 3"]
        return child

    run.supervisor.roles.replica = dies

    def until_the_end(run):
        wait_until(
            lambda: (watcher := run.supervisor.processes.watcher) and watcher._closed.is_set()
        )

    with pytest.raises(EngineError) as caught:
        run.with_meddling(until_the_end, all_start=False)
    error = caught.value
    assert error.exit_code == 5
    assert "the last rollout server died after 3 restarts (rollout.max_restarts)" in error.message
    assert "no memory for weights" in error.message and "resume" in error.remedy
    assert len(run.events("restarted")) == 6


def test_one_that_is_given_up_does_not_end_the_run_while_another_lives(
    tmp_path, monkeypatch, capsys, soon
):
    run = Run(tmp_path, monkeypatch)
    is_dead = run.run_dir.endpoints / "rollout-0.dead"

    def meddle(run):
        for number in range(4):
            wait_until(lambda number=number: len(run.events("restarted")) == number)
            kill(run, "rollout-0")
        wait_until(is_dead.exists)

    assert run.with_meddling(meddle) == 0
    assert len(run.events("restarted")) == 3
