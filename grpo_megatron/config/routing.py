"""`[routing]`: which experts the trainer sends tokens to, and what keeps routers in place."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class RoutingConfig(Strict):
    """Mixture-of-Experts routing under RL."""

    replay: Literal["none", "r2", "r3"] = "none"
    """Experts of the training passes. none: the live router's choice; r2: the choice of the
    trainer's old-policy pass; r3: the engine's choice, in the old-policy pass too. Gates always
    come from the live router, so that it keeps its gradient."""
    on_missing: Literal["live", "fail"] = "live"
    """r3, where a token's route is missing, stale or damaged: the live router's choice (counted),
    or stop."""
    keep_loss: Literal["none", "kl", "set_mass", "cross_entropy"] = "none"
    """Auxiliary loss that holds routers: KL(old || live); -log of the live probability of the
    replayed set; mean cross-entropy on that set."""
    keep_weight: float = Field(0.0, ge=0)
    """Weight of `keep_loss`; domains may have their own."""
    balance_weight: float = Field(0.0, ge=0)
    """Load-balance loss from live probabilities and replayed counts."""
    router_policy: Literal["none", "freeze_weights", "freeze_bias"] = "freeze_bias"
    """none: router weights and selection bias are trained; freeze_bias: weights only;
    freeze_weights: neither."""
    load_alarm: float = Field(4.0, gt=1)
    """Say so when an expert gets this many times the mean load of its layer."""
