"""Time limits of rewards beside that of the processes in which they run."""

import inspect
from collections.abc import Sequence

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.argument_checks import check_number
from grpo_megatron.rewards.pool import Component

_SHIPPED = "grpo_megatron.rewards."


def refuse_long_rewards(components: Sequence[Component], limit_s: float) -> None:
    """Raise RewardError where a shipped reward may take as long as its process lets it: it would be
    ended, and the sample unscorable, where its tests have just failed or its server was about to
    answer. limit_s: `data.reward_timeout_s`."""
    for component in components:
        reward = component.reward
        if not reward.reference.startswith(_SHIPPED):
            continue
        parameter = inspect.signature(reward.function).parameters.get("timeout_s")
        if parameter is None:
            continue
        timeout_s = reward.arguments.get("timeout_s", parameter.default)
        if timeout_s is None:  # its process's limit is its own
            continue
        check_number("timeout_s", timeout_s, above=0)
        if timeout_s >= limit_s:
            raise RewardError(
                f"timeout_s = {timeout_s:g} of {reward.function.__name__} is not below "
                f"data.reward_timeout_s ({limit_s:g} s)",
                where=f"[[domains]] {component.domain}, reward {component.name}",
                remedy=f"set timeout_s to less, or data.reward_timeout_s to {2 * timeout_s:g}",
            )
