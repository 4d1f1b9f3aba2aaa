"""Where the responses of a data set are trained, it answers in the place of the engines."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan


class DatasetAnswers:
    """A group is a prompt with all of its responses: the field `responses` of its row, or else its
    one answer. Nobody sampled them, so that their log-probs count as unusable.

    `longest` tokens are kept of one, the stop token included."""

    def __init__(self, tokenizer: TextTokenizer, longest: int):
        self._tokenizer = tokenizer
        self._longest = longest

    async def rollouts(self, step: int, prompts: Sequence[Prompt]) -> list[RolloutGroup]:
        return [
            RolloutGroup(
                prompt,
                tuple(
                    self.completion(step, text)
                    for text in prompt.metadata.get("responses") or [prompt.answer]
                ),
                0,
            )
            for prompt in prompts
        ]

    def completion(self, step: int, text: str) -> Completion:
        tokens = [*self._tokenizer.encode(text), self._tokenizer.eos_token_id]
        whole = len(tokens) <= self._longest
        ids = np.asarray(tokens[: self._longest], np.int32)
        return Completion(
            ids,
            np.full(len(ids), -np.inf, np.float32),
            (VersionSpan(step, 0, len(ids)),),
            "stop" if whole else "length",
            text,
        )
