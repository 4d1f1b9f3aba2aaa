"""The recipe around a request: what training needs beside a model and a layout."""

from typing import Any

from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig

OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1)
"""A small rate: Adam turns rounding of tiny gradients into whole steps."""


def recipe_of(layout: TrainerConfig, *, replays_routes: bool = False) -> RunConfig:
    """A recipe of one domain that trains recorded steps with GRPO at `layout`."""
    routing: dict[str, Any] = {}
    if replays_routes:
        routing = {"replay": "r3", "on_missing": "fail"}
    domain = {
        "name": "made",
        "source": "file",
        "path": "made-up",
        "rewards": [{"function": "made:up", "name": "made"}],
    }
    return RunConfig.model_validate(
        {
            "name": "prove",
            "model": {"preset": "tiny-qwen3-moe"},  # not looked at: the policy is there already
            "optimizer": OPTIMIZER,
            "trainer": layout,
            "objective": {"preset": "grpo"},
            "routing": routing,
            "domains": [domain],
        }
    )
