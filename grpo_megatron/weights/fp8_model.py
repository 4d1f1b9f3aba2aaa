"""A model whose weights are published in FP8 (`rollout.fp8`), while the trainer keeps its own."""

from functools import cached_property

import torch

from grpo_megatron.plan.fp8_weights import is_quantised
from grpo_megatron.weights.boxes import Box
from grpo_megatron.weights.fp8_blocks import (
    box_of_blocks,
    box_of_scales,
    quantise,
    require_whole_blocks,
    scale_name,
    scale_shape,
)
from grpo_megatron.weights.gather import PieceReader, ShardedModel
from grpo_megatron.weights.publish_plan import HeldBox
from grpo_megatron.weights.tensor_entry import TensorEntry, dtype_name

_FP8 = dtype_name(torch.float8_e4m3fn)
_SCALES = dtype_name(torch.float32)


class Fp8Model:
    """Publishes a `ShardedModel` with matrices of layers in FP8, a scale for each block beside."""

    def __init__(self, model: ShardedModel):
        self._model = model

    def held_boxes(self) -> list[HeldBox]:
        """Say which parts of which tensors this rank can send.

        Raises ConfigError as `ShardedModel.held_boxes` does, and where a rank's part of a matrix
        ends within a block."""
        boxes = []
        for held in self._model.held_boxes():
            name = held.tensor.name
            shape = held.tensor.shape
            if name not in self._quantised:
                boxes.append(held)
                continue
            require_whole_blocks(held.box, shape, name)
            scales = TensorEntry(scale_name(name), _SCALES, scale_shape(shape))
            boxes.append(HeldBox(TensorEntry(name, _FP8, shape), held.box))
            boxes.append(HeldBox(scales, box_of_scales(held.box)))
        return boxes

    @cached_property
    def _quantised(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the matrices that are sent in FP8, by name."""
        found = {}
        for shard in self._model.shards:
            if not is_quantised(shard.name):
                continue
            for name, shape in self._model.map.parameter(shard.name, shard.full_shape).hf:
                found[name] = shape
        return found

    def reader(self) -> "Fp8Reader":
        """Return what reads the weights as they are now. Collective."""
        return Fp8Reader(self._model.reader(), self._quantised)


class Fp8Reader:
    """Gives parts of the tensors that are published; numbers and scales of a matrix that are asked
    for one after the other are computed once.

    quantised: shapes of the matrices that are sent in FP8, by name."""

    def __init__(self, reader: PieceReader, quantised: dict[str, tuple[int, ...]]):
        self._reader = reader
        self._quantised = quantised
        self._matrix_of = {scale_name(name): name for name in quantised}
        self._last: tuple[str, Box] | None = None
        self._numbers = torch.empty(0)
        self._scales = torch.empty(0)

    @torch.no_grad()
    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return `box` of the tensor `name`. Raises KeyError where it is not on this rank."""
        if name in self._matrix_of:
            matrix = self._matrix_of[name]
            self._quantise(matrix, box_of_blocks(box, self._quantised[matrix]))
            return self._scales
        if name not in self._quantised:
            return self._reader.read(name, box)
        blocks = box_of_blocks(box_of_scales(box), self._quantised[name])
        self._quantise(name, blocks)
        return box.view_in(blocks, self._numbers)

    def _quantise(self, name: str, blocks: Box) -> None:
        """Make numbers and scales of `blocks`, a box of whole blocks of a matrix."""
        if self._last == (name, blocks):
            return
        self._numbers, self._scales = quantise(self._reader.read(name, blocks))
        self._last = (name, blocks)
