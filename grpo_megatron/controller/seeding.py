"""In-context seeding (XRPO, arXiv:2510.06672): solved questions before one that is all wrong.

What is sampled on a seeded prompt is trained on it: its completions name the tokens that they
answer (`Completion.answered_ids`)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.config.allocation import SeedingConfig
from grpo_megatron.config.layouts import fill
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.exemplars import Exemplar, ExemplarStore
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.data.conversation import opening_of
from grpo_megatron.data.prompt_text import PromptRenderer
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt, ScoredGroup


class Seeding:
    """`[seeding]` of one run, `settings`; draws on `exemplars` and adds to them.

    Raises DataError where the tokenizer cannot write the layouts."""

    def __init__(
        self,
        config: RunConfig,
        settings: SeedingConfig,
        *,
        exemplars: ExemplarStore,
        group_filter: GroupFilter,
        tokenizer: TextTokenizer,
    ):
        empty = {"question": "", "answer": ""}
        tokenizer.encode(fill(settings.exemplar, empty), where="seeding.exemplar")
        tokenizer.encode(fill(settings.question, empty), where="seeding.question")
        self._config = config
        self._settings = settings
        self._exemplars = exemplars
        self._filter = group_filter
        self._tokenizer = tokenizer
        self._renderers: dict[str, PromptRenderer] = {}
        self._prefixes: dict[str, str] = {}
        for domain in config.domains:
            self._renderers[domain.name] = PromptRenderer(domain, tokenizer.chat_template)
            self._prefixes[domain.name] = domain.assistant_prefix
        self._num_shortened = 0
        self._num_no_room = 0
        self._num_no_exemplars = 0

    def is_wanted(self, group: ScoredGroup) -> bool:
        """Whether a completion was scored and none is right."""
        correct = self._filter.correct(group)
        is_scored = ~np.isnan(correct)
        return bool(is_scored.any()) and not bool((correct == 1).any())

    def seeded(self, prompt: Prompt) -> Prompt:
        """Return the prompt with as many exemplars as fit beside the longest completion, the most
        similar first; as it is, and counted, where there are none or none fits."""
        exemplars = self._exemplars.similar(
            prompt.domain, prompt.prompt_id, prompt.question, self._settings.num_exemplars
        )
        if not exemplars:
            self._num_no_exemplars += 1
            return prompt
        room = self._config.rollout.max_model_len - self._config.max_new_tokens_of(prompt.domain)
        for count in range(len(exemplars), 0, -1):
            token_ids = self._token_ids(prompt, exemplars[:count])
            if len(token_ids) <= room:
                if count < len(exemplars):
                    self._num_shortened += 1
                return replace(prompt, token_ids=tuple(token_ids))
        self._num_no_room += 1
        return prompt

    def _token_ids(self, prompt: Prompt, exemplars: Sequence[Exemplar]) -> list[int]:
        settings = self._settings

        def rephrase(question: str) -> str:
            text = ""
            for exemplar in exemplars:
                values = {"question": exemplar.question, "answer": exemplar.answer}
                text += fill(settings.exemplar, values)
            return text + fill(settings.question, {"question": question, "answer": ""})

        text = self._renderers[prompt.domain].rephrased(prompt, rephrase)
        return self._tokenizer.encode(text, where=f"a seeded prompt of {prompt.prompt_id}")

    def finish_step(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Remember right answers of the step's groups, for later steps; returns its metrics."""
        solved = []  # of every seeded prompt, whether it was
        right = []  # of every sample of them
        for group in groups:
            correct = self._filter.correct(group)
            seeded = np.array([c.answered_ids is not None for c in group.group.completions])
            if seeded.any():
                solved.append(bool((correct[seeded] == 1).any()))
                right += (correct[seeded] == 1).tolist()
            self._remember(group, correct)
        metrics = {
            "seeding/prompts": float(len(solved)),
            "seeding/samples": float(len(right)),
            "seeding/shortened": float(self._num_shortened),
            "seeding/no_room": float(self._num_no_room),
            "seeding/no_exemplars": float(self._num_no_exemplars),
            "seeding/store_size": float(len(self._exemplars)),
        }
        if solved:
            metrics["seeding/solved_fraction"] = float(np.mean(solved))
            metrics["seeding/correct_fraction"] = float(np.mean(right))
        self._num_shortened = 0
        self._num_no_room = 0
        self._num_no_exemplars = 0
        return metrics

    def _remember(self, group: ScoredGroup, correct: np.ndarray) -> None:
        """The shortest right answer of a group that can stand in a prompt."""
        prompt = group.group.prompt
        candidates = []
        for sample in np.flatnonzero(correct == 1).tolist():
            completion = group.group.completions[sample]
            length = completion.num_policy_tokens
            if completion.truncated or length > self._settings.max_answer_tokens:
                continue
            text = completion.text.strip()
            if text and self._can_be_written(text):
                candidates.append((length, sample, text))
        if not candidates:
            return
        _, _, text = min(candidates)
        opening = opening_of(prompt.text, self._prefixes[prompt.domain])
        answer = (opening + text).strip()
        self._exemplars.remember(prompt.domain, Exemplar(prompt.prompt_id, prompt.question, answer))

    def _can_be_written(self, text: str) -> bool:
        """Whether the tokenizer has tokens for a decoded text: bytes may have made no character."""
        try:
            self._tokenizer.encode(text)
        except DataError:
            return False
        return True
