"""A policy that says what a test wants, and readers of calls without vLLM's parsers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence

import numpy as np

from grpo_megatron.data.turn_proof import prove
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.environments.protocol import Reply, ToolCall
from grpo_megatron.rollout.tool_parsers import ReadReply
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler
from grpo_megatron.types import Completion, VersionSpan

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>'
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
    },
}


def limits(**changes) -> EpisodeLimits:
    usual = {"max_turns": 8, "turn_tokens": None, "episode_tokens": 400, "max_model_len": 512}
    return EpisodeLimits(**{**usual, "seconds": 60, **changes})


def read_reply(text: str, tools, turn: int) -> ReadReply:
    """Of calls as Hermes writes them; the import of vLLM's parsers takes ten seconds."""
    found = re.fullmatch(r"(?s)(.*)<tool_call>\n(.*)\n</tool_call>", text)
    if not found or not tools:
        return ReadReply(Reply(text), {"role": "assistant", "content": text})
    call = json.loads(found[2])
    call_id = f"t{turn:04d}c000"
    function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
    message = {
        "role": "assistant",
        "content": found[1],
        "tool_calls": [{"type": "function", "id": call_id, "function": function}],
    }
    read = ToolCall(call["name"], call["arguments"], call_id)
    return ReadReply(Reply(found[1], (read,)), message)


def sampler_of(tokenizer) -> TurnSampler:
    def turn_tokens(tools):
        turns = TurnTokens(tokenizer, tokenizer.chat_template, tools=tools)
        prove(turns)
        return turns

    return TurnSampler(turn_tokens=turn_tokens, read_reply=read_reply, decode=tokenizer.decode)


class Policy:
    """Says these texts, one a request, and remembers what it was asked and what it sampled."""

    def __init__(self, tokenizer, *texts: str, delays: Sequence[float] = ()):
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.delays = list(delays)
        self.asked: list[tuple[list[int], dict]] = []
        self.sampled: list[list[int]] = []
        self.running = self.most_running = 0

    async def __call__(self, token_ids: Sequence[int], **settings) -> list[Completion]:
        number = len(self.asked)
        self.asked.append((list(token_ids), settings))
        self.sampled.append([])
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            if number < len(self.delays):
                await asyncio.sleep(self.delays[number])
        finally:
            self.running -= 1
        return [self._completion(number, settings["max_tokens"])]

    def _completion(self, number: int, max_tokens: int) -> Completion:
        text = self.texts[number % len(self.texts)]
        ids = [*self.tokenizer.encode(text), *self.tokenizer.encode("<|end|>")]
        finish = "stop"
        if len(ids) > max_tokens:
            finish = "length"
            ids = ids[:max_tokens]
        self.sampled[number] = ids
        return Completion(
            np.array(ids, np.int32),
            np.full(len(ids), -0.5, np.float32),
            (VersionSpan(number, 0, len(ids)),),
            finish,
            "",
        )


def require_as_sampled(policy: Policy, found: Completion) -> None:
    """Every turn of the record answers exactly the ids of a request, with the ids sampled for it;
    every request that was answered is one turn."""
    turns = []
    for sequence in found.sequences:
        ids = sequence.token_ids.tolist()
        for turn in sequence.turns:
            before = [*sequence.answered_ids, *ids[: turn.start]]
            turns.append((before, ids[turn.start : turn.end]))
    asked = []
    for (before, _), sampled in zip(policy.asked, policy.sampled, strict=True):
        if sampled:
            asked.append((before, sampled))
    assert sorted(turns) == sorted(asked)
