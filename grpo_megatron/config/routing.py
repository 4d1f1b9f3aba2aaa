"""`[routing]`: which experts the trainer sends tokens to, and what keeps routers in place."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class RoutingConfig(Strict):
    """Mixture-of-Experts routing under RL."""

    replay: Literal["none", "r2", "r3"] = "none"
    on_missing: Literal["live", "fail"] = "live"
    keep_loss: Literal["none", "kl", "set_mass", "cross_entropy"] = "none"
    keep_weight: float = Field(0.0, ge=0)
    balance_weight: float = Field(0.0, ge=0)
    router_policy: Literal["none", "freeze_weights", "freeze_bias"] = "freeze_bias"
    load_alarm: float = Field(4.0, gt=1)
