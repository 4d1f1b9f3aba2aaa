"""`[domains.environment]` and `[domains.agent]`: domains of episodes."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from grpo_megatron.config.base import Strict

AGENT_FUNCTION = "grpo_megatron.environments.agent_function:AgentFunction"
"""Runs `agent.function` in a process of environments."""


def _with_whole_paths(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return files of the current directory by their whole paths: a program has a directory of its
    own, and a resumed run may have another. A name without "/" is looked up in PATH where it comes
    first."""
    found = []
    for number, part in enumerate(command):
        is_path = number > 0 or "/" in part
        if is_path and Path(part).is_file():
            part = str(Path(part).absolute())
        found.append(part)
    return tuple(found)


class EpisodeConfig(Strict):
    """The limits at which an episode ends unless something else ends it first, and how its turns
    are read."""

    max_turns: int = Field(8, ge=1)
    """Most turns of the policy in an episode; then it ends with its outcome so far."""
    turn_tokens: int | None = Field(None, ge=1)
    """Most tokens of one turn; default: all that the episode has left."""
    episode_tokens: int | None = Field(None, ge=1)
    """Most tokens behind the prompt, those of the environment included; default: the domain's
    `max_new_tokens`."""
    episode_s: float = Field(600.0, gt=0)
    """Seconds that an episode may take; then it ends with its outcome so far."""
    tool_format: str = "auto"
    """How calls of tools are written in a turn; `auto`: as the model's chat template has them."""
    processes: int = Field(1, ge=1)
    """Processes of this environment; each has many episodes at a time."""
    memory_mib: int = Field(2048, ge=128)
    """Address space of one process."""


class EnvironmentConfig(EpisodeConfig):
    """What replies to the policy in the episodes of a domain (docs/environments.md)."""

    name: str
    """One that comes with the package (`calculator`, `lights_out`, …), one that an installed
    package registers, or `module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    step_s: float = Field(30.0, gt=0)
    """Seconds that the environment may take to begin or to reply; past them the episode is
    unscorable, and a process that does not answer at all is ended with all of its episodes."""
    same_beginning: bool = True
    """An episode that begins with other messages or tools than another of its group is unscorable:
    they are compared with each other. False: they may differ."""
    demonstration: tuple[str, ...] = ()
    """What a cold start trains the policy to say, turn by turn, while the environment replies; with
    the fields of `response_template`."""
    servers: int = Field(0, ge=0)
    """Servers of this environment, each with `processes`, as roles of the run: on
    `placement.environment_nodes`, else beside the engines; 0: every rollout worker has processes of
    its own."""
    observation_characters: int = Field(16384, ge=16)
    """Longest message of the environment; of a longer one the middle is left out."""


class AgentConfig(EpisodeConfig):
    """A program that drives the episodes of a domain and asks the policy by OpenAI's API
    (docs/agent-programs.md)."""

    command: Annotated[tuple[str, ...], AfterValidator(_with_whole_paths)] = ()
    """A program, started for each episode: `["python", "my_agent.py"]`."""
    variables: dict[str, str] = {}
    """Environment variables of the command, beside those of the run; `"$NAME"` for a secret."""
    function: str | None = None
    """Instead of a command: `module:function`, an `async def` that has many episodes in one
    process."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    max_turns: int = Field(32, ge=1)
    """Most turns of the policy in an episode; further ones are refused."""
    episode_s: float = Field(600.0, gt=0)
    """Seconds that the program may take; past them it is ended, and the episode is unscorable."""
    concurrency: int = Field(32, ge=1)
    """Episodes of this domain that a rollout worker has at a time; the others wait."""
    processes: int = Field(1, ge=1)
    """Processes in which the function has its episodes."""
    memory_mib: int = Field(4096, ge=128)
    """Address space of each of them; a command has no such limit."""

    @property
    def hosted(self) -> EnvironmentConfig | None:
        """What runs the function, as an environment does its episodes; None for a command."""
        if self.function is None:
            return None
        return EnvironmentConfig(
            name=AGENT_FUNCTION,
            arguments={"function": self.function, "arguments": self.arguments},
            step_s=self.episode_s,
            episode_s=self.episode_s,
            processes=self.processes,
            memory_mib=self.memory_mib,
        )
