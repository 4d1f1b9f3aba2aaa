"""The real supervisor over small processes that say what they are doing: some are stopped."""

import json
import os
import signal
import sys
import threading
import time

import pytest

from grpo_megatron.config.watch import WatchConfig
from grpo_megatron.errors import GrpoMegatronError, TrainerError
from grpo_megatron.launch import watcher
from grpo_megatron.launch.processes import ChildProcess
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.supervisor import Supervisor
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.progress import read_progress
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events

ROLE = """
import os, sys, time
from pathlib import Path
from grpo_megatron import progress

progress.BEAT_S, progress._SHORTEST_S = 0.5, 0.2
file, role, end = map(Path, sys.argv[1:])
progress.start_progress(file, role.name)
progress.enter("Train", "step_000003")
print("ready", flush=True)
say = end.with_name("say")
while role.name != "controller" or not end.exists():
    if role.name == "controller" and say.exists():
        print(say.read_text(), flush=True)
        say.unlink()
    time.sleep(0.05)
"""


class SmallProcesses(LocalProcesses):
    """Each role is `ROLE`; the controller prints the file `say`, and ends when `end` exists."""

    def _child(self, name, module, *arguments, env=None, piped=False):
        run_dir = self.run_dir
        argv = [sys.executable, "-c", ROLE, str(run_dir.role_progress(name)), name]
        argv.append(str(run_dir.root / "end"))
        return ChildProcess(name, argv, run_dir.logs / f"{name}.log", env or {}, piped)


class Run:
    """A supervisor, and what a test does to its processes meanwhile."""

    def __init__(self, tmp_path, monkeypatch, **settings):
        monkeypatch.setattr(watcher, "PERIOD_S", 0.3)
        monkeypatch.setattr(Supervisor, "_prepare_model", lambda self: None)
        sizes = ["rollout.num_replicas=2", "trainer.num_ranks=2"]
        recipe = settings.pop("recipe", "demo/gspo-moe-cpu")
        config = resolve(recipe, [*sizes, *settings.pop("flags", ())])
        watch = WatchConfig.model_construct(
            **{"enabled": True, "silent_s": 5.0, "slow_factor": 5.0, **settings}
        )
        self.run_dir = RunDir(tmp_path / "run").begin()
        config = config.config.model_copy(update={"watch": watch})
        self.supervisor = Supervisor(SmallProcesses(config, self.run_dir))
        self.failure = None

    def events(self, kind):
        return [e for e in read_events(self.run_dir.events) if e["kind"] == kind]

    def pid(self, role):
        started = self.events("started") + self.events("restarted")
        return [event["pid"] for event in started if event["role"] == role][-1]

    def all_train(self) -> bool:
        records = [read_progress(file) for file in self.run_dir.progress.glob("*.json")]
        num_trains = sum(record is not None and record.phase == "Train" for record in records)
        return num_trains == 7 + len(self.supervisor.config.environment_servers)

    def with_meddling(self, meddle, *, all_start: bool = True) -> int:
        """Run the supervisor here, which takes signals, and `meddle` in a thread."""

        def work():
            try:
                wait_until(lambda: not all_start or self.all_train())
                meddle(self)
            except BaseException as error:
                self.failure = error
            finally:
                (self.run_dir.root / "end").touch()

        thread = threading.Thread(target=work)
        thread.start()
        try:
            return self.supervisor.run()
        finally:
            thread.join(60)
            assert self.failure is None, self.failure


def stop(role, until):
    def meddle(run):
        os.kill(run.pid(role), signal.SIGSTOP)
        wait_until(lambda: until(run))

    return meddle


def test_a_stopped_trainer_rank_ends_the_run_with_its_name(tmp_path, monkeypatch):
    never = ["trainer.max_restarts=0"]
    run = Run(tmp_path, monkeypatch, kill_after_s=1.0, replace_after_s=1.0, flags=never)
    with pytest.raises(TrainerError) as caught:
        run.with_meddling(
            stop("trainer-1", lambda run: run.supervisor.processes.watcher._closed.is_set())
        )
    assert caught.value.exit_code == 6
    assert "trainer-1, in Train step_000003, has given no sign of life" in caught.value.message
    assert "it is stopped" in caught.value.message
    assert "its last line: ready" in caught.value.message
    assert "resume" in caught.value.remedy
    [hung] = run.events("hung")
    assert (hung["role"], hung["cause"], hung["phase"]) == ("trainer-1", "stopped", "Train")
    assert not run.run_dir.progress.exists()


def test_a_stopped_controller_too(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, kill_after_s=1.0, replace_after_s=1.0)
    with pytest.raises(GrpoMegatronError) as caught:
        run.with_meddling(
            stop("controller", lambda run: run.supervisor.processes.watcher._closed.is_set())
        )
    assert (
        caught.value.exit_code == 1
        and "controller, in Train step_000003, has given no sign" in caught.value.message
    )


@pytest.mark.parametrize("role", ["rollout-0", "worker-1"])
def test_a_stopped_server_or_worker_is_ended_and_counts_as_dead(tmp_path, monkeypatch, role):
    never = ["rollout.max_restarts=0"]
    run = Run(tmp_path, monkeypatch, kill_after_s=1.0, replace_after_s=1.0, flags=never)
    is_dead = run.run_dir.endpoints / f"{role}.dead"
    assert run.with_meddling(stop(role, lambda run: is_dead.exists())) == 0
    [hung] = run.events("hung")
    died = [event for event in run.events("died") if event["exit_code"]]
    assert (hung["role"], hung["cause"]) == (role, "stopped")
    assert [(event["role"], event["exit_code"]) for event in died] == [(role, 137)]


def test_zeros_leave_what_hangs_alone_and_it_may_go_on(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, monkeypatch, kill_after_s=0.0, replace_after_s=0.0)

    def meddle(run):
        for role in ("trainer-0", "rollout-1"):
            os.kill(run.pid(role), signal.SIGSTOP)
        wait_until(lambda: len(run.events("hung")) == 2)
        time.sleep(3)
        for role in ("trainer-0", "rollout-1"):
            os.kill(run.pid(role), signal.SIGCONT)
        wait_until(lambda: len(run.events("recovered")) == 2)

    assert run.with_meddling(meddle) == 0
    assert {event["role"] for event in run.events("hung")} == {"trainer-0", "rollout-1"}
    assert {event["role"] for event in run.events("recovered")} == {"trainer-0", "rollout-1"}
    told = capsys.readouterr().out
    assert told.count("trainer-0, in Train step_000003, has given no sign of life") == 1  # once
    assert told.count("trainer-0 goes on") == 1
    json.dumps(run.events("hung"))


def test_nothing_is_looked_for_where_the_watch_is_off(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch, enabled=False)

    def meddle(run):
        os.kill(run.pid("rollout-0"), signal.SIGSTOP)
        time.sleep(8)
        os.kill(run.pid("rollout-0"), signal.SIGCONT)

    assert run.with_meddling(meddle) == 0
    assert run.events("hung") == []


def wait_until(condition) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
