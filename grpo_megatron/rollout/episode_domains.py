"""The domains of a recipe whose prompts are answered in turns with an environment."""

from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.data.turn_proof import prove
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.environments.protocol import Environment, ToolSchema
from grpo_megatron.rollout.episodes import EpisodePlayer, EpisodeSeeds
from grpo_megatron.rollout.reply_reader import ReplyReader
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.turn_sampler import EpisodeLimits
from grpo_megatron.types import Completion, Problem, Prompt

OpenEnvironment = Callable[[str], Environment]
"""Domain -> an environment for one episode of it."""


class EpisodeDomain:
    """Plays the episodes of one domain."""

    def __init__(
        self,
        config: RunConfig,
        domain: DomainConfig,
        settings: EnvironmentConfig,
        tokenizer: TextTokenizer,
        tokenizer_directory: Path,
        open_environment: OpenEnvironment,
    ):
        template = tokenizer.chat_template
        assert template is not None  # rule environment_template, and PromptRenderer
        self._config = config
        self._domain = domain
        self._settings = settings
        self._tokenizer = tokenizer
        self._template = template
        self._open_environment = open_environment
        self._player = EpisodePlayer(
            turn_tokens=self._turn_tokens,
            read_reply=ReplyReader(settings.tool_format, template, tokenizer_directory),
            decode=tokenizer.decode,
            segment_tokens=config.rollout.segment_tokens,
        )

    async def play(
        self, ask: Ask, prompt: Prompt, seeds: EpisodeSeeds, max_tokens: int
    ) -> Completion:
        """Play an episode of at most `max_tokens` behind its prompt. Errors as of
        `EpisodePlayer.play`."""
        settings = self._settings
        episode_tokens = max_tokens
        if settings.episode_tokens is not None:
            episode_tokens = min(settings.episode_tokens, max_tokens)
        limits = EpisodeLimits(
            max_turns=settings.max_turns,
            turn_tokens=settings.turn_tokens,
            episode_tokens=episode_tokens,
            max_model_len=self._config.rollout.max_model_len,
            seconds=settings.episode_s,
        )
        problem = Problem(prompt.question, prompt.answer, prompt.metadata)
        environment = self._open_environment(self._domain.name)
        return await self._player.play(ask, environment, problem, seeds, limits)

    def _turn_tokens(self, tools: Sequence[ToolSchema]) -> TurnTokens:
        turns = TurnTokens(
            self._tokenizer,
            self._template,
            arguments=self._domain.template_arguments,
            tools=tools,
            day=self._domain.template_date,
            assistant_prefix=self._domain.assistant_prefix,
        )
        prove(turns)
        return turns


def episode_domains(
    config: RunConfig,
    tokenizer: TextTokenizer,
    tokenizer_directory: Path,
    open_environment: OpenEnvironment,
) -> dict[str, EpisodeDomain]:
    """Those of `config`, by name. tokenizer_directory: where the tokenizer was loaded from."""
    found = {}
    for domain in config.domains:
        if domain.environment is not None:
            found[domain.name] = EpisodeDomain(
                config,
                domain,
                domain.environment,
                tokenizer,
                tokenizer_directory,
                open_environment,
            )
    return found
