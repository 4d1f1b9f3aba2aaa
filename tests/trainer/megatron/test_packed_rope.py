"""Rotating all packed tokens at once equals rotating one sequence at a time."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.megatron.rope import rotate_packed
from grpo_megatron.trainer.megatron.row_context import row_of


def one_by_one(x, lengths, freqs):
    """The textbook formula, sequence by sequence; features past the rotary ones stay."""
    size, parts = freqs.size(-1), []
    for part in x.split(lengths):
        angles = freqs[: len(part), 0]
        first, second = part[..., :size].chunk(2, -1)
        rotated = part[..., :size] * angles.cos() + torch.cat([-second, first], -1) * angles.sin()
        parts.append(torch.cat([rotated, part[..., size:]], -1))
    return torch.cat(parts)


@pytest.mark.parametrize("rotary_size", [8, 4])
@pytest.mark.parametrize("lengths", [[5], [1, 1, 1], [3, 7, 1, 7, 2]])
def test_packed_is_one_sequence_at_a_time(lengths, rotary_size):
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    half = draw(max(lengths), 1, 1, rotary_size // 2)
    freqs = torch.cat([half, half], -1)
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    x, weight = draw(sum(lengths), 3, 8).requires_grad_(), draw(sum(lengths), 3, 8)
    found, expected = rotate_packed(x, cu_seqlens, freqs), one_by_one(x, lengths, freqs)
    gradients = [torch.autograd.grad((y * weight).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(*gradients)


def test_kept_angles_belong_to_their_dtype_and_freqs():
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    freqs = torch.rand(3, 1, 1, 4).repeat(1, 1, 1, 2)
    x = torch.rand(5, 2, 8)
    first = rotate_packed(x, cu_seqlens, freqs)
    assert rotate_packed(x.bfloat16(), cu_seqlens, freqs).dtype == torch.bfloat16
    assert not torch.equal(rotate_packed(x, cu_seqlens, freqs + 1), first)
    assert torch.equal(rotate_packed(x, cu_seqlens, freqs), first)


def test_the_scale_is_of_the_rotated_features_only():
    cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    freqs = torch.rand(3, 1, 1, 2).repeat(1, 1, 1, 2)
    x = torch.rand(5, 2, 8)
    expected = torch.cat([one_by_one(x, [2, 3], freqs)[..., :4] * 1.5, x[..., 4:]], -1)
    torch.testing.assert_close(rotate_packed(x, cu_seqlens, freqs, 1.5), expected)


def test_positions_say_where_a_branch_goes_on():
    """A prompt of two tokens, and two completions that continue it."""
    freqs = torch.rand(4, 1, 1, 4).repeat(1, 1, 1, 2)
    x = torch.randn(6, 2, 8)
    cu_seqlens = torch.tensor([0, 2, 4, 6], dtype=torch.int32)
    row_of(cu_seqlens).positions = torch.tensor([0, 1, 2, 3, 2, 3])
    found = rotate_packed(x, cu_seqlens, freqs)
    for rows in ([0, 1, 2, 3], [0, 1, 4, 5]):
        alone = torch.tensor([0, 4], dtype=torch.int32)
        torch.testing.assert_close(found[rows], rotate_packed(x[rows], alone, freqs))
