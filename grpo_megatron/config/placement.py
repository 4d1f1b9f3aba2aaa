"""`[placement]`: which nodes train and which generate."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class PlacementConfig(Strict):
    """Nodes of each role, for `submit` and `plan`; a run on one machine needs none of it."""

    mode: Literal["separate", "colocated"] = "separate"
    trainer_nodes: int = Field(1, ge=1)
    rollout_nodes: int = Field(0, ge=0)
    gpus_per_node: int = Field(0, ge=0)

    @property
    def num_trainer_gpus(self) -> int:
        """Of the nodes that train."""
        return self.trainer_nodes * self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        return self.trainer_nodes + self.rollout_nodes
