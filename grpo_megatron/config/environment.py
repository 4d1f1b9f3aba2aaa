"""`[domains.environment]`: what replies to the policy in a domain of episodes."""

from typing import Any

from pydantic import Field

from grpo_megatron.config.base import Strict


class EnvironmentConfig(Strict):
    """What replies to the policy in the episodes of a domain (docs/environments.md)."""

    name: str
    """One that comes with the package (`calculator`, `lights_out`, …), one that an installed
    package registers, or `module:function`."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the environment."""
    max_turns: int = Field(8, ge=1)
    """Most turns of the policy in an episode; then it ends with its outcome so far."""
    turn_tokens: int | None = Field(None, ge=1)
    """Most tokens of one turn; default: all that the episode has left."""
    episode_tokens: int | None = Field(None, ge=1)
    """Most tokens behind the prompt, those of the environment included; default: the domain's
    `max_new_tokens`."""
    episode_s: float = Field(600.0, gt=0)
    """Seconds that an episode may take; then it ends with its outcome so far."""
    step_s: float = Field(30.0, gt=0)
    """Seconds that the environment may take to begin or to reply; past them the episode is
    unscorable, and a process that does not answer at all is ended with all of its episodes."""
    tool_format: str = "auto"
    """How calls of tools are written in a turn; `auto`: as the model's chat template has them."""
    demonstration: tuple[str, ...] = ()
    """What a cold start trains the policy to say, turn by turn, while the environment replies; with
    the fields of `response_template`."""
    observation_characters: int = Field(16384, ge=16)
    """Longest message of the environment; of a longer one the middle is left out."""
    processes: int = Field(1, ge=1)
    """Processes of this environment; each has many episodes at a time."""
    memory_mib: int = Field(2048, ge=128)
    """Address space of one process."""
