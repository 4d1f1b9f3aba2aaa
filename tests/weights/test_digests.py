"""What a digest must notice, and that it depends on nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.weights import digests
from grpo_megatron.weights.digests import BLOCK_WORDS, digest_tensor, sha256_tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64,
          torch.float8_e4m3fn]
both = pytest.mark.parametrize("digest", [digest_tensor, sha256_tensor])


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@both
@given(num_bytes=st.integers(1, 5000), bit=st.integers(0, 1 << 20), seed=st.integers(0, 99))
@settings(max_examples=200, deadline=None)
def test_one_flipped_bit(digest, num_bytes, bit, seed):
    data = random_bytes(num_bytes, seed)
    changed = data.clone()
    changed[bit % num_bytes] ^= 1 << (bit // num_bytes % 8)
    assert digest(changed) != digest(data)


@given(num_bytes=st.integers(2, 3 * 8 * BLOCK_WORDS), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=30, deadline=None)
def test_one_flipped_bit_in_any_block(num_bytes, seed, data):
    tensor = random_bytes(num_bytes, seed)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, num_bytes - 1))] ^= 0x80
    assert digest_tensor(changed) != digest_tensor(tensor)


@both
@given(size=st.integers(2, 300), seed=st.integers(0, 99), data=st.data(),
       dtype=st.sampled_from(DTYPES))
@settings(max_examples=200, deadline=None)
def test_two_swapped_elements(digest, size, seed, data, dtype):
    tensor = random_bytes(size * dtype.itemsize, seed).view(dtype)
    i = data.draw(st.integers(0, size - 1))
    j = data.draw(st.integers(0, size - 1))
    swapped = tensor.clone()
    raw, new = tensor.view(torch.uint8).view(size, -1), swapped.view(torch.uint8).view(size, -1)
    new[i], new[j] = raw[j], raw[i]
    assert (digest(swapped) != digest(tensor)) == (not torch.equal(raw[i], raw[j]))


@given(seed=st.integers(0, 999), i=st.integers(0, 4095), j=st.integers(0, 4095))
@settings(max_examples=100, deadline=None)
def test_two_changed_signs(seed, i, j):
    """Top bits cancel in a plain sum of products with odd factors; they must not here."""
    tensor = torch.randn(4096, generator=torch.Generator().manual_seed(seed))
    changed = tensor.clone()
    changed[i], changed[j] = -changed[i], -changed[j]
    assert digest_tensor(changed) != digest_tensor(tensor)


@given(rows=st.integers(2, 40), columns=st.integers(1, 70), seed=st.integers(0, 99),
       data=st.data())
@settings(max_examples=100, deadline=None)
def test_two_swapped_rows_and_a_transpose(rows, columns, seed, data):
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    i, j = (data.draw(st.integers(0, rows - 1)) for _ in range(2))
    order = list(range(rows))
    order[i], order[j] = j, i
    assert (digest_tensor(tensor[order]) != digest_tensor(tensor)) == (i != j)
    if rows == columns:
        assert digest_tensor(tensor.T) != digest_tensor(tensor)


def test_swapped_blocks():
    tensor = random_bytes(4 * 8 * BLOCK_WORDS, 0).view(4, -1)
    assert digest_tensor(tensor[[1, 0, 2, 3]]) != digest_tensor(tensor)


@both
def test_dtype_and_shape_count(digest):
    zeros = torch.zeros(6, 4, dtype=torch.float32)
    others = [zeros.view(torch.int32), zeros.view(4, 6), zeros.view(24), zeros.view(6, 4, 1),
              torch.zeros(6, 8, dtype=torch.bfloat16), torch.zeros(6, 5)]
    assert len({digest(t) for t in [zeros, *others]}) == 7


@both
@given(size=st.integers(1, 500), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_layout_in_memory_does_not_count(digest, size, dtype, seed):
    tensor = random_bytes(size * dtype.itemsize, seed).view(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(torch.uint8)])
    strided = torch.stack([tensor.view(torch.uint8).view(size, -1)] * 2, 1).view(dtype)[:, 0]
    assert digest(tensor) == digest(tensor.clone())
    if dtype.itemsize == 1:
        assert digest(shifted[1:].view(dtype)) == digest(tensor)
    assert digest(strided.reshape(-1)) == digest(tensor)


@both
def test_scalars_and_empty_tensors(digest):
    tensors = [torch.tensor(1.0), torch.tensor([1.0]), torch.empty(0), torch.empty(0, 3),
               torch.tensor(True)]
    assert len({digest(t) for t in tensors}) == len(tensors)


def test_golden_values():
    """Digests are compared between processes and machines: their definition must not drift."""
    assert digest_tensor(torch.arange(10, dtype=torch.float32)) == GOLDEN[0]
    assert digest_tensor(torch.arange(3 * BLOCK_WORDS, dtype=torch.int32).view(3, -1)) == GOLDEN[1]


@given(num_bytes=st.integers(8, 3 * 8 * BLOCK_WORDS), seed=st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_both_ways_to_sum_blocks(num_bytes, seed):
    """NumPy on a CPU, torch on an accelerator; here torch's runs on the CPU too."""
    whole = random_bytes(num_bytes // 8 * 8, seed)
    cut = whole.numel() // (8 * BLOCK_WORDS) * 8 * BLOCK_WORDS
    parts = [whole[:cut].view(torch.int64).view(-1, BLOCK_WORDS),
             whole[cut:].view(torch.int64).view(1, -1)]
    by_torch = b"".join(digests._block_sums(part) for part in parts if part.numel())
    assert digests._block_sums_cpu(whole.numpy()) == by_torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu():
    for tensor in (torch.randn(1000, 777), torch.randn(3).bfloat16(), torch.randn(5 << 20)):
        assert digest_tensor(tensor.cuda()) == digest_tensor(tensor)


GOLDEN = ("ab3b640a3beb2d2149818605e51b678a", "1c864a72089709b0a0c9f85028e1a332")
