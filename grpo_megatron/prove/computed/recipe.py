"""The recipe around a request: what training needs beside a model and a layout."""

from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig

OPTIMIZER = OptimizerConfig(lr=1e-4, weight_decay=0.1)
"""A small rate: Adam turns rounding of tiny gradients into whole steps."""


def recipe_of(layout: TrainerConfig, *, replay: str = "none") -> RunConfig:
    """Return a recipe of one domain that trains recorded steps with GRPO at `layout`.

    replay: of `RoutingConfig`; every recorded route has to be there for "r3"."""
    routing: dict[str, str] = {"replay": replay}
    if replay == "r3":
        routing["on_missing"] = "fail"
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
