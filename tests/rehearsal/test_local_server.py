"""The server that stands in for judges answers what the rewards ask."""

from __future__ import annotations

import asyncio
import json
import urllib.request

from grpo_megatron.rehearsal.local_server import LocalServer
from grpo_megatron.rewards.judge import judge, reward_model
from grpo_megatron.rewards.step_rewards import process_reward_model


def test_rewards_get_scores_from_it():
    with LocalServer() as server:
        assert server.url.startswith("http://127.0.0.1:")
        asked = {"prompt": "2 + 2", "url": server.url, "model": "judge"}
        judged = asyncio.run(judge("4", "4", metadata={}, criteria=["a", "b", "c"], **asked))
        scored = asyncio.run(reward_model("4", "4", prompt="2 + 2", url=server.url, model="m"))
        steps = asyncio.run(process_reward_model("2 + 2\n\n4", "4", **asked))
        assert server.num_judged == 3
    assert 0 <= judged <= 1
    assert -1 <= scored <= 1
    assert [end for end, _ in steps] == [5, 8]
    assert all(0 <= score <= 1 for _, score in steps)


def test_it_agrees_to_sleep_and_wake():
    with LocalServer() as server:
        for route in ("sleep?level=1", "wake_up", "pause", "resume"):
            request = urllib.request.Request(f"{server.url}/{route}", data=b"", method="POST")
            with urllib.request.urlopen(request, timeout=5) as reply:
                assert json.loads(reply.read()) == {}
