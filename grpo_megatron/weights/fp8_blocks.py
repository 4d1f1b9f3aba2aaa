"""FP8 weights with a scale for every block of 128 x 128 numbers, as DeepSeek-V3 is published.

A weight [rows, columns] is float8_e4m3fn, beside it are fp32 scales [ceil(rows / 128),
ceil(columns / 128)]: a number is the product of both. Source: arXiv:2412.19437, section 3.3."""

import torch

from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.weights.boxes import Box

_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_SMALLEST_AMAX = 1e-4
"""A block of zeros would have no scale; vLLM's own quantisation takes this, too."""
_ROWS_AT_ONCE = 16 * BLOCK


def scale_name(name: str) -> str:
    """Name the tensor with the block scales of the FP8 tensor `name`."""
    return name + "_scale_inv"


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the scales of a weight of `shape`."""
    return tuple(-(-size // BLOCK) for size in shape)


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the FP8 numbers and the scales of `weight` [rows, columns].

    Of each block the largest number becomes the largest of FP8. Bit for bit what vLLM makes of the
    same numbers when it quantises a model that it loads (`per_block_cast_to_fp8`)."""
    numbers = torch.empty_like(
        weight, dtype=torch.float8_e4m3fn, memory_format=torch.contiguous_format
    )
    scales = weight.new_empty(scale_shape(tuple(weight.shape)), dtype=torch.float32)
    for first in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        of_rows, scales_of_rows = _quantised_rows(weight[rows])
        numbers[rows] = of_rows
        begin = first // BLOCK
        scales[begin : begin + scales_of_rows.shape[0]] = scales_of_rows
    return numbers, scales


def _quantised_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `quantise` does, of so few rows that copies in float32 are affordable."""
    rows, columns = weight.shape
    block_rows, block_columns = scale_shape((rows, columns))
    padded = weight.new_zeros(block_rows * BLOCK, block_columns * BLOCK, dtype=torch.float32)
    padded[:rows, :columns] = weight
    blocks = padded.view(block_rows, BLOCK, block_columns, BLOCK)
    amax = blocks.abs().amax(dim=(1, 3), keepdim=True).clamp(min=_SMALLEST_AMAX)
    scales = amax / _LARGEST
    numbers = (blocks * (1.0 / scales)).to(torch.float8_e4m3fn)
    whole = numbers.view(block_rows * BLOCK, block_columns * BLOCK)
    return whole[:rows, :columns], scales.view(block_rows, block_columns)


def dequantise(
    weight: torch.Tensor, scale_inv: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Multiply float8_e4m3fn [rows, columns] by fp32 [ceil(rows / 128), ceil(columns / 128)].

    Rounds to `dtype` once, one row of blocks at a time. Raises ValueError for other shapes."""
    rows, columns = weight.shape
    wanted = scale_shape((rows, columns))
    if tuple(scale_inv.shape) != wanted:
        raise ValueError(
            f"a weight of shape {tuple(weight.shape)} has scales of shape {wanted}, "
            f"not {tuple(scale_inv.shape)}"
        )
    out = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    for index, scales in enumerate(scale_inv.float()):
        block = slice(index * BLOCK, (index + 1) * BLOCK)
        out[block] = weight[block].float() * scales.repeat_interleave(BLOCK)[:columns]
    return out


def require_whole_blocks(box: Box, shape: tuple[int, ...], name: str) -> None:
    """Raise ConfigError where the part `box` of the tensor `name` of `shape` ends within a block,
    of which no scale can be told."""
    for first, size, whole in zip(box.start, box.shape, shape, strict=True):
        end = first + size
        if first % BLOCK or (end % BLOCK and end != whole):
            raise ConfigError(
                f"a trainer rank holds {size} of {whole} rows or columns of {name!r} from {first} "
                f"on, which is not in whole blocks of {BLOCK}",
                where="rollout.fp8",
                remedy="set trainer.tensor_parallel_size or trainer.expert_tensor_parallel_size "
                "lower, or rollout.fp8 = 'none'",
            )


def box_of_scales(box: Box) -> Box:
    """Return the box of the scales of all blocks of which `box` has a part."""
    start = []
    sizes = []
    for first, size in zip(box.start, box.shape, strict=True):
        begin = first // BLOCK
        start.append(begin)
        sizes.append(-(-(first + size) // BLOCK) - begin)
    return Box(tuple(start), tuple(sizes))


def box_of_blocks(scales: Box, shape: tuple[int, ...]) -> Box:
    """Return the box of the numbers that `scales` are of, in a weight of `shape`."""
    start = []
    sizes = []
    for first, count, whole in zip(scales.start, scales.shape, shape, strict=True):
        start.append(first * BLOCK)
        sizes.append(min((first + count) * BLOCK, whole) - first * BLOCK)
    return Box(tuple(start), tuple(sizes))
