"""Episodes of recorded steps as conversations, for the report."""

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.environment_text import cut
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.tool_calls import (
    begins_call,
    call_format,
    split_thought,
    text_before_calls,
)
from grpo_megatron.errors import ConfigError
from grpo_megatron.stages.token_text import Decode, exact_decoder, text_pieces
from grpo_megatron.types import Turn

TURN_TOKENS = 512
"""Tokens of a turn that are shown."""
LONGEST_TEXT = 4000
"""Characters of a prompt and of what an environment says; of more the middle is left out."""


class Conversations:
    """Shows episodes of a run, whose tokenizer is in `model`."""

    def __init__(self, config: RunConfig, model: Path):
        self._model = model
        self._domains = {domain.name: domain for domain in config.domains}
        self._formats: dict[str, str | None] = {}

    def sequences(
        self, table: SampleTable, episode: int, advantages: np.ndarray
    ) -> list[dict[str, Any]]:
        """Return the sequences of an episode; none where the policy sampled all of it at once.

        Each has its `prompt` as text and its `parts` in order. A part has `length` tokens, and
        either the environment's `text`, or what a turn has: its number `turn` in the episode,
        `tokens` (id, text, advantage), `reward` (NaN: none), `state`, `spoilt`, and `call`, the
        number of the token with which calls of tools begin (None: there are none).

        advantages: fp64, of the episode's policy tokens and what comes after them."""
        rows = table.rows_of(np.array([episode])).tolist()
        if not any(table.turns(row) for row in rows):
            return []
        domain = table.manifest.domains[table.domain[rows[0]]]
        found = []
        num_turns = 0
        for row in rows:
            parts: list[dict[str, Any]] = []
            token_ids, _ = table.completion(row)
            end = 0
            for turn in table.turns(row) or (Turn(0, len(token_ids)),):
                if turn.start > end:
                    parts.append(self._said(token_ids[end : turn.start]))
                end = turn.end
                size = turn.end - turn.start
                part = self._turn(turn, token_ids[turn.start : end], advantages[:size], domain)
                parts.append({"turn": num_turns, **part})
                advantages = advantages[size:]
                num_turns += 1
            prompt = self._said(table.prompt_ids(row))
            found.append(
                {"prompt": prompt["text"], "prompt_length": prompt["length"], "parts": parts}
            )
        return found

    def _said(self, token_ids: np.ndarray) -> dict[str, Any]:
        text = cut(self._decode(token_ids.tolist()), LONGEST_TEXT)
        return {"text": text, "length": len(token_ids)}

    def _turn(
        self, turn: Turn, token_ids: np.ndarray, advantages: np.ndarray, domain: str
    ) -> dict[str, Any]:
        ids = token_ids[:TURN_TOKENS].tolist()
        pieces = text_pieces(ids, self._decode)
        return {
            "tokens": list(zip(ids, pieces, advantages[: len(ids)].tolist(), strict=True)),
            "length": len(token_ids),
            "reward": turn.reward,
            "state": turn.state,
            "spoilt": turn.spoilt,
            "call": _call_token(self._format(domain), pieces),
        }

    @cached_property
    def _decode(self) -> Decode:
        return exact_decoder(self._model)

    def _format(self, domain: str) -> str | None:
        """Return how calls of tools are written there; None where nothing says it."""
        if domain not in self._formats:
            self._formats[domain] = self._found_format(domain)
        return self._formats[domain]

    def _found_format(self, domain: str) -> str | None:
        settings = self._domains[domain].episodes
        if settings is None or not (self._model / "tokenizer.json").exists():
            return None
        template = load_tokenizer(self._model).chat_template
        if template is None:
            return None
        try:
            return call_format(settings.tool_format, template)
        except ConfigError:  # of a model that calls no tools
            return None


def _call_token(format_name: str | None, pieces: list[str]) -> int | None:
    """Return which of the tokens begins the calls of a turn; None: none does."""
    if format_name is None:
        return None
    thought, answer = split_thought(format_name, "".join(pieces))
    if not begins_call(format_name, answer):
        return None
    place = len(thought + text_before_calls(format_name, answer))
    num_characters = 0
    for token, piece in enumerate(pieces):
        num_characters += len(piece)
        if num_characters > place:
            return token
    return None
