"""Servers of teachers: one for each model, ended with the rehearsal, and told of when they fail."""

from __future__ import annotations

import sys

import pytest

from grpo_megatron.errors import EngineError
from grpo_megatron.rehearsal import teacher_servers
from grpo_megatron.rehearsal.teacher_servers import TeacherServers


@pytest.fixture
def started_as(monkeypatch):
    """Start `python ARGUMENTS PORT` in the place of vLLM."""

    def choose(*arguments: str) -> None:
        def command(rollout, model, port, max_logprobs):
            return [sys.executable, *arguments, str(port)], {}

        monkeypatch.setattr(teacher_servers, "scoring_command", command)

    return choose


def test_a_model_has_one_server_which_ends_with_the_context(tmp_path, started_as):
    (tmp_path / "health").touch()
    started_as("-m", "http.server", "--bind", "127.0.0.1", "--directory", str(tmp_path))
    with TeacherServers(tmp_path) as servers:
        url = servers.url_of(tmp_path / "a", "float32")
        assert servers.url_of(tmp_path / "a", "float32") == url
        assert servers.url_of(tmp_path / "b", "float32") != url
        assert len(servers) == 2
        servers.start(timeout_s=60)
        processes = [server.process for server in servers._servers.values()]
        assert all(process.alive for process in processes)
    assert not any(process.alive for process in processes)


def test_a_server_that_ends_is_told_with_its_last_lines(tmp_path, started_as):
    started_as("no_such_script.py")
    with TeacherServers(tmp_path) as servers:
        servers.url_of(tmp_path / "a", "float32")
        with pytest.raises(EngineError, match="can't open file") as refused:
            servers.start(timeout_s=60)
    assert refused.value.where == str(tmp_path / "teacher-0.log")


def test_without_a_served_teacher_nothing_is_started(tmp_path):
    with TeacherServers(tmp_path) as servers:
        servers.start(timeout_s=1)
    assert not servers and not list(tmp_path.iterdir())
