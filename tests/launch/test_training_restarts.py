"""Training begins again when a rank dies: the real supervisor over small processes."""

import json
import os
import signal
from pathlib import Path

import pytest

from grpo_megatron.errors import EngineError, GrpoMegatronError, SetupError, TrainerError
from grpo_megatron.launch import restarts, training_restarts
from grpo_megatron.launch.processes import ChildProcess, End
from grpo_megatron.launch.restarts import first_cause, may_train_again
from grpo_megatron.launch.steps import SlurmStep
from grpo_megatron.plan.resolve import resolve
from tests.launch import test_supervisor_hangs
from tests.launch.test_supervisor_hangs import ROLE, Run, wait_until

BEGIN_AGAIN = {"trainer-0", "trainer-1", "controller", "worker-0", "worker-1"}


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.2)


def ends(*codes: int) -> list[End]:
    return [End(f"trainer-{rank}", code, Path("log")) for rank, code in enumerate(codes)]


@pytest.mark.parametrize(
    ("codes", "first", "again"),
    [
        ((137,), 0, True),
        ((1, 137), 1, True),  # rank 0 lost it in a collective
        ((6, 137), 1, True),  # or in the rendezvous
        ((139,), 0, True),
        ((1, 1), 0, True),  # an error of a library
        ((6, 6), 0, False),  # a loss that is no number
        ((1, 6), 1, False),
        ((1, 8), 1, False),  # a damaged checkpoint
        ((3, 137), 1, False),  # a full disk
        ((7,), 0, False),
    ],
)
def test_what_may_be_repeated_and_who_was_first(codes, first, again):
    assert first_cause(ends(*codes)).name == f"trainer-{first}"
    assert may_train_again(ends(*codes)) is again


def kill_rank(run):
    os.kill(run.pid("trainer-1"), signal.SIGKILL)


def begun_again(run, number: int):
    """Whether all of training has been started for the `number`-th time, and works."""
    roles = {event["role"] for event in run.events("restarted") if event["number"] == number}
    return roles == BEGIN_AGAIN and run.all_train()


def test_training_begins_again_while_engines_stay(tmp_path, monkeypatch, capsys, soon):
    run = Run(tmp_path, monkeypatch)
    endpoints = run.run_dir.endpoints
    shard = run.run_dir.rollouts / "000000" / "rollout-0-000.safetensors"
    pids = {}

    def meddle(run):
        for name in ("trainer", "controller", "worker-1", "rollout-0"):
            (endpoints / f"{name}.json").write_text("where it was")
        shard.parent.mkdir(parents=True)
        shard.touch()
        for role in ("rollout-0", "rollout-1"):
            pids[role] = run.pid(role)
        for number in (1, 2):
            kill_rank(run)
            wait_until(lambda number=number: begun_again(run, number))
        for role, pid in pids.items():
            assert run.pid(role) == pid
            os.kill(pid, 0)

    assert run.with_meddling(meddle) == 0
    left = sorted(path.name for path in endpoints.iterdir())
    assert left == ["engines.json", "rollout-0.json"]
    assert not shard.exists()
    assert [event["role"] for event in run.events("died")] == ["trainer-1", "trainer-1"]
    told = capsys.readouterr().out
    assert "trainer-1 ended with exit code 137" in told
    assert "training begins again at the newest checkpoint in 0 s (1 of 3" in told
    assert "(2 of 3" in told


def test_the_limit_ends_the_run_with_the_rank_and_its_exit_code(tmp_path, monkeypatch, soon):
    """A worker that was given up stays so when training begins again."""
    run = Run(tmp_path, monkeypatch, flags=["trainer.max_restarts=1", "rollout.max_restarts=0"])
    is_dead = run.run_dir.endpoints / "worker-0.dead"

    def meddle(run):
        os.kill(run.pid("worker-0"), signal.SIGKILL)
        wait_until(is_dead.exists)
        kill_rank(run)
        wait_until(lambda: len(run.events("restarted")) == len(BEGIN_AGAIN) - 1)
        kill_rank(run)
        wait_until(run.supervisor.processes.watcher._closed.is_set)

    with pytest.raises(TrainerError) as caught:
        run.with_meddling(meddle)
    assert caught.value.exit_code == 6
    assert (
        "after 1 restarts of training (trainer.max_restarts): trainer-1 ended with exit code 137"
        in caught.value.message
    )
    assert "resume" in caught.value.remedy
    assert {event["role"] for event in run.events("restarted")} == BEGIN_AGAIN - {"worker-0"}
    assert is_dead.exists()


def test_a_rank_that_hangs_is_ended_and_training_begins_again(tmp_path, monkeypatch, soon):
    run = Run(tmp_path, monkeypatch, kill_after_s=1.0)

    def meddle(run):
        os.kill(run.pid("trainer-1"), signal.SIGSTOP)
        wait_until(lambda: begun_again(run, 1))

    assert run.with_meddling(meddle) == 0
    assert [event["role"] for event in run.events("hung")] == ["trainer-1"]
    [died] = run.events("died")
    assert (died["role"], died["exit_code"]) == ("trainer-1", 137)


def test_a_stop_in_the_pause_ends_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 60.0)
    run = Run(tmp_path, monkeypatch)

    def meddle(run):
        kill_rank(run)
        wait_until(lambda: not run.supervisor.processes.controller.alive)
        os.kill(os.getpid(), signal.SIGTERM)

    assert run.with_meddling(meddle) == 130
    assert run.events("restarted") == []


def test_not_where_engines_share_gpus_with_the_trainer():
    config = resolve("demo/gspo-moe-cpu", []).config
    assert config.trainer_restarts == 3
    placement = config.placement.model_copy(update={"mode": "colocated", "gpus_per_node": 2})
    assert config.model_copy(update={"placement": placement}).trainer_restarts == 0


def test_a_step_of_a_job_says_how_it_ended_itself(tmp_path):
    """Its log begins with what the step before it said."""
    log = tmp_path / "srun-trainer.log"
    log.write_text("srun: error: node1: task 1: Killed\n")
    said = "srun: error: node1: task 0: Exited with exit code 6"
    argv = ["sh", "-c", f"echo '{said}'; exit 6"]
    step = SlurmStep("trainer", argv, log, task_log="trainer-%t.log")
    step.start()
    assert step.started.wait(60) == 6
    end = step.end()
    assert (end.name, end.exit_code) == ("trainer-0", 6)


REFUSED = "srun: error: Unable to create step for job 3: "


@pytest.mark.parametrize(
    ("reason", "is_refusal"),
    [
        ("More processors requested than permitted", True),
        ("Invalid generic resource (gres) specification", True),
        ("Unable to contact slurm controller (connect failure)", False),
        ("Socket timed out on send/recv operation", False),
        ("Job/step already completing or completed", False),
        ("Required node not available (down, drained or reserved)", False),
    ],
)
def test_a_step_that_srun_refuses_never_was(tmp_path, reason, is_refusal):
    argv = ["sh", "-c", f"echo '{REFUSED}{reason}' >&2; exit 1"]
    log = tmp_path / "srun-trainer.log"
    step = SlurmStep("trainer", argv, log, task_log="trainer-%t.log")
    step.start()
    assert step.started.wait(60) == 1
    end = step.end()
    assert may_train_again([end]) is not is_refusal
    if is_refusal:
        assert str(end) == f"srun makes no step for trainer: {reason}"
        assert (end.exit_code, end.log) == (SetupError.exit_code, log)
    else:
        assert end.exit_code == 1 and reason in str(end)


def test_steps_that_srun_refuses_are_not_asked_for_again(tmp_path, monkeypatch, capsys, soon):
    """They would be refused again: the job has not what they ask for."""
    monkeypatch.setattr(training_restarts, "_SETTLE_S", 0.2)
    refused = ("worker-0", "trainer-1")
    end_of_child = ChildProcess.end

    def end(child):
        if child.name in refused:
            return End(child.name, SetupError.exit_code, child.log, "More processors")
        return end_of_child(child)

    monkeypatch.setattr(ChildProcess, "end", end)
    run = Run(tmp_path, monkeypatch)
    is_dead = run.run_dir.endpoints / "worker-0.dead"

    def meddle(run):
        os.kill(run.pid("worker-0"), signal.SIGKILL)
        wait_until(is_dead.exists)
        kill_rank(run)
        wait_until(run.supervisor.processes.watcher._closed.is_set)

    with pytest.raises(TrainerError) as caught:
        run.with_meddling(meddle)
    assert caught.value.exit_code == SetupError.exit_code
    assert caught.value.message == "srun makes no step for trainer-1: More processors"
    assert "flags of the job" in caught.value.remedy and "resume" in caught.value.remedy
    assert run.events("restarted") == []
    assert "srun makes no step for worker-0: More processors; see " in capsys.readouterr().out


def test_a_controller_that_srun_refuses_is_told_as_that(tmp_path, monkeypatch):
    end_of_child = ChildProcess.end

    def end(child):
        if child.name == "controller":
            return End(child.name, SetupError.exit_code, child.log, "More processors")
        return end_of_child(child)

    monkeypatch.setattr(ChildProcess, "end", end)
    run = Run(tmp_path, monkeypatch)
    with pytest.raises(GrpoMegatronError) as caught:
        run.with_meddling(lambda run: os.kill(run.pid("controller"), signal.SIGKILL))
    assert caught.value.exit_code == SetupError.exit_code
    assert caught.value.message == "srun makes no step for controller: More processors"
    assert "flags of the job" in caught.value.remedy


def test_the_last_server_that_srun_refuses_is_told_as_that(tmp_path, monkeypatch):
    end_of_child = ChildProcess.end

    def end(child):
        if child.name.startswith("rollout"):
            return End(child.name, SetupError.exit_code, child.log, "More processors")
        return end_of_child(child)

    monkeypatch.setattr(ChildProcess, "end", end)
    run = Run(tmp_path, monkeypatch)

    def meddle(run):
        for name in ("rollout-0", "rollout-1"):
            os.kill(run.pid(name), signal.SIGKILL)

    with pytest.raises(EngineError) as caught:
        run.with_meddling(meddle)
    assert "the last rollout server died: srun makes no step for" in caught.value.message
    assert "flags of the job" in caught.value.remedy and run.events("restarted") == []


ENDS_AFTER_THE_CONTROLLER = """
pid = end.with_name("pid")
if role.name == "controller":
    pid.with_suffix(".new").write_text(str(os.getpid()))
    pid.with_suffix(".new").rename(pid)
    sys.exit(4)
while not pid.exists() or Path("/proc", pid.read_text()).exists():
    time.sleep(0.05)
sys.exit(1)
"""
"""The ranks end when the supervisor has seen the end of the controller."""
END_BEFORE_THE_CONTROLLER = """
if role.name != "controller":
    pid = end.with_name(f"new-{role.name}")
    pid.write_text(str(os.getpid()))
    pid.rename(end.with_name(f"pid-{role.name}"))
    sys.exit(1)
def are_seen():
    pids = [pid.read_text() for pid in end.parent.glob("pid-*")]
    return len(pids) == 2 and not any(Path("/proc", pid).exists() for pid in pids)
while not are_seen():
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(4)
"""
"""The controller, which has told its error, ends after the supervisor has seen the end of the
ranks."""


@pytest.mark.parametrize("order", [ENDS_AFTER_THE_CONTROLLER, END_BEFORE_THE_CONTROLLER])
def test_ranks_that_lost_a_controller_with_an_error_are_not_started_again(
    tmp_path, monkeypatch, capsys, order
):
    """What is wrong with data is told at once, with one place and one remedy."""
    endless = 'while role.name != "controller" or not end.exists():'
    assert endless in ROLE
    role = ROLE.replace(endless, 'while not (role.name[:2] in ("co", "tr") and end.exists()):')
    role += order
    monkeypatch.setattr(test_supervisor_hangs, "ROLE", role)
    run = Run(tmp_path, monkeypatch)
    failure = {"kind": "failure", "text": "too few", "where": "[data]", "remedy": "add rows"}

    def meddle(run):
        said = run.run_dir.root / "say"
        said.write_text(json.dumps(failure))
        wait_until(lambda: not said.exists())

    with pytest.raises(GrpoMegatronError) as caught:
        run.with_meddling(meddle)
    assert caught.value.exit_code == 4
    log = run.run_dir.logs / "controller.log"
    assert str(caught.value) == f"too few\n  where:  [data] ({log})\n  remedy: add rows"
    assert run.events("restarted") == []
    assert "begins again" not in capsys.readouterr().out
