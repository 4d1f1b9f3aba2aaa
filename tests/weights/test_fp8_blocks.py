"""FP8 numbers and scales of blocks: rounding, and the boxes of parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.fp8_blocks import (
    box_of_blocks,
    box_of_scales,
    dequantise,
    quantise,
    require_whole_blocks,
    scale_shape,
)

SHAPES = st.tuples(st.integers(1, 300), st.integers(1, 300))


def random_matrix(shape: tuple[int, int], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Numbers whose sizes differ from block to block by factors of ten thousand."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (4 * torch.rand(scale_shape(shape), generator=generator) - 2)
    of_numbers = sizes.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    numbers = torch.randn(shape, generator=generator)
    return (numbers * of_numbers[: shape[0], : shape[1]]).to(dtype)


@given(SHAPES, st.integers(0, 1000), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(deadline=None, max_examples=30)
def test_every_number_is_rounded_as_its_block_allows(shape, seed, dtype):
    weight = random_matrix(shape, seed, dtype)
    numbers, scales = quantise(weight)
    assert numbers.shape == weight.shape and numbers.dtype == torch.float8_e4m3fn
    assert tuple(scales.shape) == scale_shape(shape) and scales.dtype == torch.float32
    rounded = dequantise(numbers, scales, torch.float32)
    of_numbers = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    of_numbers = of_numbers[: shape[0], : shape[1]]
    # three bits of mantissa; below 2**-6 steps of 2**-9
    allowed = torch.maximum(weight.float().abs() / 16, of_numbers * 2.0**-10) * 1.001
    assert ((rounded - weight.float()).abs() <= allowed).all()
    again, scales_again = quantise(rounded)
    torch.testing.assert_close(dequantise(again, scales_again, torch.float32), rounded)


def test_the_largest_number_of_a_block_is_the_largest_of_fp8():
    weight = random_matrix((200, 260), 0, torch.float32)
    numbers, scales = quantise(weight)
    amax = weight[:BLOCK, BLOCK : 2 * BLOCK].abs().max()
    assert float(scales[0, 1]) == float(amax / 448)
    assert float(numbers[:BLOCK, BLOCK : 2 * BLOCK].float().abs().max()) == 448


def test_zeros_stay_zeros():
    numbers, scales = quantise(torch.zeros(5, 130))
    assert not numbers.float().any() and (scales > 0).all()


def test_many_rows_are_what_few_rows_are():
    """They are computed some thousand at a time."""
    weight = random_matrix((16 * BLOCK * 2 + 70, 40), 1, torch.bfloat16)
    numbers, scales = quantise(weight)
    for block in range(scales.shape[0]):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        of_block, scale = quantise(weight[rows])
        assert torch.equal(numbers[rows].view(torch.uint8), of_block.view(torch.uint8))
        assert torch.equal(scales[block : block + 1], scale)


@given(SHAPES, st.data())
def test_scales_and_numbers_of_a_part_belong_together(shape, data):
    """Of every part of whole blocks: its scales are those of the matrix, and lead back to it."""
    start, size = [], []
    for whole, blocks in zip(shape, scale_shape(shape), strict=True):
        first = data.draw(st.integers(0, blocks - 1))
        last = data.draw(st.integers(first + 1, blocks))
        start.append(first * BLOCK)
        size.append(min(last * BLOCK, whole) - first * BLOCK)
    part = Box(tuple(start), tuple(size))
    require_whole_blocks(part, shape, "w")
    scales = box_of_scales(part)
    assert whole_box(scale_shape(shape)).contains(scales)
    assert scales.shape == scale_shape(part.shape)
    assert box_of_blocks(scales, shape) == part


@pytest.mark.parametrize(
    ("box", "size"),
    [(Box((0, 64), (300, 128)), 128), (Box((128, 0), (100, 200)), 100)],
    ids=["begins within a block", "ends within a block"],
)
def test_a_part_of_a_block_has_no_scale(box, size):
    with pytest.raises(ConfigError, match=rf"holds {size} of \d+ rows or columns of 'w'") as error:
        require_whole_blocks(box, (300, 200), "w")
    assert error.value.where == "rollout.fp8"
