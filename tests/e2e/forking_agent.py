"""An agent that goes on, forks and edits, with the public client only."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI


async def agent(problem, client):
    question = {"role": "user", "content": problem.question}
    async with AsyncOpenAI(base_url=client.base_url, api_key=client.api_key) as openai:

        async def ask(*messages):
            answer = await openai.chat.completions.create(model=client.model, messages=messages)
            return answer.choices[0].message

        first = await ask(question)
        again = {"role": "user", "content": "again"}
        left, right = await asyncio.gather(
            ask(question, first, again), ask(question, first, {"role": "user", "content": "so"})
        )
        edited = {"role": "assistant", "content": "12"}
        last = await ask(question, edited, again)
    if "1" in (first.content or ""):
        raise ValueError("some episodes cannot be scored")
    texts = [message.content or "" for message in (first, left, right, last)]
    digits = sum(letter.isdigit() for text in texts for letter in text)
    return digits / 10
