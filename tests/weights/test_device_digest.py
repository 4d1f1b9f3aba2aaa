"""Digests that torch computes where the bytes are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.weights import digest
from grpo_megatron.weights.digest import digest_of

SIZES = [0, 1, 7, 8, 9, 8 * 1024, 8 * 1024 + 3, 8 * 1024 * 32, 8 * 1024 * 33 + 8, 8 * 1024 * 100]


def some_bytes(size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)


def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(digest_of(one), digest_of(other))


@given(size=st.sampled_from(SIZES[1:]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_any_changed_bit_changes_it(size, data):
    tensor = some_bytes(size)
    changed = tensor.clone()
    changed[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = digest_of(tensor) == digest_of(changed)
    assert not found.any(), "rows and columns both"


@given(size=st.sampled_from(SIZES[5:]), data=st.data())
@settings(max_examples=200, deadline=None)
def test_words_that_change_places_change_it(size, data):
    tensor = some_bytes(size // 8 * 8)
    words = tensor.view(torch.int64)
    first = data.draw(st.integers(0, len(words) - 1))
    second = data.draw(st.integers(0, len(words) - 1))
    changed = words.clone()
    changed[[first, second]] = words[[second, first]]
    assert equal(words, changed) == (first == second)


@pytest.mark.parametrize("size", SIZES)
def test_a_cpu_and_other_devices_find_the_same(size):
    data = some_bytes(size)
    assert torch.equal(digest._sums_by_numpy(data), digest._sums_by_torch(data))


def test_type_shape_and_label_count():
    zeros = torch.zeros(4, 4)
    others = [
        zeros.view(2, 8),
        zeros.to(torch.bfloat16),
        zeros.view(torch.int32),
        torch.zeros(4, 5),
    ]
    assert not any(equal(zeros, other) for other in others)
    assert not torch.equal(digest_of(zeros, "a"), digest_of(zeros, "b"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8])
def test_where_the_bytes_lie_does_not_matter(dtype):
    tensor = torch.arange(5000).to(dtype)
    shifted = torch.cat((torch.zeros(1, dtype=dtype), tensor))[1:]
    assert torch.equal(digest_of(shifted), digest_of(tensor))


def test_golden_number():
    """The same in every process, version and machine."""
    assert digest_of(torch.arange(10, dtype=torch.float32), "x").tolist() == GOLDEN


GOLDEN = [6921134345685681223, 3800089171504776263]
