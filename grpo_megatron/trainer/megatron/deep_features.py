"""Features of images that are added to the hidden states of their tokens, after the first decoder
layers (DeepStack, arXiv:2406.04334): what early blocks of a vision tower saw.

They go to the layers beside Megatron's arguments, cut off from the tower. Layers that are computed
anew in the backward are differentiated one by one, and each would go through all of the tower. So
each addition lays its gradient aside, and the first layer's input, whose gradient comes last, hands
all of them to the tower at once.

Shape legend: m tokens of images on this rank, T its tokens, H features of a token."""

from collections.abc import Sequence
from typing import Any

import torch

from grpo_megatron.trainer.megatron.row_context import row_of


class DeepFeatures:
    """Features for tokens of a row, one tensor for each of the first layers."""

    def __init__(self, where: torch.Tensor, levels: Sequence[torch.Tensor]):
        """where: the tokens, int64 [m]; levels: after each layer, [m, H]."""
        self.where = where
        self.levels = [level.detach() for level in levels]
        self.gradients: list[torch.Tensor | None] = [None] * len(levels)
        """Laid aside by the backward, where the tower is trained."""


def with_deep_features(
    embedded: torch.Tensor, where: torch.Tensor, levels: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, DeepFeatures]:
    """Return the input of the first layer, [T, 1, H], and what `add_after_layers` adds later on.

    In the backward of this input the `levels` ([m, H] each, of tokens `where`) get their
    gradients."""
    deep = DeepFeatures(where, levels)
    source: torch.Tensor = _Source.apply(  # type: ignore[no-untyped-call]  # torch's
        embedded, deep, *levels
    )
    return source, deep


def add_after_layers(layers: Sequence[torch.nn.Module]) -> None:
    """Have each of these layers, the first of a model, add its level of the row's deep features
    (`RowContext.deep`), if there are any."""
    for number, layer in enumerate(layers):
        layer.register_forward_hook(_AddLevel(number), with_kwargs=True)


class _AddLevel:
    """A forward hook of the layer with this number."""

    def __init__(self, number: int):
        self._number = number

    def __call__(
        self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any], output: Any
    ) -> Any:
        deep = row_of(kwargs["packed_seq_params"]).deep
        if deep is None:
            return output
        hidden, context = output
        added = _Addition.apply(  # type: ignore[no-untyped-call]  # torch's
            hidden, deep, self._number
        )
        return added, context


class _Source(torch.autograd.Function):
    """Passes the first layer's input on; its backward is the last one that layers have."""

    @staticmethod
    def forward(
        ctx: Any, embedded: torch.Tensor, deep: DeepFeatures, *levels: torch.Tensor
    ) -> torch.Tensor:
        ctx.deep = deep
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        of_levels = ctx.deep.gradients
        ctx.deep.gradients = [None] * len(of_levels)
        return (gradients[0], None, *of_levels)


class _Addition(torch.autograd.Function):
    """Adds a level to the hidden states of its tokens."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, deep: DeepFeatures, number: int) -> torch.Tensor:
        ctx.deep = deep
        ctx.number = number
        level = deep.levels[number].to(hidden.dtype)
        return hidden.index_add(0, deep.where, level[:, None])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        of_level = gradients[0].index_select(0, ctx.deep.where)[:, 0]
        ctx.deep.gradients[ctx.number] = of_level.to(ctx.deep.levels[ctx.number].dtype)
        return gradients[0], None, None
