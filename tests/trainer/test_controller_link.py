"""Rank 0's connection to a controller that has died: the rank ends, and does not crash."""

from __future__ import annotations

import socket
import struct

import pytest

from grpo_megatron.network import Endpoint
from grpo_megatron.trainer.requests import Stop
from grpo_megatron.trainer.trainer_rank import ControllerLink


@pytest.fixture
def connected():
    """A link, and the controller's side of it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        link = ControllerLink(Endpoint("127.0.0.1", server.getsockname()[1], "token"))
        controller, _ = server.accept()
        with controller:
            yield link, controller


@pytest.mark.parametrize("is_reset", [False, True])
def test_a_controller_that_has_gone_is_a_stop(connected, is_reset):
    link, controller = connected
    if is_reset:  # as by a process that was killed with messages unread
        controller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    controller.close()
    for _ in range(3):  # the first one may still find the connection open
        link.send({"result": None})
    assert isinstance(link.receive(60), Stop)


def test_a_controller_that_went_before_the_rank_came_is_a_stop():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    link = ControllerLink(Endpoint("127.0.0.1", port, "token"))
    link.send({"result": None})
    assert isinstance(link.receive(60), Stop)


def test_without_a_request_there_is_none(connected):
    link, _ = connected
    assert link.receive(0.01) is None
