"""Which parts of a checkpoint an engine worker keeps, found out by its own weight loaders.

The loaders run once over tensors without numbers (`CheckpointTensor`), into parameters on the meta
device. What they copy is what this worker keeps: its rows of a fused projection, its experts, its
columns. No table of layouts has to be kept beside vLLM's own code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.rollout.plugin.adapter_slot import without_wrappers
from grpo_megatron.rollout.plugin.checkpoint_tensor import (
    CheckpointTensor,
    NeedsNumbersError,
    checkpoint_tensor,
)
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.tensor_entry import TensorEntry, dtype_name

if TYPE_CHECKING:
    from vllm.model_executor.model_loader.reload.layerwise import LayerReloadingInfo


class RecordingSource:
    """Notes what is copied, and copies nothing.

    Attributes:
        boxes: Of each tensor, those that were copied.
        no_boxes: Tensors of which something was copied that is no box."""

    def __init__(self) -> None:
        self.boxes: dict[str, set[Box]] = {}
        self.no_boxes: set[str] = set()

    def copy_into(self, parameter: torch.Tensor, wanted: CheckpointTensor) -> None:
        """Note the part that `wanted` shows."""
        _require_precision(parameter, wanted)
        count_copy(parameter, wanted)
        if wanted.numel() == 0:
            return
        box = wanted.box
        if box is None or wanted.dtype != wanted.tensor_dtype:
            self.no_boxes.add(wanted.tensor_name)
        else:
            self.boxes.setdefault(wanted.tensor_name, set()).add(box)


def count_copy(parameter: torch.Tensor, wanted: CheckpointTensor) -> None:
    """Let vLLM count a copy into a parameter on the meta device: by it a layer is complete."""
    if parameter.is_meta:
        parameter.copy_(torch.empty(wanted.shape, dtype=wanted.dtype, device="meta"))


def _require_precision(parameter: torch.Tensor, wanted: CheckpointTensor) -> None:
    """Raise MismatchError where numbers would lose what a scale beside them keeps."""
    if parameter.dtype.itemsize == 1 and wanted.dtype != parameter.dtype:
        raise MismatchError(
            f"the engine keeps {wanted.tensor_name!r} in {dtype_name(parameter.dtype)}, and it is "
            f"published in {dtype_name(wanted.dtype)}",
            where="rollout.fp8",
            remedy="set rollout.fp8 = 'blockwise' and leave quantisation out of "
            "rollout.engine_arguments",
        )


def record_kept_boxes(
    model: torch.nn.Module, tensors: Sequence[TensorEntry]
) -> tuple[dict[str, list[Box]], dict[str, str]]:
    """Return the boxes of each of `tensors` that the model keeps, and which are taken whole.

    The second is the reason for each tensor that a loader computes with, or of which it copies
    something that is no box: such a tensor must be received as a whole. Parameters are left as
    they were."""
    whole: dict[str, str] = {}
    while True:
        source = RecordingSource()
        try:
            with without_wrappers(model), _parameters_on_meta(model):
                model.load_weights(_stand_ins(tensors, source, whole))  # type: ignore[operator]
        except NeedsNumbersError as error:
            whole[error.name] = str(error)
            continue
        found = {name for name in source.no_boxes if name not in whole}
        if not found:
            break
        for name in found:
            whole[name] = f"the loader of {name!r} copies something that is no box of it"
    boxes = {}
    for tensor in tensors:
        if tensor.name in whole:
            boxes[tensor.name] = [whole_box(tensor.shape)]
        elif tensor.name in source.boxes:
            boxes[tensor.name] = _without_contained(source.boxes[tensor.name])
    return boxes, whole


def _stand_ins(
    tensors: Sequence[TensorEntry], source: RecordingSource, whole: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what the loaders are given: tensors without numbers, or zeros for those in `whole`."""
    for tensor in tensors:
        if tensor.name in whole:
            yield tensor.name, torch.zeros(tensor.shape, dtype=tensor.torch_dtype)
        else:
            yield (
                tensor.name,
                checkpoint_tensor(tensor.name, tensor.shape, tensor.torch_dtype, source),
            )


def _without_contained(boxes: set[Box]) -> list[Box]:
    """Return the boxes that are not part of another one."""
    kept: list[Box] = []
    for box in sorted(boxes, key=lambda box: -box.num_elements):
        if not any(other.contains(box) for other in kept):
            kept.append(box)
    return sorted(kept)


@contextmanager
def _parameters_on_meta(model: torch.nn.Module) -> Iterator[None]:
    """Within, parameters have the shapes of the checkpoint, no numbers, and their own loaders.

    vLLM's reload would finish a layer as soon as it is complete; so its wrappers are taken off."""
    from vllm.model_executor.model_loader.reload import layerwise

    layerwise.initialize_layerwise_reload(model)
    try:
        for layer in model.modules():
            for parameter in layerwise.get_layer_tensors(layer).values():
                loader = getattr(parameter, "weight_loader", None)
                if loader is not None:
                    parameter.weight_loader = layerwise._get_original_loader(parameter)
        yield
    finally:
        for layer in model.modules():
            _put_back(layer, layerwise.get_layerwise_info(layer))
        model._do_torchao_reload = model._original_do_torchao_reload


def _put_back(layer: torch.nn.Module, info: LayerReloadingInfo) -> None:
    """Give a layer its own parameters again."""
    from vllm.model_executor.model_loader.reload import layerwise

    if not info.can_load():
        return
    layerwise._place_kernel_tensors(layer, info)
    info.reset()
