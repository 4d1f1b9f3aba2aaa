"""What a cold start trains: answers of a data set, and episodes that the recipe demonstrates."""

import contextlib
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import TurnTemplate
from grpo_megatron.data.dataset_answers import (
    ROWS_LOOKED_AT,
    DatasetAnswers,
    end_of_turn,
    unsampled,
)
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.rollout.episode_domains import OpenEnvironment, episode_domains
from grpo_megatron.rollout.episodes import EpisodePlayer, EpisodeSeeds
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.types import Completion, Prompt

logger = logging.getLogger(__name__)

_TRIES = 3
"""Of an episode that cannot be scored."""


class _Demonstrator(EpisodePlayer):
    """Plays episodes that are compared with no others: one of a prompt may be played again."""

    def require_same_beginning(self, *_: object) -> None:
        """See `EpisodePlayer`; any beginning is right."""


class Demonstrations:
    """The completion of any prompt. In a domain with an environment it is played: the environment
    replies to the turns of `environment.demonstration`, as it would to the policy's."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: TextTokenizer,
        tokenizer_directory: Path,
        open_environment: OpenEnvironment,
    ):
        self._config = config
        self._tokenizer = tokenizer
        self._answers = DatasetAnswers(config.domains, tokenizer, config.rollout.max_model_len)
        in_whole_turns = config.model_copy(
            update={"rollout": config.rollout.model_copy(update={"segment_tokens": None})}
        )
        self._episodes = episode_domains(
            in_whole_turns, tokenizer, tokenizer_directory, open_environment, _Demonstrator
        )
        self._turns: dict[str, _Turns] = {}
        for domain in config.domains:
            if domain.environment is not None:
                self._turns[domain.name] = _Turns(
                    domain, domain.environment.demonstration, tokenizer
                )

    async def completion(self, prompt: Prompt) -> Completion:
        """Return what is trained for a prompt. No policy sampled it, so its log-probs count as
        unusable. Raises DataError where a demonstrated episode is no success."""
        if prompt.domain not in self._turns:
            return self._answers.first(0, prompt)
        turns = self._turns[prompt.domain]
        played = await self._played(turns, prompt)
        if math.isnan(played.outcome):
            raise DataError(
                f"the demonstrated episode of prompt {prompt.prompt_id} could not be scored, "
                f"{_TRIES} times: {played.text!r}",
                where=turns.where,
                remedy="see what the environment says in logs/latest/demonstrations.log; where it "
                "is too slow here, raise its time limits (step_s, and those of its arguments)",
            )
        if not played.outcome > 0:
            raise DataError(
                f"the demonstrated episode of prompt {prompt.prompt_id} is worth "
                f"{played.outcome:g}: {played.text!r}",
                where=turns.where,
                remedy="demonstrate what solves the problem; the question was "
                f"{prompt.question!r}, the answer {prompt.answer!r}",
            )
        return played

    async def _played(self, turns: "_Turns", prompt: Prompt) -> Completion:
        """Return the demonstrated episode. Where the environment failed, which is not the
        demonstration's fault, it is played again."""
        played = await self._played_once(turns, prompt)
        for _ in range(_TRIES - 1):
            if not math.isnan(played.outcome):
                break
            played = await self._played_once(turns, prompt)
        return played

    async def _played_once(self, turns: "_Turns", prompt: Prompt) -> Completion:
        return await self._episodes[prompt.domain].play(
            turns.answering(prompt),
            prompt,
            EpisodeSeeds(derive_seed(self._config.seed, prompt.prompt_id), None),
            self._config.rollout.max_model_len,
        )


def _warn_of_cut_answers(
    config: RunConfig, domain: DomainConfig, answers: DatasetAnswers, prompts: Sequence[Prompt]
) -> None:
    looked_at = prompts[:ROWS_LOOKED_AT]
    num_cut = 0
    with contextlib.suppress(DataError):  # of a text that may never be trained
        num_cut = sum(answers.num_cut(looked_at, of_first=True))
    if num_cut:
        logger.warning(
            "domain %r: of the first %d prompts, %d have an answer that is longer than "
            "rollout.max_model_len (%d) with its end, and is trained up to there, without an end, "
            "in the cold start",
            domain.name,
            len(looked_at),
            num_cut,
            config.rollout.max_model_len,
        )


def demonstrated(
    config: RunConfig, tokenizer: TextTokenizer, prompts: Mapping[str, Sequence[Prompt]]
) -> dict[str, tuple[Prompt, ...]]:
    """Return the prompts, by domain, that a cold start can train: without those whose answer is
    empty, as it may be where tests or a judge grade it. The log counts them; RL has them.

    Raises DataError where no domain with a weight has one."""
    answers = DatasetAnswers(config.domains, tokenizer, config.rollout.max_model_len)
    found = {}
    for domain in config.domains:
        of_domain = tuple(prompts.get(domain.name, ()))
        if domain.environment is None and domain.weight:
            of_domain = tuple(prompt for prompt in of_domain if answers.has_first(prompt))
        num_left_out = len(prompts.get(domain.name, ())) - len(of_domain)
        if num_left_out:
            logger.warning(
                "domain %r: %d of %d prompts have an empty answer, and are not trained in the cold "
                "start",
                domain.name,
                num_left_out,
                num_left_out + len(of_domain),
            )
        if domain.environment is None and domain.weight:
            _warn_of_cut_answers(config, domain, answers, of_domain)
        if of_domain:
            found[domain.name] = of_domain
    if not any(domain.weight and domain.name in found for domain in config.domains):
        raise DataError(
            "the cold start has nothing to train: the answers of all prompts are empty",
            where="[cold_start]",
            remedy="give rows an answer or responses, domains a response_template, or leave the "
            "cold start out",
        )
    return found


class _Turns:
    """The demonstrated turns of a domain."""

    def __init__(self, domain: DomainConfig, texts: Sequence[str], tokenizer: TextTokenizer):
        self.where = f"[[domains]] {domain.name}, environment.demonstration"
        self._templates = [TurnTemplate(text, where=self.where) for text in texts]
        self._end = end_of_turn(domain, tokenizer)
        self._tokenizer = tokenizer

    def answering(self, prompt: Prompt) -> Ask:
        """Answers one request after the other, like an engine that samples these turns."""
        left = iter(self._templates)

        async def ask(token_ids: Sequence[int], **settings: Any) -> list[Completion]:
            template = next(left, None)
            if template is None:
                raise DataError(
                    f"the environment goes on behind the last of {len(self._templates)} "
                    f"demonstrated turns (prompt {prompt.prompt_id})",
                    where=self.where,
                    remedy="demonstrate turns up to the end of the episode",
                )
            text = template.response(prompt.question, prompt.answer, prompt.metadata)
            ids = [*self._tokenizer.encode(text, where=self.where), *self._end]
            if len(ids) > settings["max_tokens"]:
                raise DataError(
                    f"a demonstrated turn has {len(ids)} tokens, and {settings['max_tokens']} are "
                    f"left to it (prompt {prompt.prompt_id})",
                    where=self.where,
                    remedy="shorten it, or raise turn_tokens, episode_tokens or max_model_len",
                )
            return [unsampled(ids, 0, "stop", text)]

        return ask
