"""Judges and reward models behind a server: scores, and failures that are no zeros."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.judge import judge, reward_model


def served(replies: list, reward, **arguments):
    """`reward` against a server that gives `replies` in turn; also what it was asked."""
    asked = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        reply = replies[min(len(asked), len(replies)) - 1]
        if isinstance(reply, int):
            return web.Response(status=reply, text="overloaded")
        if reply is None:
            await asyncio.sleep(2)
        return web.json_response(reply)

    async def run() -> float:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", answer)
        app.router.add_post("/pooling", answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = site._server.sockets[0].getsockname()[1]
        try:
            return await reward(
                "{42}",
                "42",
                prompt="6 * 7 = {x}",
                model="m",
                url=f"http://127.0.0.1:{port}",
                **arguments,
            )
        finally:
            await runner.cleanup()

    return asyncio.run(run()), asked


def said(text: str) -> dict:
    return {"choices": [{"message": {"content": text}}]}


def test_a_rubric_is_the_mean_of_its_criteria():
    value, [request] = served([said("1: 10\n2: 5")], judge, criteria=["right", "short"])
    assert value == pytest.approx(0.75)
    text = request["messages"][0]["content"]
    assert all(part in text for part in ("1. right", "2. short", "6 * 7 = {x}", "{42}"))
    json.dumps(request)


def test_a_reply_without_every_score_is_asked_for_again():
    value, asked = served([said("fine!"), said("1: 4")], judge)
    assert (value, len(asked)) == (0.4, 2)


@pytest.mark.parametrize("replies", [[said("1: 11")], [said("no")], [503], [None]])
def test_a_failing_judge_is_an_error(replies):
    with pytest.raises(RewardError):
        served(replies, judge, timeout_s=0.5)


def test_a_reward_model_is_scaled():
    value, [request] = served([{"data": [{"data": [3.0]}]}], reward_model, shift=1.0, scale=0.5)
    assert value == 1.0 and request["input"] == "6 * 7 = {x}{42}"
