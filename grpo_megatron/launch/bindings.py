"""What a recipe names in Python is imported before a job waits in a queue for it."""

from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.pool import components_of

_REMEDY = "; if only the cluster has it, submit with --skip-reward-check"


def refuse_unbound_rewards(config: RunConfig) -> None:
    """Import every domain's rewards and check their arguments against their signatures.

    Raises RewardError as the controller would when it starts: one that cannot be imported, or
    that cannot be called with the recipe's arguments."""
    for domain in config.domains:
        try:
            components_of(domain, config.max_new_tokens_of(domain.name))
        except RewardError as error:
            error.remedy = (error.remedy or "correct the recipe") + _REMEDY
            raise
