"""Agents that are coroutines; the question says what they do."""

from __future__ import annotations

import asyncio
import math
import os
import time

from openai import AsyncOpenAI

from grpo_megatron.environments.agent_function import ClientSettings
from grpo_megatron.types import Problem


async def agent(problem: Problem, client: ClientSettings, *, worth: float = 1.0):
    if problem.question == "silent":
        return 1.0
    async with AsyncOpenAI(
        base_url=client.base_url, api_key=client.api_key, max_retries=0
    ) as openai:
        question = {"role": "user", "content": problem.question}
        answer = await openai.chat.completions.create(model=client.model, messages=[question])
        while problem.question == "on":  # until it is refused
            await openai.chat.completions.create(model=client.model, messages=[question])
    if problem.question == "cancelled":
        raise asyncio.CancelledError
    if problem.question == "nan":
        return math.nan
    if problem.question == "crash":
        raise ValueError("this function is broken")
    if problem.question == "exit":
        os._exit(3)
    if problem.question == "block":
        time.sleep(1000)
    if problem.question == "wait":
        await asyncio.sleep(1000)
    if problem.question == "no reward":
        return None
    if problem.question == "garbage":
        return "high"
    assert problem.metadata["kind"] == "test"
    return worth * (answer.choices[0].message.content == problem.answer)


def not_async(problem, client):
    return 1.0
