"""Loading a model from parts of checkpoint tensors: those that this worker keeps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.rollout.plugin.checkpoint_tensor import CheckpointTensor, checkpoint_tensor
from grpo_megatron.rollout.plugin.kept_boxes import count_copy
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.tensor_entry import TensorEntry

PartsOfTensor = Mapping[Box, torch.Tensor]
"""What is here of one tensor: for each box its numbers, of the box's shape."""


TensorParts = Iterable[tuple[TensorEntry, PartsOfTensor]]


class ReceivedSource:
    """Has the numbers of some boxes of one tensor."""

    def __init__(self, parts: PartsOfTensor):
        self._parts = parts

    def copy_into(self, parameter: torch.Tensor, wanted: CheckpointTensor) -> None:
        """Fill a parameter, or a view of one. Raises MismatchError: that part is not here."""
        if parameter.is_meta:  # vLLM counts first, and copies when the layer is complete
            count_copy(parameter, wanted)
            return
        if wanted.numel() == 0:
            return
        box = wanted.box
        for held, numbers in self._parts.items():
            if box is not None and held.contains(box):
                parameter.copy_(box.view_in(held, numbers).reshape(wanted.shape))
                return
        raise MismatchError(
            f"an engine's loader wants {box} of {wanted.tensor_name!r}, which it did not want when "
            "the transfer was planned"
        )


def loadable(
    tensors: TensorParts,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a model's `load_weights` takes: whole tensors as they are, stand-ins for others.

    A stand-in refers to its parts until the layer that it belongs to is complete."""
    for tensor, parts in tensors:
        whole = parts.get(whole_box(tensor.shape))
        if whole is not None:
            yield tensor.name, whole
            continue
        source = ReceivedSource(parts)
        yield (
            tensor.name,
            checkpoint_tensor(tensor.name, tensor.shape, tensor.torch_dtype, source),
        )
