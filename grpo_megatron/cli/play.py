"""What `play` does: an episode as rollouts play it, whose turns a person types.

Player, environments, agent programs with their door, token identity and limits are those of a run;
only the engine is missing."""

import asyncio
import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from grpo_megatron.cli.typed_replies import InputLines, call_text, typed_call
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.data.dataset_answers import end_of_turn, unsampled
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.prompts import load_prompts, tokenised
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import (
    Environment,
    Observation,
    Reply,
    Step,
    ToolSchema,
    Unscorable,
)
from grpo_megatron.errors import ConfigError, DataError, EpisodeError, SetupError
from grpo_megatron.network import LOOPBACK
from grpo_megatron.plan.vision import require_text_model
from grpo_megatron.rollout.door import Door
from grpo_megatron.rollout.episode_domains import agent_domains, episode_domains
from grpo_megatron.rollout.episodes import EpisodePlayer, EpisodeSeeds
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import Ask
from grpo_megatron.rollout.sequence_builder import SequenceBuilder
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler
from grpo_megatron.types import Completion, Problem, Prompt

Say = Callable[[str], None]

_LOG_LINES = 20
_A_WEEK_S = 604800.0
"""For a program: processes of functions take no endless time."""


def play_episode(
    config: RunConfig,
    run_model: Path,
    replies: InputLines,
    say: Say,
    *,
    domain_name: str | None,
    prompt: str,
    shows_tokens: bool,
) -> None:
    """Play one episode of a recipe with what a person types; `say` prints a line.

    run_model: where a run of this recipe has its model, if it made one; prompt: an id, or a number
    from 1 on.

    ConfigError: there is no such domain or prompt, or it has neither environment nor program;
    SetupError: the tokenizer is not on this machine; DataError: the input ends before the episode
    does, or as in a run; EpisodeError: the environment or the program does not begin."""
    domain = _domain_of(config, domain_name)
    with tokenizer_directory(config.model) as directory, TemporaryDirectory() as logs:
        if config.model.path is None and run_model.is_dir():
            directory = run_model
        if directory is None:
            raise SetupError(
                "the tokenizer of the recipe's model is not on this machine",
                where="[model]",
                remedy="set model.path to a checkpoint, of which the tokenizer is enough",
            )
        if (directory / "config.json").is_file():
            require_text_model(config, "an episode")
        tokenizer = load_tokenizer(directory)
        chosen = _prompt_of(config, domain, tokenizer, prompt)
        log = Path(logs) / "environment.log"
        table = _Table(domain, tokenizer, replies, say, log, shows_tokens=shows_tokens)
        asyncio.run(_play(config, domain, chosen, directory, table))


async def _play(
    config: RunConfig, domain: DomainConfig, prompt: Prompt, directory: Path, table: "_Table"
) -> None:
    config = _without_haste(config, domain)
    table.say(f"domain {domain.name}, prompt {prompt.prompt_id}")
    if domain.agent is None:
        await _play_in_environment(config, prompt, directory, table)
    else:
        await _play_for_program(config, prompt, directory, table)


async def _play_in_environment(
    config: RunConfig, prompt: Prompt, directory: Path, table: "_Table"
) -> None:
    async with EnvironmentHost(config.domains, log_path=table.log) as host:

        def open_environment(name: str) -> Environment:
            return _Watched(host.environment(name), table)

        [domain] = episode_domains(
            config, table.tokenizer, directory, open_environment, _NeedsRoom
        ).values()
        found = await domain.play(table.ask, prompt, *_episode(config, prompt))
    table.show_end(found, "the environment")


async def _play_for_program(
    config: RunConfig, prompt: Prompt, directory: Path, table: "_Table"
) -> None:
    async with (
        EnvironmentHost(config.domains, log_path=table.log) as host,
        Door(LOOPBACK) as door,
    ):
        [domain] = agent_domains(
            config, table.tokenizer, directory, host.environment, door, table.log, _TellsTools
        ).values()
        playing = asyncio.ensure_future(domain.play(table.ask, prompt, *_episode(config, prompt)))
        ended = asyncio.ensure_future(table.input_ended.wait())
        try:
            await asyncio.wait([playing, ended], return_when=asyncio.FIRST_COMPLETED)
            if table.input_ended.is_set():  # the program was told, and might go on without
                raise table.no_reply()
            found = playing.result()
        except _NoTurnError as error:
            table.show_log()
            raise EpisodeError(
                f"the episode has no turn: {domain.last_failure}",
                where="[domains.agent]",
                remedy="correct the program, or choose another --prompt",
            ) from error
        finally:
            for task in (playing, ended):
                task.cancel()
            await asyncio.gather(playing, ended, return_exceptions=True)
    if domain.last_failure:
        table.show_failure(domain.last_failure)
    table.show_end(found, "the program", is_scored=not domain.last_failure)


def _episode(config: RunConfig, prompt: Prompt) -> tuple[EpisodeSeeds, int]:
    """Return the seeds of an episode of step 0, and its tokens."""
    seed = derive_seed(config.seed, 0, prompt.prompt_id, "environment")
    [domain] = config.domains
    return EpisodeSeeds(seed, None), config.max_new_tokens_of(domain.name)


class _NoTurnError(Exception):
    """The program asked for no turn."""


class _TellsTools(TurnSampler):
    """Tells who is asked for a turn with which tools the program asks, and asks for nothing that
    the program does not ask for."""

    async def sample(
        self,
        ask: Ask,
        token_ids: Sequence[int],
        *,
        max_tokens: int,
        seed: int | None,
        routes_from: int,
        tools: Sequence[ToolSchema] = (),
    ) -> Completion:
        """See `TurnSampler.sample`."""
        return await super().sample(
            partial(ask, tools=tools),
            token_ids,
            max_tokens=max_tokens,
            seed=seed,
            routes_from=routes_from,
            tools=tools,
        )

    async def stand_in(
        self, ask: Ask, problem: Problem, seed: int | None, limits: EpisodeLimits
    ) -> SequenceBuilder:
        """Raise _NoTurnError: a person replies to requests alone."""
        raise _NoTurnError


class _NeedsRoom(EpisodePlayer):
    """Plays no episode that cannot begin."""

    def found_no_room(self, problem: Problem, seeds: EpisodeSeeds, told: str) -> None:
        """Raise EpisodeError."""
        raise EpisodeError(
            f"the episode has no turn: {told}",
            where="[rollout] max_model_len, [trainer] max_tokens_per_microbatch",
            remedy="raise them, or choose another --prompt",
        )


def _without_haste(config: RunConfig, domain: DomainConfig) -> RunConfig:
    """The recipe with this domain alone; neither segments nor the clock end what a person types."""
    changes: dict[str, Any] = {}
    if domain.environment is not None:
        changes["environment"] = domain.environment.model_copy(update={"episode_s": math.inf})
    if domain.agent is not None:
        changes["agent"] = domain.agent.model_copy(update={"episode_s": _A_WEEK_S})
    rollout = config.rollout.model_copy(update={"segment_tokens": None})
    domains = (domain.model_copy(update=changes),)
    return config.model_copy(update={"domains": domains, "rollout": rollout})


def _domain_of(config: RunConfig, name: str | None) -> DomainConfig:
    """The domain of this name, or the first one with episodes; ConfigError without one."""
    with_episodes = {}
    for domain in config.domains:
        if domain.episodes is not None:
            with_episodes[domain.name] = domain
    if not with_episodes:
        raise ConfigError(
            "no domain of the recipe has an environment or an agent program",
            where="[[domains]]",
            remedy="give one [domains.environment] (docs/environments.md) or [domains.agent] "
            "(docs/agent-programs.md); `data show` prints prompts of any recipe",
        )
    if name is None:
        return next(iter(with_episodes.values()))
    if name in with_episodes:
        return with_episodes[name]
    known = [domain.name for domain in config.domains]
    if name in known:
        raise ConfigError(
            f"domain {name!r} has no environment and no agent program",
            where="--domain",
            remedy=f"those with one are: {', '.join(with_episodes)}",
        )
    raise ConfigError(
        f"there is no domain {name!r}", where="--domain", remedy=did_you_mean(name, known)
    )


def _prompt_of(
    config: RunConfig, domain: DomainConfig, tokenizer: TextTokenizer, wanted: str
) -> Prompt:
    if wanted.isdecimal() and int(wanted) > 0:
        number = int(wanted)
        problems = list(islice(iterate_problems(domain, config.seed), number - 1, number))
        if problems:
            return tokenised(domain, problems, tokenizer)[0]
        raise ConfigError(
            f"domain {domain.name!r} has fewer than {number} prompts",
            where="--prompt",
            remedy="give a smaller number",
        )
    prompts = {}
    for prompt in load_prompts(domain, config.seed, tokenizer):
        prompts[prompt.prompt_id] = prompt
    if wanted in prompts:
        return prompts[wanted]
    first = ", ".join(islice(prompts, 3))
    raise ConfigError(
        f"domain {domain.name!r} has no prompt {wanted!r}",
        where="--prompt",
        remedy=f"ids are those of a run's samples/, such as {first}; or give the number of a "
        "prompt in its source, from 1 on",
    )


class _Table:
    """Where a person plays: shows each request, and reads what is replied to it."""

    def __init__(
        self,
        domain: DomainConfig,
        tokenizer: TextTokenizer,
        replies: InputLines,
        say: Say,
        log: Path,
        *,
        shows_tokens: bool,
    ):
        self.tokenizer = tokenizer
        self.say = say
        self.log = log
        self.tools: Sequence[ToolSchema] = ()
        self.state = ""
        self._domain = domain
        self._replies = replies
        self._shows_tokens = shows_tokens
        self._end = end_of_turn(domain, tokenizer)
        self._seen: list[int] = []
        self._num_turns = 0
        self._one_at_a_time = asyncio.Lock()  # a program may ask for several turns at once
        self.input_ended = asyncio.Event()

    async def ask(self, token_ids: Sequence[int], **settings: Any) -> list[Completion]:
        """What an engine would sample behind `token_ids`, as the person types it."""
        async with self._one_at_a_time:
            return [await self._turn(token_ids, **settings)]

    async def _turn(self, token_ids: Sequence[int], **settings: Any) -> Completion:
        room = settings["max_tokens"]
        self.tools = settings.get("tools", self.tools)
        self._show_request(list(token_ids), room)
        ids = await self._typed_ids()
        if len(ids) > room:
            self.say(f"note: {len(ids)} tokens; the turn is cut after {room}")
        finish_reason = "stop"
        if len(ids) > room:
            finish_reason = "length"
            ids = ids[:room]
        self._seen = [*token_ids, *ids]
        self._num_turns += 1
        return unsampled(ids, 0, finish_reason, "")

    def no_reply(self) -> DataError:
        """Return the error of an input that ends too early."""
        return DataError(
            f"the input ended before the episode did, in turn {self._num_turns + 1}",
            where="standard input",
            remedy="reply until the environment, or the program, says what the episode is worth",
        )

    def show_step(self, step: Step) -> None:
        """What the environment made of a turn."""
        if not math.isnan(step.reward):
            self.say(f"reward of the turn: {step.reward:zg}")
        if step.spoilt:
            self.say("the environment says that it has spoilt the episode")

    def show_failure(self, reason: str) -> None:
        """Why the episode cannot be scored, and what the environment's process wrote last."""
        self.say(f"the episode cannot be scored: {reason}")
        self.show_log()

    def show_log(self) -> None:
        """What the environment's process, or that of the program's function, wrote last."""
        if not self.log.exists():
            return
        for line in self.log.read_text(errors="replace").splitlines()[-_LOG_LINES:]:
            self.say(f"  log | {line}")

    def show_end(self, played: Completion, driver: str, *, is_scored: bool = False) -> None:
        """The outcome, and what ended the episode. driver: what ends it if no limit does;
        is_scored: it can be, also without an outcome."""
        ended_by = f"by {driver}"
        if played.truncated:
            ended_by = "by a limit: max_turns, or its tokens"
        worth = "none: the episode cannot be scored"
        if is_scored:
            worth = "none: the domain's other rewards judge the last reply"
        if not math.isnan(played.outcome):
            worth = f"{played.outcome:zg}"
        self.say("")
        self.say(f"outcome: {worth}")
        for name, value in played.outcome_metrics.items():
            self.say(f"{name}: {value:zg}")
        self.say(f"ended {ended_by}, after {self._num_turns} turns")
        if len(played.sequences) > 1:
            why = "the chat template rewrote history"
            if self._domain.agent is not None:
                why = "not every request went on from the one before"
            self.say(f"{len(played.sequences)} sequences: {why}")

    def _show_request(self, token_ids: list[int], room: int) -> None:
        new = token_ids[len(self._seen) :]
        self.say("")
        if token_ids[: len(self._seen)] != self._seen:
            why = "the chat template has rewritten the history"
            if self._domain.agent is not None:
                why = "the program does not go on from the turn before"
            self.say(f"{why}; the whole request is now:")
            new = token_ids
        self._show_text(self.tokenizer.decode_exactly(new))
        self._show_ids(new)
        facts = [f"turn {self._num_turns + 1}", f"at most {room} tokens"]
        if self.state:
            facts.append(f"state {self.state}")
        self.say(f"[{', '.join(facts)}; an empty line ends the reply]")

    async def _typed_ids(self) -> list[int]:
        """The ids of the next reply that the tokenizer can write, with those that end a turn."""
        while True:
            text = await self._replies.next_reply()
            if text is None:
                self.input_ended.set()
                raise self.no_reply()
            try:
                text = self._in_format_of_model(text)
                ids = [*self.tokenizer.encode(text), *self._end]
            except DataError as error:
                self.say(f"note: {error.message}; reply again")
                continue
            self._show_ids(ids)
            return ids

    def _in_format_of_model(self, text: str) -> str:
        call = None
        if self.tools:
            call = typed_call(text)
        if call is None:
            return text
        template = self.tokenizer.chat_template
        assert template is not None  # rule environment_template
        end_text = self.tokenizer.decode_exactly(self._end)
        written = call_text(call, self._domain, template, self.tools, end_text)
        self.say("as the model writes it:")
        self._show_text(written)
        return written

    def _show_text(self, text: str) -> None:
        for line in text.split("\n"):
            self.say(f"  | {line}")

    def _show_ids(self, ids: Sequence[int]) -> None:
        if self._shows_tokens:
            self.say(f"{len(ids)} tokens: {' '.join(map(str, ids))}")


class _Watched:
    """An environment whose replies are shown."""

    def __init__(self, inner: Environment, table: _Table):
        self._inner = inner
        self._table = table

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """See `Environment`. Raises EpisodeError where the episode cannot begin."""
        try:
            observation = await self._inner.reset(problem, seed)
        except Unscorable as error:
            self._table.show_failure(error.reason)
            raise EpisodeError(
                f"the environment cannot begin the episode: {error.reason}",
                where="[domains.environment]",
                remedy="correct it, or choose another --prompt",
            ) from error
        self._table.tools = observation.tools
        self._table.state = observation.state
        return observation

    async def step(self, reply: Reply) -> Step:
        """See `Environment`."""
        try:
            step = await self._inner.step(reply)
        except Unscorable as error:
            self._table.show_failure(error.reason)
            raise
        self._table.show_step(step)
        self._table.state = step.state
        return step

    async def close(self) -> None:
        """See `Environment`."""
        await self._inner.close()
