"""How processes find each other."""

import shutil
import socket
import threading
from pathlib import Path

import pytest

from grpo_megatron import network
from grpo_megatron.errors import EngineError, SetupError, TrainerError
from grpo_megatron.network import Endpoint, own_address, wait_for_endpoint
from grpo_megatron.rollout.replica import _inherited_port
from grpo_megatron.rundir import RunDir


@pytest.fixture(autouse=True)
def no_site(monkeypatch):
    for name in (network.NODES_VARIABLE, network.INTERFACE_VARIABLE):
        monkeypatch.delenv(name, raising=False)


def test_on_one_machine_everything_is_on_loopback(monkeypatch):
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv(network.NODES_VARIABLE, "localhost")
    assert own_address() == "127.0.0.1"


def test_the_site_names_an_interface(monkeypatch):
    monkeypatch.setenv(network.INTERFACE_VARIABLE, "lo")
    assert own_address() == "127.0.0.1"
    monkeypatch.setenv(network.INTERFACE_VARIABLE, "ib7")
    with pytest.raises(SetupError, match="ib7") as caught:
        own_address()
    assert "lo" in caught.value.remedy


def test_several_nodes_without_a_route_are_refused(monkeypatch):
    monkeypatch.setenv(network.NODES_VARIABLE, "localhost ip6-localhost.invalid")
    with pytest.raises(SetupError, match="no route") as caught:
        own_address()
    assert network.INTERFACE_VARIABLE in caught.value.remedy


def test_an_address_is_waited_for(tmp_path):
    path = tmp_path / "rollout-0.json"
    threading.Timer(0.1, Endpoint("10.0.0.1", 7, "secret").write, [path]).start()
    assert wait_for_endpoint(path, 20) == Endpoint("10.0.0.1", 7, "secret")
    assert path.stat().st_mode & 0o077 == 0


def test_nobody_waits_for_a_process_that_has_ended(tmp_path):
    with pytest.raises(EngineError, match="rollout-1 ended before"):
        wait_for_endpoint(tmp_path / "rollout-1.json", 3600, lambda: False, EngineError)
    with pytest.raises(TrainerError, match=r"nobody published trainer\.json"):
        wait_for_endpoint(tmp_path / "trainer.json", 0)


def test_a_reserved_port_is_free_for_its_server_only():
    port = _inherited_port("127.0.0.1")
    with socket.socket() as other, pytest.raises(OSError):
        other.bind(("127.0.0.1", port))
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", port))
        server.listen()
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            pass


def test_every_attempt_has_logs_of_its_own(tmp_path):
    first = RunDir(tmp_path).begin()
    (first.endpoints / "old.json").touch()
    second, job = RunDir(tmp_path).begin(), RunDir(tmp_path).begin("77.1")
    assert [r.logs.name for r in (first, second, job)] == ["1", "2", "77.1"]
    assert (tmp_path / "logs/latest").resolve() == job.logs
    assert not list(tmp_path.rglob("old.json"))  # addresses of an earlier attempt mislead
    assert RunDir(tmp_path).begin().attempt == "3"


def test_a_copied_run_begins_again(tmp_path):
    """`cp -rL`, or copies by way of an object store, make a folder of the link."""
    RunDir(tmp_path / "run").begin()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    again = RunDir(tmp_path / "copy").begin()
    assert again.attempt == "2" and (tmp_path / "copy/logs/latest").readlink() == Path("2")
