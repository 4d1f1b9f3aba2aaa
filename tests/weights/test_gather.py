"""The order of a checkpoint; a model on one rank, as a whole and in parts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.gather import PieceReader, Shard, ShardedModel
from grpo_megatron.weights.parameters import TensorMap, rules_for

MAP = TensorMap(
    rules=rules_for("qwen2"),
    num_heads=4,
    num_query_groups=2,
    head_dim=2,
    vocab_size=5,
    tied_embeddings=False,
)


@pytest.mark.parametrize(("dim", "expected"), [(None, (2, 6)), (0, (8, 6)), (1, (2, 24))])
def test_the_full_shape_of_a_part(dim, expected):
    size = 1 if dim is None else 4
    assert Shard("w", torch.zeros(2, 6), dim, size).full_shape == expected


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shards_of(num_layers: int) -> list[Shard]:
    """Three weights a layer and both ends of the vocabulary, padded by a row; in no order."""
    shapes = {"embedding.word_embeddings.weight": (6, 3), "output_layer.weight": (6, 3)}
    for layer in range(num_layers):
        shapes[f"decoder.layers.{layer}.mlp.linear_fc1.weight"] = (4, 3)
        shapes[f"decoder.layers.{layer}.mlp.linear_fc2.weight"] = (3, 2)
    generator = torch.Generator().manual_seed(0)
    shards = [
        Shard(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()
    ]
    return shards[::-1]


def test_parameters_come_in_the_order_of_their_numbers(one_rank):
    model = ShardedModel(MAP, shards_of(11))
    names = [e.parameter.name for e in model.entries]
    layers = [int(name.split(".")[2]) for name in names if name.startswith("decoder.")]
    assert layers == sorted(layers)
    assert names[0] == "decoder.layers.0.mlp.linear_fc1.weight"
    assert names[-2:] == ["embedding.word_embeddings.weight", "output_layer.weight"]
    assert {e.holders for e in model.entries} == {(0,)}


def test_a_tied_output_layer_is_sent_once(one_rank):
    tied = TensorMap(MAP.rules, 4, 2, 2, vocab_size=5, tied_embeddings=True)
    names = [e.parameter.name for e in ShardedModel(tied, shards_of(1)).entries]
    assert "output_layer.weight" not in names
    assert "embedding.word_embeddings.weight" in names


def test_one_rank_streams_its_own_tensors_under_hugging_face_names(one_rank):
    model = ShardedModel(MAP, shards_of(2))
    held = {shard.name: shard.tensor for shard in model.shards}
    entries = model.entries
    found = dict(model.stream(entries, [0] * len(entries)))
    assert len(found) == 2 * 3 + 2
    fc1 = held["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(found["model.layers.1.mlp.gate_proj.weight"], fc1[:2])
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], fc1[2:])
    assert torch.equal(found["lm_head.weight"], held["output_layer.weight"][:5])


def test_parts_are_read_as_the_weights_are_now(one_rank):
    """Also those that are copies of interleaved rows, in a new pass over the weights."""
    model = ShardedModel(MAP, shards_of(2))
    streamed = model.stream(model.entries, [0] * len(model.entries))
    whole = {name: tensor.clone() for name, tensor in streamed}
    held = {item.tensor.name: item for item in model.held_boxes()}
    assert held.keys() == whole.keys()
    for name, tensor in whole.items():
        assert held[name].tensor.shape == tuple(tensor.shape)
        assert held[name].box == whole_box(tensor.shape)
    for shard in model.shards:
        shard.tensor.add_(1)
    reader = PieceReader(model)
    for name, tensor in whole.items():
        assert torch.equal(reader.read(name, whole_box(tensor.shape)), tensor + 1)
        row = Box((1, 0), (1, 2))
        assert torch.equal(reader.read(name, row), tensor[1:2, :2] + 1)
    with pytest.raises(KeyError, match="is not on this rank"):
        reader.read("lm_head.weight", Box((5, 0), (1, 3)))  # the padding


def test_the_tied_output_layer_is_no_part(one_rank):
    tied = TensorMap(MAP.rules, 4, 2, 2, vocab_size=5, tied_embeddings=True)
    model = ShardedModel(tied, shards_of(1))
    names = [item.tensor.name for item in model.held_boxes()]
    assert names.count("model.embed_tokens.weight") == 1
    weights = {shard.name: shard.tensor for shard in model.shards}
    embedding = weights["embedding.word_embeddings.weight"]
    read = PieceReader(model).read("model.embed_tokens.weight", whole_box((5, 3)))
    assert torch.equal(read, embedding[:5])


def test_adapters_get_ready_before_weights_are_given_away(one_rank):
    """Once for each pass over the weights."""
    ready: list[bool] = []
    weight = torch.ones(3, 2)
    shard = Shard(
        "decoder.layers.0.mlp.linear_fc2.weight",
        weight,
        addend=lambda: torch.full((3, 2), float(len(ready))),
        prepare=lambda: ready.append(True),
    )
    model = ShardedModel(MAP, [shard])
    [(name, streamed)] = model.stream(model.entries, [0])
    assert torch.equal(streamed, weight + 1)
    read = PieceReader(model).read(name, whole_box((3, 2)))
    assert torch.equal(read, weight + 2)
