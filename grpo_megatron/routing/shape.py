"""What a route is: the experts that one token was sent to, in every MoE layer."""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.model_facts import model_facts


class RouteStatus(IntEnum):
    """Whether a token's route in one layer can be replayed, or why not."""

    OK = 0
    MISSING = 1  # the engine gave none
    STALE = 2  # computed by other weights than the token was sampled with
    CORRUPT = 3  # the file's checksum disagrees
    INVALID = 4  # an expert that does not exist, or the same one twice
    MISSHAPEN = 5  # recorded for a model of another shape


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Routes of one model are [layers, tokens, experts_per_token], of expert ids."""

    layers: tuple[int, ...]  # numbers, from 0, of those with experts
    experts_per_token: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every expert id."""
        if self.num_experts <= 256:
            return np.dtype(np.uint8)
        return np.dtype(np.uint16)

    def num_bytes(self, tokens: np.ndarray | int) -> np.ndarray | int:
        """Return the bytes of the routes of `tokens` tokens."""
        return tokens * len(self.layers) * self.experts_per_token * self.dtype.itemsize

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} MoE layers, {self.experts_per_token} of "
            f"{self.num_experts} experts per token"
        )


def recorded_shape(config: RunConfig) -> RouteShape | None:
    """Return the shape of the routes that a run's engines record; None where they record none."""
    if not config.records_routes:
        return None
    facts = model_facts(config.model)
    return RouteShape(facts.moe_layers, facts.num_experts_per_token, facts.num_experts)


def invalid(routes: np.ndarray, num_experts: int) -> np.ndarray:
    """Return which rows name an expert that does not exist, or one twice. [..., K] -> bool [...]"""
    # Pairs of columns: a sixth of the time that sorting each row's few experts takes.
    columns = [np.ascontiguousarray(routes[..., place]) for place in range(routes.shape[-1])]
    broken = np.zeros(routes.shape[:-1], bool)
    for place, experts in enumerate(columns):
        broken |= experts >= num_experts
        for others in columns[:place]:
            broken |= experts == others
    return broken
