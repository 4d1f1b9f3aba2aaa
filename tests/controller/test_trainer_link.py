"""The command connection: order, errors, impostors, a trainer that goes away."""

from __future__ import annotations

import asyncio
import json

import pytest

from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.errors import CheckpointError, MismatchError, TrainerError
from grpo_megatron.network import Endpoint
from grpo_megatron.trainer.protocol import encode, error_reply, raise_reply


async def trainer(path, answer, token=None):
    """A rank 0 that answers every command with `answer(command)`; None hangs up."""
    endpoint = Endpoint.read(path)
    reader, writer = await asyncio.open_connection(endpoint.host, endpoint.port)
    writer.write(encode({"token": token or endpoint.token, "role": "trainer"}))
    while line := await reader.readline():
        reply = answer(json.loads(line))
        if reply is None:
            break
        writer.write(encode(reply))
    writer.close()


def link_with(tmp_path, answer, use, timeout_s=20.0):
    async def run():
        link = TrainerLink(timeout_s)
        await link.listen(tmp_path / "controller.json")
        other = asyncio.create_task(trainer(tmp_path / "controller.json", answer))
        try:
            return await use(link)
        finally:
            other.cancel()

    return asyncio.run(run())


def test_commands_are_answered_in_order(tmp_path):
    seen = []

    def answer(message):
        seen.append(message["command"])
        return {"result": {"echo": message["arguments"]}}

    async def use(link):
        return await asyncio.gather(*(link.call(f"c{i}", i=i) for i in range(5)))

    results = link_with(tmp_path, answer, use)
    assert [r["echo"]["i"] for r in results] == list(range(5))
    assert seen == [f"c{i}" for i in range(5)]
    assert (tmp_path / "controller.json").stat().st_mode & 0o77 == 0


def test_errors_keep_their_class(tmp_path):
    error = MismatchError("digest", where="here", remedy="there")
    with pytest.raises(MismatchError, match="digest") as caught:
        link_with(tmp_path, lambda m: error_reply(error), lambda link: link.call("publish_send"))
    assert (caught.value.where, caught.value.remedy) == ("here", "there")
    with pytest.raises(TrainerError, match="ZeroDivisionError"):
        raise_reply(error_reply(ZeroDivisionError("x")))
    with pytest.raises(CheckpointError):
        raise_reply(error_reply(CheckpointError("gone")))


def test_a_trainer_that_goes_away_is_an_error(tmp_path):
    with pytest.raises(TrainerError, match="went away during 'train'"):
        link_with(tmp_path, lambda m: None, lambda link: link.call("train"))


def test_strangers_are_turned_away(tmp_path):
    async def run():
        link = TrainerLink(0.3)
        await link.listen(tmp_path / "c.json")
        await asyncio.wait_for(trainer(tmp_path / "c.json", lambda m: {}, token="guess"), 10)
        return link._connected.done()

    assert asyncio.run(run()) is False


def test_a_cancelled_call_leaves_no_answer_for_the_next_one(tmp_path):
    """An engine died: the controller goes on before the trainer has found out."""

    async def use(link):
        sending = asyncio.create_task(link.call("publish_send"))
        while not link._unanswered:
            await asyncio.sleep(0)
        sending.cancel()
        return [await link.call(name) for name in ("publish_open", "train")]

    answers = link_with(tmp_path, lambda message: {"result": {"to": message["command"]}}, use)
    assert answers == [{"to": "publish_open"}, {"to": "train"}]
