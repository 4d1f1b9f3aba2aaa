"""What adapters add to a weight that is kept as it is."""

from __future__ import annotations

import torch

from grpo_megatron.weights.gather import Shard
from grpo_megatron.weights.low_rank import (
    addend_of_dora,
    exact_sum,
    low_rank_product,
    merged,
    row_norms,
)


def test_a_product_is_scaled():
    a = torch.tensor([[1.0, 2.0]])
    b = torch.tensor([[3.0], [-1.0]])
    assert low_rank_product(a, b, 0.5).tolist() == [[1.5, 3.0], [-0.5, -1.0]]


def test_a_sum_is_rounded_once():
    """Just above the middle of two neighbours in bfloat16; the addend alone would round to it."""
    weight = torch.ones(1, dtype=torch.bfloat16)
    addend = torch.tensor([2**-8 + 2**-17])
    assert merged(weight, addend).tolist() == [1 + 2**-7]
    assert exact_sum(weight, addend).tolist() == [1 + 2**-8 + 2**-17]
    assert weight.tolist() == [1.0]
    shard = Shard("w", weight, addend=lambda: addend)
    assert shard.value().tolist() == [1 + 2**-7]


def test_dora_turns_a_row_to_the_sum_and_gives_it_its_magnitude():
    """The row (3, 0) plus (0, 4) has the norm 5; with a magnitude of 10 it becomes (6, 8)."""
    weight = torch.tensor([[3.0, 0.0], [1.0, 0.0]])
    product = torch.tensor([[0.0, 4.0], [0.0, 0.0]])
    norms = row_norms(weight, product)
    assert norms.tolist() == [5, 1]
    addend = addend_of_dora(weight, product, torch.tensor([10.0, 1.0]), norms)
    assert (weight + addend).tolist() == [[6, 8], [1, 0]]


def test_norms_are_rounded_as_their_weight_is():
    """So that nothing is added before the first step, whose magnitude is the norm."""
    weight = torch.tensor([[1.0, 2**-4]], dtype=torch.bfloat16)
    assert row_norms(weight, torch.zeros(1, 2)).tolist() == [1.0]  # and not 1.00195
