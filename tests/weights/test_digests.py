"""What a digest must notice, and that it depends on nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.weights.tensor_entry import digest_tensor

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.uint8,
    torch.int64,
    torch.float8_e4m3fn,
]


def random_bytes(num_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator)


@given(num_bytes=st.integers(1, 5000), bit=st.integers(0, 1 << 20), seed=st.integers(0, 99))
@settings(max_examples=100, deadline=None)
def test_one_flipped_bit(num_bytes, bit, seed):
    data = random_bytes(num_bytes, seed)
    changed = data.clone()
    changed[bit % num_bytes] ^= 1 << (bit // num_bytes % 8)
    assert digest_tensor(changed) != digest_tensor(data)


@given(rows=st.integers(2, 40), columns=st.integers(1, 70), seed=st.integers(0, 99), data=st.data())
@settings(max_examples=50, deadline=None)
def test_two_swapped_rows_and_a_transpose(rows, columns, seed, data):
    tensor = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    i, j = (data.draw(st.integers(0, rows - 1)) for _ in range(2))
    order = list(range(rows))
    order[i], order[j] = j, i
    assert (digest_tensor(tensor[order]) != digest_tensor(tensor)) == (i != j)
    if rows == columns:
        assert digest_tensor(tensor.T) != digest_tensor(tensor)


def test_dtype_and_shape_count():
    zeros = torch.zeros(6, 4, dtype=torch.float32)
    others = [
        zeros.view(torch.int32),
        zeros.view(4, 6),
        zeros.view(24),
        zeros.view(6, 4, 1),
        torch.zeros(6, 8, dtype=torch.bfloat16),
        torch.zeros(6, 5),
    ]
    assert len({digest_tensor(t) for t in [zeros, *others]}) == 7


@given(size=st.integers(1, 500), dtype=st.sampled_from(DTYPES), seed=st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_layout_in_memory_does_not_count(size, dtype, seed):
    tensor = random_bytes(size * dtype.itemsize, seed).view(dtype)
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), tensor.view(torch.uint8)])
    strided = torch.stack([tensor.view(torch.uint8).view(size, -1)] * 2, 1).view(dtype)[:, 0]
    assert digest_tensor(tensor) == digest_tensor(tensor.clone())
    if dtype.itemsize == 1:
        assert digest_tensor(shifted[1:].view(dtype)) == digest_tensor(tensor)
    assert digest_tensor(strided.reshape(-1)) == digest_tensor(tensor)


def test_scalars_and_empty_tensors():
    tensors = [
        torch.tensor(1.0),
        torch.tensor([1.0]),
        torch.empty(0),
        torch.empty(0, 3),
        torch.tensor(True),
    ]
    assert len({digest_tensor(t) for t in tensors}) == len(tensors)


def test_golden_value():
    """Digests are compared between processes, machines and years: they must not drift."""
    assert digest_tensor(torch.arange(10, dtype=torch.float32)) == GOLDEN


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_equals_cpu():
    for tensor in (torch.randn(1000, 777), torch.randn(3).bfloat16(), torch.randn(5 << 20)):
        assert digest_tensor(tensor.cuda()) == digest_tensor(tensor)


GOLDEN = "f2d67b2942746c79a7a8bb78435002a4"
