"""A publish that arrives in a thread: all of it is given away, or what ended it is raised."""

from __future__ import annotations

import pytest

from grpo_megatron.errors import TransferError
from grpo_megatron.rollout.plugin.staged_publish import StagedPublish


class Receiver:
    """Receives two buckets, and ends by `error` where there is one."""

    def __init__(self, error: Exception | None = None):
        self.error = error
        self.publishes: list[int] = []

    def receive(self, publish, load):
        self.publishes.append(publish)
        load(["first"])
        load(["second"])
        if self.error is not None:
            raise self.error


def test_buckets_are_given_in_their_order_and_once():
    receiver = Receiver()
    staged = StagedPublish(receiver, 3)
    assert list(staged.take()) == [["first"], ["second"]]
    assert list(staged.take()) == []
    assert receiver.publishes == [3]


@pytest.mark.parametrize("error", [TransferError("a sender left"), MemoryError("no room")])
def test_half_a_publish_is_none(error):
    staged = StagedPublish(Receiver(error), 1)
    with pytest.raises(type(error), match=str(error)):
        next(staged.take())
