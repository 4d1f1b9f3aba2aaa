"""`[placement]`: which nodes train and which generate."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class PlacementConfig(Strict):
    """Nodes of each role, for `submit` and `plan`; a run on one machine needs none of it."""

    mode: Literal["separate", "colocated"] = "separate"
    """`separate`: trainer and engines have GPUs of their own; `colocated`: they share GPUs."""
    trainer_nodes: int = Field(1, ge=1)
    """Nodes that train; each has equally many trainer ranks."""
    rollout_nodes: int = Field(0, ge=0)
    """Nodes that generate; 0: engines run on the trainer's nodes (separate: on the GPUs that the
    trainer leaves free)."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs a node; 0: CPU."""

    @property
    def num_trainer_gpus(self) -> int:
        """Of the nodes that train."""
        return self.trainer_nodes * self.gpus_per_node

    @property
    def num_nodes(self) -> int:
        return self.trainer_nodes + self.rollout_nodes
