"""Whom the writer of lessons asks: a served model, or the policy itself."""

import asyncio
from collections.abc import Sequence

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.secret_values import from_environment
from grpo_megatron.controller.experience.writer import AskModel
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError, RewardError
from grpo_megatron.rewards.served import Attempts, post
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.types import Prompt


def writer_of(
    config: RunConfig,
    settings: ExperienceConfig,
    *,
    dispatcher: ChunkDispatcher,
    tokenizer: TextTokenizer,
) -> AskModel:
    """Return what asks the model that `[experience]` names. DataError: it is the policy, whose
    tokenizer has no chat template."""
    if settings.writer_url is not None:
        return ServedWriter(settings, settings.writer_url)
    return PolicyWriter(config, settings, dispatcher=dispatcher, tokenizer=tokenizer)


class ServedWriter:
    """Asks a model behind `url`, as OpenAI's API has it.

    Raises ConfigError: the environment lacks the key that `[experience]` names."""

    def __init__(self, settings: ExperienceConfig, url: str):
        self._settings = settings
        self._url = f"{url.rstrip('/')}/v1/chat/completions"
        self._api_key: str | None = None
        if settings.writer_api_key is not None:
            self._api_key = from_environment(settings.writer_api_key)

    async def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """As `AskModel`; requests are made at once."""
        return await asyncio.gather(*(self._reply(text) for text in texts))

    async def _reply(self, text: str) -> str | None:
        body = {
            "model": self._settings.writer_model,
            "temperature": self._settings.writer_temperature,
            "max_tokens": self._settings.writer_max_tokens,
            "messages": [{"role": "user", "content": text}],
        }
        attempts = Attempts(self._settings.writer_attempts, self._settings.writer_timeout_s)
        try:
            reply = await post(self._url, body, self._api_key, attempts=attempts)
            content = reply["choices"][0]["message"]["content"]
        except (RewardError, LookupError, TypeError):
            return None
        if not isinstance(content, str):
            return None
        return content


class PolicyWriter:
    """Asks the policy, through the run's engines, with the run's own sampling settings.

    Raises DataError: its tokenizer has no chat template."""

    def __init__(
        self,
        config: RunConfig,
        settings: ExperienceConfig,
        *,
        dispatcher: ChunkDispatcher,
        tokenizer: TextTokenizer,
    ):
        if tokenizer.chat_template is None:
            raise DataError(
                "the policy cannot write lessons: its tokenizer has no chat template",
                where="experience.writer_url",
                remedy="set experience.writer_url and experience.writer_model to a served model",
            )
        self._chat_template = tokenizer.chat_template
        self._domain = config.domains[0]
        self._room = config.rollout.max_model_len - settings.writer_max_tokens
        self._settings = settings
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer

    async def __call__(self, texts: Sequence[str]) -> list[str | None]:
        """As `AskModel`."""
        prompts = []
        places = []
        for place, text in enumerate(texts):
            token_ids = self._token_ids(text)
            if token_ids is None or len(token_ids) > self._room:
                continue
            places.append(place)
            name = self._domain.name
            prompts.append(Prompt(f"lesson-{place}", name, text, tuple(token_ids), ""))
        replies: list[str | None] = [None] * len(texts)
        if not prompts:
            return replies
        groups = await self._dispatcher.rollouts(
            0, prompts, num_samples=1, max_tokens=self._settings.writer_max_tokens
        )
        for place, group in zip(places, groups, strict=True):
            [completion] = group.completions
            replies[place] = completion.text
        return replies

    def _token_ids(self, text: str) -> list[int] | None:
        """None where the tokenizer lacks a character: an answer may have sampled a part of one."""
        rendered = self._chat_template.render(
            [{"role": "user", "content": text}],
            self._domain.template_arguments,
            day=self._domain.template_date,
        )
        try:
            return self._tokenizer.encode(rendered)
        except DataError:
            return None
