"""Which sender sends what; the order of a checkpoint; a model on one rank."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from grpo_megatron.weights.gather import GatherEntry, Shard, ShardedModel, assign_to_senders
from grpo_megatron.weights.parameters import Parameter, TensorMap, rules_for

MAP = TensorMap(
    rules=rules_for("qwen2"),
    num_heads=4,
    num_query_groups=2,
    head_dim=2,
    vocab_size=5,
    tied_embeddings=False,
)


def entry(name: str, shape: tuple[int, ...], holders: tuple[int, ...], dtype=torch.float32):
    return GatherEntry(Parameter(name, shape, ((name, shape),)), dtype, holders)


def names_by_sender(entries: list[GatherEntry], senders: list[int]) -> dict[int, list[str]]:
    parts = assign_to_senders(entries, senders)
    return {sender: [e.parameter.name for e in part] for sender, part in parts.items()}


def test_a_sender_that_holds_a_parameter_sends_it():
    entries = [entry("a", (4,), (0, 1)), entry("b", (400,), (2, 3)), entry("c", (4,), (2,))]
    assert names_by_sender(entries, [0, 2]) == {0: ["a"], 2: ["b", "c"]}


def test_of_several_holders_the_one_with_the_fewest_bytes_sends():
    everywhere = (0, 1)
    entries = [
        entry("a", (10, 3), everywhere),
        entry("b", (10, 2), everywhere, torch.bfloat16),
        entry("c", (30,), everywhere, torch.bfloat16),  # 60 bytes, after 120 and 40
        entry("d", (6,), everywhere),
        entry("e", (2,), everywhere),
    ]
    assert names_by_sender(entries, [1, 0]) == {0: ["a", "e"], 1: ["b", "c", "d"]}


def test_what_no_sender_holds_goes_to_the_one_with_the_fewest_bytes():
    entries = [entry("a", (9,), (0,)), entry("b", (1,), (5,)), entry("c", (1,), (5,))]
    assert names_by_sender(entries, [0, 1]) == {0: ["a"], 1: ["b", "c"]}


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
