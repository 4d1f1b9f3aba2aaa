"""`[lora]`: adapters that are trained in place of the weights."""

import math
from typing import Any, Literal

from pydantic import Field

from grpo_megatron.config.base import InputPath, Strict

ENGINE_ADAPTER = "policy"
"""What requests to an engine call the adapter that was published to it; where domains have adapters
of their own, what the name of each begins with."""
ALL_LINEAR = "all-linear"
"""A target that stands for every linear layer of the decoder."""


def adapter_name(domain: str) -> str:
    """Return what requests to an engine call the adapter of a domain that has one of its own."""
    return f"{ENGINE_ADAPTER}.{domain}"


class LoraConfig(Strict):
    """LoRA (arXiv:2106.09685): the weights stay as they are, and beside each linear layer that is
    named `scale B A x` is trained, with A [rank, in] and B [out, rank] (docs/lora.md)."""

    rank: int = Field(ge=1)
    """Rank of every adapter."""
    alpha: float | None = Field(None, gt=0)
    """The scale is alpha / rank; default: twice the rank, a scale of 2."""
    rank_stabilised: bool = False
    """The scale is alpha / sqrt(rank) instead (rsLoRA, arXiv:2312.03732)."""
    dora: bool = False
    """The adapted weight is divided by the norms of its rows and multiplied by a magnitude for each
    of them, which is trained as well (DoRA, arXiv:2402.09353)."""
    targets: tuple[str, ...] = Field((ALL_LINEAR,), min_length=1)
    """Linear layers that get an adapter, by their names in Hugging Face's checkpoint: `q_proj`,
    `down_proj`; `experts`, `self_attn` for all below; `experts.down_proj` for some; `all-linear`
    for all but routers, embedding and output layer."""
    experts: Literal["each", "shared"] = "each"
    """Routed experts have an adapter each, or those of a layer have one between them."""

    per_domain: bool = False
    """Every domain trains adapters of its own, which answer its prompts: experts of all domains in
    one run, on one set of weights."""

    publish: Literal["merged", "adapter"] = "merged"
    """What engines get after each step: `merged`, weights with the adapters in them; `adapter`, the
    weights once and then adapters alone, which vLLM computes beside its layers."""

    path: InputPath | None = None
    """Adapters in PEFT's format to begin with: a directory with adapter_config.json and
    adapter_model.safetensors; default: those that change nothing."""

    def identity(self) -> dict[str, Any]:
        """Return what a checkpoint of the adapters must have been made with, as JSON has it."""
        return self.model_dump(mode="json", exclude={"path", "publish"})

    @property
    def alpha_value(self) -> float:
        """Alpha, or its default."""
        if self.alpha is None:
            return 2.0 * self.rank
        return self.alpha

    @property
    def scale(self) -> float:
        """What the product of B and A is multiplied by."""
        if self.rank_stabilised:
            return self.alpha_value / math.sqrt(self.rank)
        return self.alpha_value / self.rank


def is_target(module: str, targets: tuple[str, ...]) -> bool:
    """Tell whether a linear layer, such as `self_attn.q_proj` or `mlp.experts.3.down_proj`, is
    named by one of `targets`. Numbers of experts do not count."""
    parts = [part for part in module.split(".") if not part.isdigit()]
    for target in targets:
        if target == ALL_LINEAR:
            return True
        wanted = target.split(".")
        for start in range(len(parts) - len(wanted) + 1):
            if parts[start : start + len(wanted)] == wanted:
                return True
    return False
