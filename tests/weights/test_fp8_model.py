"""What a rank publishes in FP8 of the weights that it holds."""

from __future__ import annotations

import pytest
import torch

from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.fp8_blocks import quantise
from grpo_megatron.weights.fp8_model import Fp8Model
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import TensorMap, rules_for

HIDDEN, WIDTH, EXPERT = 160, 256, 130
"""Neither the hidden size nor the width of experts is a multiple of a block."""
MAP = TensorMap(
    rules=rules_for("qwen3_moe"),
    num_heads=4,
    num_query_groups=2,
    head_dim=64,
    vocab_size=5,
    tied_embeddings=False,
)
LAYER = "decoder.layers.3."
SHAPES = {
    "embedding.word_embeddings.weight": (6, HIDDEN),
    "output_layer.weight": (6, HIDDEN),
    LAYER + "input_layernorm.weight": (HIDDEN,),
    LAYER + "self_attention.linear_qkv.weight": (8 * 64, HIDDEN),
    LAYER + "self_attention.q_layernorm.weight": (64,),
    LAYER + "self_attention.linear_proj.weight": (HIDDEN, 4 * 64),
    LAYER + "mlp.linear_fc1.weight": (2 * WIDTH, HIDDEN),
    LAYER + "mlp.router.weight": (8, HIDDEN),
    LAYER + "mlp.experts.linear_fc1.weight7": (2 * EXPERT, HIDDEN),
    LAYER + "mlp.experts.local_experts.6.linear_fc2.weight": (HIDDEN, EXPERT),
}
IN_FP8 = {
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.experts.7.gate_proj",
    "mlp.experts.7.up_proj",
    "mlp.experts.6.down_proj",
}


@pytest.fixture
def model() -> ShardedModel:
    generator = torch.Generator().manual_seed(0)
    shards = []
    for name, shape in SHAPES.items():
        numbers = torch.randn(shape, generator=generator).to(torch.bfloat16)
        shards.append(Shard(name, numbers))
    return ShardedModel(MAP, shards)


def test_matrices_of_layers_are_in_fp8_and_nothing_else(model):
    boxes = Fp8Model(model).held_boxes()
    in_fp8 = {held.tensor.name for held in boxes if held.tensor.dtype == "float8_e4m3fn"}
    assert in_fp8 == {f"model.layers.3.{module}.weight" for module in IN_FP8}
    scales = {held.tensor.name for held in boxes if held.tensor.name.endswith("_scale_inv")}
    assert scales == {f"{name}_scale_inv" for name in in_fp8}
    for held in boxes:
        assert held.box == whole_box(held.tensor.shape)
        if held.tensor.name in scales:
            assert held.tensor.dtype == "float32"
        elif held.tensor.name not in in_fp8:
            assert held.tensor.dtype == "bfloat16"


def test_parts_are_those_of_the_whole_matrix(model):
    """In any order, also as the weights are after they changed."""
    published = Fp8Model(model)
    for _ in range(2):
        weights = model.reader()
        reader = published.reader()
        expected = {}
        for held in published.held_boxes():
            name = held.tensor.name
            if name.endswith("_scale_inv"):
                continue
            whole = weights.read(name, held.box)
            if held.tensor.dtype == "float8_e4m3fn":
                expected[name], expected[f"{name}_scale_inv"] = quantise(whole)
            else:
                expected[name] = whole
        for name, tensor in sorted(expected.items(), reverse=True):
            assert same_bytes(reader.read(name, whole_box(tensor.shape)), tensor)
        matrix = "model.layers.3.mlp.gate_proj.weight"
        within = Box((130, 3), (40, 150))  # of several blocks, none of them whole
        assert same_bytes(reader.read(matrix, within), expected[matrix][130:170, 3:153])
        last = Box((1, 1), (1, 1))
        scale = reader.read(f"{matrix}_scale_inv", last)
        assert same_bytes(scale, expected[f"{matrix}_scale_inv"][1:2, 1:2])
        for shard in model.shards:
            shard.tensor.mul_(-1.5)


def test_numbers_and_scales_are_computed_once(model, monkeypatch):
    calls = []

    def counted(weight: torch.Tensor):
        calls.append(weight.shape)
        return quantise(weight)

    monkeypatch.setattr("grpo_megatron.weights.fp8_model.quantise", counted)
    reader = Fp8Model(model).reader()
    matrix = "model.layers.3.self_attn.o_proj.weight"
    reader.read(matrix, Box((0, 0), (128, 256)))
    reader.read(f"{matrix}_scale_inv", Box((0, 0), (1, 2)))
    assert calls == [(128, 256)]


def test_tensor_parallel_parts_have_the_scales_of_the_whole():
    """Each rank rounds its own rows or columns; together they are the matrix rounded."""
    whole = torch.randn(160, 512, generator=torch.Generator().manual_seed(2))
    numbers, scales = quantise(whole)
    name = LAYER + "self_attention.linear_proj.weight"
    for rank in range(2):
        columns = slice(rank * 256, (rank + 1) * 256)
        shard = Shard(name, whole[:, columns].contiguous(), dim=1, size=2, rank=rank)
        published = Fp8Model(ShardedModel(MAP, [shard]))
        matrix, of_scales = published.held_boxes()
        assert matrix.box == Box((0, rank * 256), (160, 256))
        assert of_scales.box == Box((0, rank * 2), (2, 2))
        reader = published.reader()
        read = reader.read(matrix.tensor.name, matrix.box)
        assert same_bytes(read, numbers[:, columns])
        read = reader.read(of_scales.tensor.name, of_scales.box)
        assert same_bytes(read, scales[:, rank * 2 : rank * 2 + 2])


def test_adapters_are_rounded_with_the_weights():
    name = LAYER + "self_attention.linear_proj.weight"
    weight, added = torch.ones(160, 256), torch.full((160, 256), 0.5)
    ready: list[bool] = []
    shard = Shard(name, weight, addend=lambda: added, prepare=lambda: ready.append(True))
    reader = Fp8Model(ShardedModel(MAP, [shard])).reader()
    assert ready == [True]
    numbers, _ = quantise(weight + added)
    matrix = "model.layers.3.self_attn.o_proj.weight"
    assert same_bytes(reader.read(matrix, whole_box((160, 256))), numbers)
    of_scales = reader.read(f"{matrix}_scale_inv", whole_box((2, 2)))
    assert float(of_scales[0, 0]) == pytest.approx(1.5 / 448)


def same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))
