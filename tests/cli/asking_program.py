"""Agent programs that start faster than OpenAI's client.

`python asking_program.py DEED`, with the problem as JSON on standard input, does what DEED says;
`broken` is one that is a function."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import Request, urlopen


def ask(*texts: str, base_url: str = "", api_key: str = "") -> str:
    """The reply to a conversation, in which the user has the first word. Address and key are by
    default those of the environment's variables."""
    base_url = base_url or os.environ["OPENAI_BASE_URL"]
    api_key = api_key or os.environ["OPENAI_API_KEY"]
    messages = []
    for number, text in enumerate(texts):
        messages.append({"role": ("user", "assistant")[number % 2], "content": text})
    request = Request(
        base_url + "/chat/completions",
        json.dumps({"model": "any", "messages": messages}).encode(),
        {
            "Authorization": f"Bearer {api_key}",
            "Content-Type": "application/json",
        },
    )
    with urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


async def broken(problem, client):
    settings = {"base_url": client.base_url, "api_key": client.api_key}
    await asyncio.to_thread(ask, problem.question, **settings)
    raise ValueError("this function is broken")


def main(deed: str) -> None:
    question = json.load(sys.stdin)["question"]
    if deed == "silent":
        return
    said = [question, ask(question)]
    if deed == "crash":
        raise ValueError("this program is broken")
    if deed == "together":  # two more conversations, asked side by side
        with ThreadPoolExecutor() as threads:
            replies = list(threads.map(ask, ["one", "two"]))
        print(json.dumps({"reward": float(replies == ["left", "left"])}))
    while deed == "on":  # until it is refused
        said += ["and then?", ask(*said, "and then?")]


if __name__ == "__main__":
    main(sys.argv[1])
