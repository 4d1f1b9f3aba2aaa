"""The domains of a recipe whose prompts are answered in turns, to an environment or a program."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from grpo_megatron.config.environment import AgentConfig, EnvironmentConfig, EpisodeConfig
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.environments.failures import Failures
from grpo_megatron.environments.protocol import Environment, ToolSchema
from grpo_megatron.rollout.agent_domains import (
    AgentDomain,
    command_program,
    function_program,
)
from grpo_megatron.rollout.door import Door
from grpo_megatron.rollout.episodes import EpisodePlayer, EpisodeSeeds
from grpo_megatron.rollout.reply_reader import ReplyReader
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler
from grpo_megatron.types import Completion, Problem, Prompt

OpenEnvironment = Callable[[str], Environment]
"""Domain -> an environment for one episode of it."""

_Sampler = TypeVar("_Sampler", bound=TurnSampler)


class EpisodeDomain:
    """Plays the episodes of one domain with its environment. limits: of an episode with that many
    tokens at most."""

    def __init__(
        self,
        player: EpisodePlayer,
        limits: Callable[[int], EpisodeLimits],
        open_environment: Callable[[], Environment],
    ):
        self._player = player
        self._limits = limits
        self._open_environment = open_environment

    async def play(
        self, ask: Ask, prompt: Prompt, seeds: EpisodeSeeds, max_tokens: int
    ) -> Completion:
        """Play an episode of at most `max_tokens` behind its prompt. Errors as of
        `EpisodePlayer.play`."""
        problem = Problem(prompt.question, prompt.answer, prompt.metadata)
        environment = self._open_environment()
        return await self._player.play(ask, environment, problem, seeds, self._limits(max_tokens))

    def take_begun_otherwise(self) -> int:
        """Return how many episodes began otherwise than another of their group since the last
        call."""
        number = self._player.num_begun_otherwise
        self._player.num_begun_otherwise = 0
        return number


class _Domains:
    """Makes the domains of one run."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: TextTokenizer,
        tokenizer_directory: Path,
        open_environment: OpenEnvironment,
    ):
        self._config = config
        self._tokenizer = tokenizer
        self._tokenizer_directory = tokenizer_directory
        self._open_environment = open_environment

    def of_environment(
        self, domain: DomainConfig, settings: EnvironmentConfig, player: type[EpisodePlayer]
    ) -> EpisodeDomain:
        """The environment replies."""
        make_player = partial(player, same_beginning=settings.same_beginning)
        return EpisodeDomain(
            self._sampler(make_player, domain, settings),
            partial(self._limits, settings),
            partial(self._open_environment, domain.name),
        )

    def of_agent(
        self,
        domain: DomainConfig,
        settings: AgentConfig,
        door: Door,
        log_path: Path,
        sampler: type[TurnSampler],
    ) -> AgentDomain:
        """A program asks."""
        name = f"agent {settings.function}"
        program = function_program(partial(self._open_environment, domain.name))
        if settings.command:
            name = f"agent {' '.join(settings.command)}"
            program = command_program(settings)
        return AgentDomain(
            settings,
            self._sampler(sampler, domain, settings),
            door,
            run=program,
            limits=partial(self._limits, settings),
            failures=Failures(domain.name, name, log_path),
        )

    def _sampler(
        self, make: Callable[..., _Sampler], domain: DomainConfig, settings: EpisodeConfig
    ) -> _Sampler:
        template = self._tokenizer.chat_template
        assert template is not None  # rule environment_template, and PromptRenderer
        reader = ReplyReader(settings.tool_format, template, self._tokenizer_directory)
        return make(
            turn_tokens=partial(self._turn_tokens, domain),
            read_reply=reader,
            load_reading=reader.load,
            decode=self._tokenizer.decode,
            segment_tokens=self._config.rollout.segment_tokens,
        )

    def _turn_tokens(self, domain: DomainConfig, tools: Sequence[ToolSchema]) -> TurnTokens:
        template = self._tokenizer.chat_template
        assert template is not None
        return TurnTokens(
            self._tokenizer,
            template,
            arguments=domain.template_arguments,
            tools=tools,
            day=domain.template_date,
            assistant_prefix=domain.assistant_prefix,
        )

    def _limits(self, settings: EpisodeConfig, max_tokens: int) -> EpisodeLimits:
        episode_tokens = max_tokens
        if settings.episode_tokens is not None:
            episode_tokens = min(settings.episode_tokens, max_tokens)
        return EpisodeLimits(
            max_turns=settings.max_turns,
            turn_tokens=settings.turn_tokens,
            episode_tokens=episode_tokens,
            max_model_len=self._config.rollout.max_model_len,
            seconds=settings.episode_s,
            recorded_tokens=self._config.trainer.max_tokens_per_microbatch,
        )


def episode_domains(
    config: RunConfig,
    tokenizer: TextTokenizer,
    tokenizer_directory: Path,
    open_environment: OpenEnvironment,
    player: type[EpisodePlayer] = EpisodePlayer,
) -> dict[str, EpisodeDomain]:
    """Return the domains of `config` that have an environment, by name.

    tokenizer_directory: where the tokenizer was loaded from; player: what plays their episodes."""
    make = _Domains(config, tokenizer, tokenizer_directory, open_environment)
    found = {}
    for domain in config.domains:
        if domain.environment is not None:
            found[domain.name] = make.of_environment(domain, domain.environment, player)
    return found


def agent_domains(
    config: RunConfig,
    tokenizer: TextTokenizer,
    tokenizer_directory: Path,
    open_environment: OpenEnvironment,
    door: Door,
    log_path: Path,
    sampler: type[TurnSampler] = TurnSampler,
) -> dict[str, AgentDomain]:
    """Return the domains of `config` that a program drives, by name; it asks at the open `door`.

    log_path: where this process says how programs fail; sampler: what samples their turns."""
    make = _Domains(config, tokenizer, tokenizer_directory, open_environment)
    found = {}
    for domain in config.domains:
        if domain.agent is not None:
            found[domain.name] = make.of_agent(domain, domain.agent, door, log_path, sampler)
    return found


def domain_metrics(
    hosted: Mapping[str, float],
    played: Mapping[str, EpisodeDomain],
    driven: Mapping[str, AgentDomain],
) -> dict[str, float]:
    """Return how episodes of all domains have ended, where `hosted` is what the host of
    environments has counted: of an agent's function it knows the processes, and not the limits.

    played: domains with an environment; driven: those with an agent."""
    metrics = dict(hosted)
    for name, episodes in played.items():
        metrics[f"environment/{name}/begun_otherwise"] = float(episodes.take_begun_otherwise())
    for name, domain in driven.items():
        ends = f"environment/{name}/ends"
        num_ends = metrics.get(ends, 0.0)
        metrics |= domain.take_metrics()
        metrics[ends] = num_ends
    return metrics
