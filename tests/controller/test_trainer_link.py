"""The command connection: order, errors, impostors, a trainer that goes away."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.errors import CheckpointError, MismatchError, TrainerError
from grpo_megatron.network import Endpoint
from grpo_megatron.trainer.protocol import encode, error_reply, raise_reply
from grpo_megatron.trainer.requests import ExportModel, LoadCheckpoint, SendWeights

SEND = SendWeights(version=1)
EXPORT = ExportModel(Path("export"))


async def trainer(path, answer, token=None):
    """A rank 0 that answers every request with `answer(request)`; None hangs up."""
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


def test_requests_are_answered_in_order(tmp_path):
    seen = []

    def answer(message):
        seen.append(message["directory"])
        return {"result": {"echo": message["directory"]}}

    async def use(link):
        return await asyncio.gather(*(link.call(LoadCheckpoint(Path(f"c{i}"))) for i in range(5)))

    results = link_with(tmp_path, answer, use)
    assert [answer["echo"] for answer in results] == seen
    assert seen == [f"c{i}" for i in range(5)]
    assert (tmp_path / "controller.json").stat().st_mode & 0o77 == 0


def test_errors_keep_their_class(tmp_path):
    error = MismatchError("digest", where="here", remedy="there")
    with pytest.raises(MismatchError, match="digest") as caught:
        link_with(tmp_path, lambda m: error_reply(error), lambda link: link.call(SEND))
    assert (caught.value.where, caught.value.remedy) == ("here", "there")
    with pytest.raises(TrainerError, match="ZeroDivisionError"):
        raise_reply(error_reply(ZeroDivisionError("x")))
    with pytest.raises(CheckpointError):
        raise_reply(error_reply(CheckpointError("gone")))


def test_a_trainer_that_goes_away_is_an_error(tmp_path):
    with pytest.raises(TrainerError, match="went away during 'ExportModel'"):
        link_with(tmp_path, lambda m: None, lambda link: link.call(EXPORT))


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
        sending = asyncio.create_task(link.call(SEND))
        while not link._unanswered:
            await asyncio.sleep(0)
        sending.cancel()
        return await link.call(EXPORT), await link.call(LoadCheckpoint(Path("c")))

    results = {"SendWeights": {"name": "digest"}, "ExportModel": 7, "LoadCheckpoint": {"step": 3}}
    answers = link_with(tmp_path, lambda message: {"result": results[message["request"]]}, use)
    assert answers == (7, {"step": 3})


def test_an_answer_of_another_type_is_an_error(tmp_path):
    """Both ends are of one version, unless an old trainer is still there."""
    with pytest.raises(TrainerError, match=r"ExportModel.*Expected `int`, got `str`"):
        link_with(tmp_path, lambda m: {"result": "much"}, lambda link: link.call(EXPORT))
