"""`[critic]`: values of the policy's tokens, for advantages by GAE."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict
from grpo_megatron.config.trainer import OptimizerConfig


class CriticConfig(Strict):
    """What predicts the reward of each token's answer (docs/ppo.md)."""

    trunk: Literal["own", "policy"] = "own"
    """Layers below the scalar head. `own`: a value model with weights and an optimizer of its own,
    at the policy's layout: the policy's layers with the head in the place of the output layer.
    `policy`: the policy's layers themselves, with the head beside the output layer; both losses
    train them in one backward, and a critic costs no memory."""
    loss_weight: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Weight of the value loss beside the policy's, where they train the same layers (`c_1` of
    arXiv:1707.06347)."""

    path: InputPath | None = None
    """Hugging Face checkpoint that the critic begins with, of the model's architecture: a reward
    model, whose head it takes over, or a language model, beside a head that `seed` draws. Default:
    the weights with which RL begins, and a head that `seed` draws. A resume does not read it."""

    optimizer: OptimizerConfig = OptimizerConfig(lr=1e-5)
    """Optimizer of the critic, which takes a step for each one of the policy; its schedule is over
    all steps of the run."""
    warmup_steps: int = Field(0, ge=0)
    """So many first steps of the run train the critic alone; the policy stays as it is, and its
    learning rate begins after them."""
    value_clip: float | None = Field(0.2, gt=0)
    """Values are kept this close to those from before the step where the loss would fall by leaving
    them (PPO's clipped value loss); null: a plain squared error."""

    @property
    def has_own_trunk(self) -> bool:
        """Whether the critic is a model beside the policy."""
        return self.trunk == "own"
