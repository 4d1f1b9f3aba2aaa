"""Rows of Megatron's parameters: which of them are which Hugging Face tensor's, also in parts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_megatron.weights.boxes import whole_box
from grpo_megatron.weights.parameters import (
    Parameter,
    TensorMap,
    carried_parameter,
    num_elements,
    rules_for,
)
from grpo_megatron.weights.tensor_entry import TensorEntry

LAYER = "decoder.layers.1."
HF = "model.layers.1."
QKV = LAYER + "self_attention.linear_qkv.weight"
GATE_UP = LAYER + "mlp.linear_fc1.weight"
DOWN = LAYER + "mlp.linear_fc2.weight"
OUTPUT = "output_layer.weight"
EMBEDDING = "embedding.word_embeddings.weight"

MAP = TensorMap(
    rules=rules_for("qwen2"),
    num_heads=8,
    num_query_groups=4,
    head_dim=3,
    vocab_size=13,
    tied_embeddings=False,
)
"""Two query heads a group; the vocabulary is padded to 14."""
SHAPES = {
    QKV: (48, 5),
    LAYER + "self_attention.linear_qkv.bias": (48,),
    GATE_UP: (12, 5),
    DOWN: (5, 6),
    OUTPUT: (14, 5),
    EMBEDDING: (14, 5),
}


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def tensors_of(parameter: Parameter) -> list[torch.Tensor]:
    """A Hugging Face tensor for each of `parameter.hf`, no two numbers alike."""
    tensors, start = [], 1
    for _, shape in parameter.hf:
        tensors.append(numbered(shape) + start)
        start += tensors[-1].numel()
    return tensors


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            QKV,
            [
                (HF + "self_attn.q_proj.weight", (24, 5)),
                (HF + "self_attn.k_proj.weight", (12, 5)),
                (HF + "self_attn.v_proj.weight", (12, 5)),
            ],
        ),
        (
            LAYER + "self_attention.linear_qkv.bias",
            [
                (HF + "self_attn.q_proj.bias", (24,)),
                (HF + "self_attn.k_proj.bias", (12,)),
                (HF + "self_attn.v_proj.bias", (12,)),
            ],
        ),
        (
            GATE_UP,
            [(HF + "mlp.gate_proj.weight", (6, 5)), (HF + "mlp.up_proj.weight", (6, 5))],
        ),
        (DOWN, [(HF + "mlp.down_proj.weight", (5, 6))]),
        (OUTPUT, [("lm_head.weight", (13, 5))]),
        (EMBEDDING, [("model.embed_tokens.weight", (13, 5))]),
    ],
)
def test_names_and_shapes_of_a_parameter(name, expected):
    parameter = MAP.parameter(name, SHAPES[name])
    assert list(parameter.hf) == expected
    assert (parameter.name, parameter.shape) == (name, SHAPES[name])


def test_a_tied_output_layer_is_the_embedding():
    tied = replace(MAP, tied_embeddings=True)
    assert tied.parameter(OUTPUT, (14, 5)) == tied.parameter(EMBEDDING, (14, 5))
    assert tied.parameter(OUTPUT, (14, 5)).hf[0][0] == "model.embed_tokens.weight"


@pytest.mark.parametrize("name", SHAPES)
def test_splitting_undoes_merging(name):
    parameter = MAP.parameter(name, SHAPES[name])
    tensors = tensors_of(parameter)
    merged = parameter.merge(tensors)
    padded = torch.zeros(SHAPES[name])
    padded[: len(merged)] = merged
    for found, tensor in zip(parameter.split(padded), tensors, strict=True):
        assert torch.equal(found, tensor)


def test_queries_keys_and_values_are_interleaved_by_group():
    parameter = MAP.parameter(QKV, SHAPES[QKV])
    queries, keys, values = tensors_of(parameter)
    merged = parameter.merge([queries, keys, values])
    for group, rows in enumerate(merged.split(12)):
        assert torch.equal(rows[:6], queries[6 * group : 6 * group + 6])
        assert torch.equal(rows[6:9], keys[3 * group : 3 * group + 3])
        assert torch.equal(rows[9:], values[3 * group : 3 * group + 3])


def test_gate_lies_above_up():
    parameter = MAP.parameter(GATE_UP, SHAPES[GATE_UP])
    gate, up = tensors_of(parameter)
    assert torch.equal(parameter.merge([gate, up]), torch.cat([gate, up]))


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", [QKV, LAYER + "self_attention.linear_qkv.bias", GATE_UP])
def test_tensor_parallel_parts_of_rows_join_to_the_whole(name, size):
    """A rank merges its own slice of every tensor: whole query groups, a slice of gate and up."""
    if name == GATE_UP and size == 4:
        size = 3
    parameter = MAP.parameter(name, SHAPES[name])
    tensors = tensors_of(parameter)
    parts = []
    for rank in range(size):
        own = [tensor.chunk(size)[rank] for tensor in tensors]
        parts.append(parameter.merge(own, size))
    assert torch.equal(parameter.join(parts, 0), parameter.merge(tensors))
    if name != GATE_UP:  # of whole groups: simply the next rows
        assert torch.equal(torch.cat(parts), parameter.merge(tensors))
    elif size > 1:
        gate, up = tensors
        assert torch.equal(parts[0], torch.cat([gate.chunk(size)[0], up.chunk(size)[0]]))


@pytest.mark.parametrize(("name", "dim"), [(DOWN, 1), (OUTPUT, 0), (DOWN, 0)])
def test_tensor_parallel_parts_of_a_single_tensor_are_slices(name, dim):
    full = numbered(SHAPES[name])
    parameter = MAP.parameter(name, SHAPES[name])
    parts = full.chunk(2, dim)
    assert torch.equal(parameter.join(parts, dim), full)
    assert torch.equal(
        parameter.split(parameter.join(parts, dim))[0], full[: parameter.hf[0][1][0]]
    )


def test_columns_of_gate_and_up_are_joined_side_by_side():
    full = numbered(SHAPES[GATE_UP])
    parameter = MAP.parameter(GATE_UP, SHAPES[GATE_UP])
    assert torch.equal(parameter.join(full.split([2, 3], 1), 1), full)


def test_entries_describe_its_tensors():
    parameter = MAP.parameter(GATE_UP, SHAPES[GATE_UP])
    assert parameter.entries(torch.bfloat16) == [
        TensorEntry(HF + "mlp.gate_proj.weight", "bfloat16", (6, 5)),
        TensorEntry(HF + "mlp.up_proj.weight", "bfloat16", (6, 5)),
    ]


def test_numbers_of_all_parameters_are_counted():
    parameters = [MAP.parameter(name, shape) for name, shape in SHAPES.items()]
    assert num_elements(parameters) == 48 * 5 + 48 + 12 * 5 + 5 * 6 + 2 * 14 * 5
    assert num_elements([]) == 0


def test_a_carried_tensor_is_a_parameter_of_its_own():
    parameter = carried_parameter("model.layers.4.eh_proj.weight", (2, 4))
    full = numbered((2, 4))
    assert parameter.hf == (("model.layers.4.eh_proj.weight", (2, 4)),)
    assert torch.equal(parameter.split(parameter.merge([full]))[0], full)


@pytest.mark.parametrize(
    ("name", "dim", "size"),
    [
        *((name, None, 1) for name in SHAPES),
        *((name, 0, 2) for name in SHAPES if name != DOWN),
        (DOWN, 1, 2),
        (DOWN, 1, 3),
    ],
)
def test_parts_hold_boxes_of_the_hugging_face_tensors(name, dim, size):
    """All parts of a parameter together hold every tensor once, without padding."""
    parameter = MAP.parameter(name, SHAPES[name])
    tensors = [torch.randn(shape) for _, shape in parameter.hf]
    padding = SHAPES[name][0] - sum(len(tensor) for tensor in tensors)
    full = parameter.merge(tensors)
    if padding:
        full = torch.cat((full, torch.full((padding, *full.shape[1:]), torch.nan)))
    expected = dict(zip([name for name, _ in parameter.hf], tensors, strict=True))
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in expected.items()}
    for rank in range(size):
        part = _part_of(parameter, full, tensors, dim, size, rank)
        for held in parameter.held_by(part, dim, size, rank):
            assert held.shape == tuple(expected[held.name].shape)
            view = held.box.view_in(whole_box(held.shape), found[held.name])
            assert view.isnan().all(), "two parts hold the same"
            view.copy_(held.tensor)
    for hf_name, tensor in expected.items():
        assert torch.equal(found[hf_name], tensor)


def _part_of(parameter, full, tensors, dim, size, rank):
    """What Megatron's rank has: a slice, but of gate and up a slice of both."""
    if dim is None:
        return full
    if dim == 0 and parameter.groups == 1 and len(tensors) > 1:
        return torch.cat([tensor.chunk(size)[rank] for tensor in tensors])
    return full.chunk(size, dim)[rank]


def test_query_groups_that_parts_cannot_share_are_refused():
    parameter = MAP.parameter(QKV, SHAPES[QKV])
    with pytest.raises(ValueError, match="query groups, which 8 parts cannot share"):
        parameter.held_by(torch.zeros(SHAPES[QKV][0] // 8, SHAPES[QKV][1]), 0, 8, 0)
