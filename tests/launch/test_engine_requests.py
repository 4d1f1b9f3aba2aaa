"""Engines are added to and removed from a run: the real supervisor over small processes."""

import json
import os
import signal
from types import SimpleNamespace

import pytest

from grpo_megatron.errors import ConfigError, EngineError
from grpo_megatron.files import write_atomically
from grpo_megatron.launch import engine_requests, restarts
from grpo_megatron.launch.engine_requests import (
    EngineRequest,
    ask,
    engine_lines,
    running,
    take_requests,
)
from grpo_megatron.launch.local import LocalProcesses
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.progress import read_progress
from grpo_megatron.rollout.members import read_members
from grpo_megatron.rundir import RunDir
from tests.launch.test_supervisor_hangs import Run, wait_until

ADD = EngineRequest("add")


def remove(index: int) -> EngineRequest:
    return EngineRequest("remove", index)


def members(run) -> dict[int, str]:
    return read_members(run.run_dir, run.supervisor.config)


def works(run, role: str) -> bool:
    record = read_progress(run.run_dir.role_progress(role))
    return record is not None and record.phase == "Train"


def refusal(run, request: EngineRequest) -> str:
    with pytest.raises(ConfigError) as caught:
        ask(run.run_dir, request)
    return str(caught.value)


def test_engines_come_and_go(tmp_path, monkeypatch, capsys):
    run = Run(tmp_path, monkeypatch)
    seen = {}
    config = {"config": run.supervisor.config}
    monkeypatch.setattr(engine_requests, "read_resolved", lambda path: SimpleNamespace(**config))

    def meddle(run):
        assert members(run) == {0: "present", 1: "present"}
        assert ask(run.run_dir, ADD).startswith("rollout-2 starts")
        assert members(run) == {0: "present", 1: "present", 2: "present"}
        wait_until(lambda: works(run, "rollout-2") and works(run, "worker-2"))
        seen["unknown"] = refusal(run, remove(7))
        assert ask(run.run_dir, remove(0)).startswith("rollout-0 gets no more requests")
        assert members(run)[0] == "leaving"
        seen["twice"] = refusal(run, remove(0))
        seen["list"] = list(engine_lines(run.run_dir))
        for role in ("rollout-0", "worker-0"):
            os.kill(run.pid(role), 0)  # until the controller has let it go
        say = json.dumps({"kind": "left", "engine": 0})
        write_atomically(run.run_dir.root / "say", say)
        wait_until(lambda: run.events("removed"))
        assert members(run) == {1: "present", 2: "present"}
        assert not (run.run_dir.progress / "rollout-0.json").exists()
        ask(run.run_dir, remove(1))
        seen["last"] = refusal(run, remove(2))
        # the lowest number that is free
        assert ask(run.run_dir, ADD).startswith("rollout-0 starts")
        assert not (run.run_dir.endpoints / "rollout-0.dead").exists()
        wait_until(lambda: works(run, "rollout-0"))

    assert run.with_meddling(meddle) == 0
    assert "the run has no engine 7" in seen["unknown"]
    assert "engines that it has: 0, 1, 2" in seen["unknown"]
    assert "rollout-0 is leaving already" in seen["twice"]
    assert "rollout-2 is the only engine of the run" in seen["last"]
    first, second, third = seen["list"]
    assert first.startswith("rollout-0    leaves after its requests      process ")
    assert second.startswith("rollout-1    starts ") and third.startswith("rollout-2    starts ")
    added = [event["role"] for event in run.events("added")]
    assert added == ["rollout-2", "worker-2", "rollout-0", "worker-0"]
    assert run.events("died") == []
    assert "rollout-0 has left the run" in capsys.readouterr().out


def test_one_that_was_given_up_can_be_added_again_and_one_that_leaves_is_not_restarted(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(restarts, "FIRST_PAUSE_S", 0.2)
    run = Run(tmp_path, monkeypatch, flags=["rollout.max_restarts=1"])

    def meddle(run):
        for number in (0, 1):
            wait_until(lambda number=number: len(run.events("restarted")) == number)
            os.kill(run.pid("rollout-1"), signal.SIGKILL)
        wait_until(lambda: members(run) == {0: "present"})
        assert ask(run.run_dir, ADD).startswith("rollout-1 starts")
        wait_until(lambda: works(run, "rollout-1"))
        ask(run.run_dir, remove(0))
        os.kill(run.pid("rollout-0"), signal.SIGKILL)
        wait_until((run.run_dir.endpoints / "rollout-0.dead").exists)

    assert run.with_meddling(meddle) == 0
    assert len(run.events("restarted")) == 1
    assert len(run.events("died")) == 3


def test_a_run_that_does_not_run_is_refused(tmp_path):
    run_dir = RunDir(tmp_path / "run").begin()
    with pytest.raises(ConfigError, match="not running"):
        running(run_dir.root)
    with run_lock(run_dir):
        assert running(run_dir.root) == run_dir
        with pytest.raises(EngineError, match="did not answer within 0 s"):
            ask(run_dir, ADD, timeout_s=0.3)
    assert list(run_dir.endpoints.glob("request-*")) == []
    killed = f"process 4194305 on {os.uname().nodename}"
    for content in (killed.encode(), b"\xff\xfe"):
        run_dir.lock.write_bytes(content)
        with pytest.raises(ConfigError, match="not running"):
            running(run_dir.root)


def test_a_run_that_ends_meanwhile_is_told_at_once(tmp_path, monkeypatch):
    """However long its supervisor might take to answer; also where it has begun again."""
    monkeypatch.setattr(engine_requests, "_CHECK_S", 0.0)
    run_dir = RunDir(tmp_path / "run").begin()
    with pytest.raises(ConfigError, match="not running"):
        ask(run_dir, ADD)
    new = RunDir(run_dir.root).begin()
    run_dir.endpoints.mkdir()
    with run_lock(new), pytest.raises(ConfigError, match="begun again"):
        ask(run_dir, ADD)


def test_a_run_whose_job_waits_is_no_run_to_resume(tmp_path, monkeypatch):
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    monkeypatch.setattr(engine_requests, "active_job", lambda run_dir: "7")
    with pytest.raises(ConfigError, match="not running") as caught:
        running(run_dir.root)
    assert "job 7" in caught.value.remedy and "resume" not in caught.value.remedy


def test_there_must_be_room(tmp_path):
    config = resolve("demo/gspo-moe-cpu", ["trainer.num_ranks=2"]).config
    assert LocalProcesses(config, RunDir(tmp_path)).why_no_room(5) == ""
    placement = config.placement.model_copy(update={"gpus_per_node": 4})
    config = config.model_copy(update={"placement": placement})
    roles = LocalProcesses(config, RunDir(tmp_path))
    assert roles.why_no_room(1) == ""
    assert "GPUs for 2 engines" in roles.why_no_room(2)


MALFORMED = [
    "",
    "[]",
    "null",
    '{"action": "remove"}',
    '{"action": "remove", "engine": "0"}',
    '{"action": "remove", "engine": true}',
    '{"action": "restart", "engine": 0}',
    '{"engine": 0}',
    "[" * 200_000,
    "\udcff",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_request_is_answered_with_what_is_wrong(tmp_path, text):
    """And the others are taken all the same, each once."""
    run_dir = RunDir(tmp_path).begin()
    (run_dir.endpoints / "request-a.json").mkdir()
    file = run_dir.endpoints / "request-b.json"
    file.write_bytes(text.encode(errors="surrogateescape"))
    (run_dir.endpoints / "request-c.json").write_text('{"action": "remove", "engine": 1}')
    found = take_requests(run_dir)
    assert found.keys() == {"b", "c"} and found["c"] == remove(1)
    assert isinstance(found["b"], ConfigError) and found["b"].where == str(file)
    assert take_requests(run_dir) == {}


def test_a_malformed_request_does_not_end_the_run(tmp_path, monkeypatch):
    run = Run(tmp_path, monkeypatch)

    def meddle(run):
        write_atomically(run.run_dir.endpoints / "request-x.json", '{"action": "remove"}')
        answer = run.run_dir.endpoints / "answer-x.json"
        wait_until(answer.exists)
        assert "it names no engine" in answer.read_text()
        assert members(run) == {0: "present", 1: "present"}

    assert run.with_meddling(meddle) == 0
