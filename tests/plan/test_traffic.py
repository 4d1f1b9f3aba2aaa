"""Bytes of collectives, added up by hand; `tests/trace` holds them against the real trainer."""

from __future__ import annotations

import pytest

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.traffic import Step, forward_traffic, gradient_traffic, update_traffic
from grpo_megatron.plan.weights import sizes_of
from tests.plan.test_memory import DENSE, MOE, VOCAB

TOKENS = 128
POLICY_TOKENS = OWN_POLICY_TOKENS = 100
HIDDEN = TOKENS * DENSE["hidden_size"] * 4
"""Bytes of the hidden states of a micro-batch, float32."""
LAYERS = DENSE["num_hidden_layers"]


def sizes(hf: dict, **trainer):
    return sizes_of(hf, VOCAB, TrainerConfig(precision="float32", **trainer))


def step(stage: int = 0, place: int = 0) -> Step:
    return Step(stage, place, TOKENS, POLICY_TOKENS, OWN_POLICY_TOKENS, on_gpu=True)


def test_one_rank_sends_nothing_but_its_gradients():
    s = sizes(DENSE)
    assert forward_traffic(s, step(), 3) == {}
    found = gradient_traffic(s, step(), 3, frozen_routers=False)
    assert set(found) == {("reduce-scatter", "dp", "float32")}


def test_tensor_and_sequence_parallelism():
    found = forward_traffic(sizes(DENSE, num_ranks=2, tensor_parallel_size=2), step(), 1)
    assert found == {
        # before attention and MLP of every layer, and before the output layer
        ("all-gather", "tp", "float32"): (2 * LAYERS + 1) * HIDDEN,
        # after them, and after the embedding
        ("reduce-scatter", "tp", "float32"): (2 * LAYERS + 1) * HIDDEN,
        ("all-reduce", "tp", "float32"): 4 * 4 * POLICY_TOKENS,
    }


def test_without_sequence_parallelism():
    s = sizes(DENSE, num_ranks=2, tensor_parallel_size=2, sequence_parallel=False)
    found = forward_traffic(s, step(), 1)
    of_tokens = 4 * 4 * POLICY_TOKENS
    assert found == {("all-reduce", "tp", "float32"): (2 * LAYERS + 1) * HIDDEN + of_tokens}


def test_context_ranks_gather_keys_and_values_and_what_they_found():
    s = sizes(DENSE, num_ranks=2, context_parallel_size=2)
    found = forward_traffic(s, step(), 1)
    keys = LAYERS * TOKENS * 2 * DENSE["num_key_value_heads"] * DENSE["head_dim"] * 4
    of_tokens = 4 * 2 * POLICY_TOKENS
    assert found == {
        ("all-gather", "cp", "float32"): keys,
        ("all-reduce", "cp", "float32"): of_tokens,
    }
    backward = gradient_traffic(s, step(), 3, frozen_routers=False) - forward_traffic(s, step(), 3)
    assert backward["reduce-scatter", "cp", "float32"] == 3 * keys
    assert set(backward) == {
        ("reduce-scatter", "cp", "float32"),
        ("reduce-scatter", "dp", "float32"),
    }


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputed_attention_gathers_keys_again(recompute):
    layout = {"num_ranks": 2, "context_parallel_size": 2}
    once, twice = (
        gradient_traffic(sizes(DENSE, **layout, **more), step(), 1, frozen_routers=False)
        for more in ({}, {"recompute": recompute})
    )
    key = ("all-gather", "cp", "float32")
    assert twice[key] == 2 * once[key] > 0


@pytest.mark.parametrize(("stage", "received", "sent"), [(0, 0, 1), (1, 1, 1), (2, 1, 0)])
def test_pipeline_stages_pass_on_hidden_states_and_their_shape(stage, received, sent):
    s = sizes(DENSE, num_ranks=3, pipeline_parallel_size=3)
    found = forward_traffic(s, step(stage), 5)
    for kind, count in (("receive", received), ("send", sent)):
        assert found[kind, "pp", "float32"] == 5 * count * HIDDEN
        assert found[kind, "pp", "int64"] == 5 * count * 3 * 8
    backward = gradient_traffic(s, step(stage), 5, frozen_routers=False)
    for kind in ("receive", "send"):
        assert backward[kind, "pp", "float32"] == 5 * (received + sent) * HIDDEN


def test_recomputed_layers_send_again():
    layout = {"num_ranks": 2, "tensor_parallel_size": 2}
    once = gradient_traffic(sizes(DENSE, **layout), step(), 1, frozen_routers=False)
    s = sizes(DENSE, **layout, recompute="full")
    again = gradient_traffic(s, step(), 1, frozen_routers=False)
    key = ("all-gather", "tp", "float32")
    assert again[key] - once[key] == 2 * LAYERS * HIDDEN


def test_tokens_go_to_their_experts_and_back():
    s = sizes(MOE, num_ranks=4, expert_parallel_size=4)
    found = forward_traffic(s, step(), 1)
    rows = TOKENS * MOE["num_experts_per_tok"]
    layers = MOE["num_hidden_layers"]
    assert found == {
        ("all-to-all", "ep", "float32"): layers * (2 * rows * MOE["hidden_size"] * 4 + rows * 4),
        ("all-gather", "ep_etp", "int64"): layers * MOE["num_experts"] * 4 * 8,
    }


def test_what_does_not_divide_goes_to_the_first_experts():
    s = sizes(MOE, num_ranks=8, expert_parallel_size=8)
    odd = Step(
        0, 0, 5, 4, 4, on_gpu=True
    )  # ten rows for sixteen experts: one for each of the first
    key = ("all-to-all", "ep", "float32")
    of_row = MOE["num_hidden_layers"] * MOE["hidden_size"] * 4
    of_probabilities = MOE["num_hidden_layers"] * 10 * 4
    by_place = {}
    for place in range(8):
        moved = forward_traffic(s, Step(0, place, odd.tokens, 4, 4, on_gpu=True), 1)[key]
        by_place[place] = (moved - of_probabilities) // of_row
    # every rank sends ten rows; the first five get two from each of eight ranks, and send them back
    assert by_place == dict.fromkeys(range(5), 10 + 16) | dict.fromkeys(range(5, 8), 10)


def test_weights_are_gathered_once_with_overlap_and_by_each_optimizer_without():
    s = sizes(MOE, num_ranks=4, expert_parallel_size=2)
    once = update_traffic(s, step(), frozen_routers=False, overlaps=True)
    twice = update_traffic(s, step(), frozen_routers=False, overlaps=False)
    assert set(once) == {("all-gather", "dp", "float32"), ("all-gather", "edp", "float32")}
    for key, size in once.items():
        # buckets of the overlapped reduction are padded each
        assert twice[key] == pytest.approx(2 * size, rel=0.01)


def test_a_whole_optimizer_gathers_nothing():
    s = sizes(DENSE, num_ranks=2, distributed_optimizer=False)
    assert update_traffic(s, step(), frozen_routers=False, overlaps=False) == {}
