"""Learned rewards behind an OpenAI-compatible server: a judge that writes, a model that scores. One
that fails, takes longer than `timeout_s` or gives no score makes the sample unscorable."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp

from grpo_megatron.errors import RewardError

_RUBRIC = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").removesuffix("\n")
_SCORE = re.compile(r"^\W*(\d+)\W*:\W*(\d+(?:\.\d+)?)", re.MULTILINE)


async def judge(
    completion: str,
    answer: str,
    *,
    prompt: str,
    url: str,
    model: str,
    criteria: Sequence[str] = ("The response is correct.",),
    template: str = _RUBRIC,
    timeout_s: float = 60.0,
    attempts: int = 2,
    max_tokens: int = 512,
) -> float:
    """A rubric-based generative reward in [0, 1]: the mean over `criteria` of what a chat model
    says. `template` has the fields criteria, prompt, answer and completion; the reply has to score
    every criterion. RewardError after `attempts` replies that do not."""
    listed = "\n".join(f"{number}. {text}" for number, text in enumerate(criteria, 1))
    text = template.format(criteria=listed, prompt=prompt, answer=answer, completion=completion)
    body = {
        "model": model,
        "temperature": 0.0,
        "max_tokens": max_tokens,
        "messages": [{"role": "user", "content": text}],
    }
    for _ in range(attempts):
        reply = await _post(f"{url}/v1/chat/completions", body, timeout_s)
        said = reply["choices"][0]["message"]["content"] or ""
        scores = _scores(said, len(criteria))
        if scores:
            return sum(scores) / (10 * len(criteria))
    raise RewardError(f"the judge did not score every criterion: {said[:200]!r}", where=url)


def _scores(reply: str, num_criteria: int) -> list[float]:
    """One score in [0, 10] for each criterion, in order; empty where one lacks it."""
    by_number = {}
    for number, score in _SCORE.findall(reply):
        by_number[int(number)] = float(score)
    scores = []
    for number in range(1, num_criteria + 1):
        score = by_number.get(number)
        if score is None or not 0 <= score <= 10:
            return []
        scores.append(score)
    return scores


async def reward_model(
    completion: str,
    answer: str,
    *,
    prompt: str,
    url: str,
    model: str,
    scale: float = 1.0,
    shift: float = 0.0,
    timeout_s: float = 60.0,
) -> float:
    """`(score - shift) * scale` of a reward model's scalar, by a vLLM server's `/pooling` route."""
    reply = await _post(f"{url}/pooling", {"model": model, "input": prompt + completion}, timeout_s)
    score = reply["data"][0]["data"]
    while isinstance(score, list):
        [score] = score
    return (float(score) - shift) * scale


async def _post(url: str, body: dict[str, Any], timeout_s: float) -> Any:
    limit = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with (
            aiohttp.ClientSession(timeout=limit) as session,
            session.post(url, json=body) as response,
        ):
            if response.status != 200:
                raise RewardError(f"{response.status}: {(await response.text())[:200]}", where=url)
            return await response.json()
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise RewardError(f"no answer: {type(error).__name__} {error}", where=url) from error
