"""Which share of a GPU leaves an engine, and a trainer that shares the GPU, what they need."""

import math
from dataclasses import dataclass

from grpo_megatron.config.engine_words import without_option
from grpo_megatron.config.problems import as_toml
from grpo_megatron.config.run import RolloutConfig, RunConfig
from grpo_megatron.plan.devices import DEVICES
from grpo_megatron.plan.engine_arguments import MEMORY_SHARE

_STEPS = 100
"""Shares are told in hundredths."""


@dataclass(frozen=True, slots=True)
class EngineShares:
    """Shares of a GPU that an engine may take."""

    least: float
    """With room for weights and the longest sequence."""
    most: float
    """With room for the fullest trainer rank beside it, where both share the GPU."""

    @property
    def largest(self) -> float | None:
        """The share with the largest cache; None where none is enough for both."""
        if self.least > self.most:
            return None
        return self.most


def engine_shares(
    config: RunConfig, gpu_bytes: int, needed_by_engine: float, left_by_trainer: float
) -> EngineShares:
    """Return what an engine may take of a GPU with `gpu_bytes`.

    needed_by_engine: bytes of weights, a forward pass and one sequence's cache. left_by_trainer:
    bytes that the fullest rank leaves, which counts where trainer and engines share GPUs."""
    least = math.ceil(needed_by_engine / gpu_bytes * _STEPS) / _STEPS
    most = float(DEVICES["utilisation"])
    if config.shares_gpus:
        most = math.floor(left_by_trainer / gpu_bytes * _STEPS) / _STEPS
    return EngineShares(least, most)


def arguments_with_share(rollout: RolloutConfig, share: float) -> tuple[str, ...]:
    """Return `rollout.engine_arguments` with another share of a GPU's memory."""
    others = without_option(rollout.engine_arguments, MEMORY_SHARE)
    return (*others, f"{MEMORY_SHARE}={share:g}")


def setting_of_share(rollout: RolloutConfig, share: float) -> str:
    """Return the setting, as a recipe has it, with which engines take `share` of each GPU."""
    return f"rollout.engine_arguments = {as_toml(arguments_with_share(rollout, share))}"
