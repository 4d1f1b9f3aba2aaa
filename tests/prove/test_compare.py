"""What is compared, what is counted, and what ranks answer when one request goes wrong."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.errors import TrainerError
from grpo_megatron.launch.processes import ChildProcess
from grpo_megatron.plan.model_facts import facts_from_hf
from grpo_megatron.prove.compare import largest_difference, largest_relative_difference
from grpo_megatron.prove.parts.layers import errors_by_name
from grpo_megatron.prove.planned import layers_that_fit, planned_memory
from grpo_megatron.prove.ranks import Asked
from grpo_megatron.prove.requests import (
    MeasuredMemory,
    MeasureMemory,
    decode_requests,
    encode_requests,
)
from grpo_megatron.prove.shapes import (
    QWEN3_0_6B,
    QWEN3_4B,
    forward_flops,
    peak_flops,
    qwen3_30b_a3b,
    weights_of_token,
)


def test_differences_of_what_cannot_be_compared_are_infinite():
    assert largest_difference([1.0], [1.0, 2.0]) == math.inf
    assert largest_difference([], []) == math.inf
    assert largest_difference([math.nan], [1.0]) == math.inf
    assert largest_relative_difference([1.0], [0.0]) == math.inf
    assert largest_relative_difference([1.1, 2.0], [1.0, 2.0]) == pytest.approx(0.1)


def test_errors_of_gradients_are_relative_and_by_name():
    expected = {"a": np.array([3.0, 4.0]), "b": np.zeros(2), "c": np.ones(2), "d": np.ones(2)}
    found = {"a": np.array([3.0, 4.5]), "b": np.array([0.0, 0.1]), "c": np.ones(3)}
    errors = errors_by_name(found, expected)
    assert errors["a"] == pytest.approx(0.1)
    assert errors["b"] == pytest.approx(0.1)
    assert errors["c"] == errors["d"] == math.inf


def test_weights_of_a_token_are_those_of_the_released_models():
    """What the model cards say without embeddings: 0.44 B, 3.6 B, and 3.3 B active, of which the
    two embeddings of 30B-A3B are 0.62 B."""
    assert weights_of_token(facts_from_hf(QWEN3_0_6B)) == pytest.approx(0.44e9, rel=0.01)
    assert weights_of_token(facts_from_hf(QWEN3_4B)) == pytest.approx(3.6e9, rel=0.02)
    assert weights_of_token(facts_from_hf(qwen3_30b_a3b())) == pytest.approx(2.7e9, rel=0.03)


def test_operations_of_a_forward_pass_by_hand():
    hf = {
        "model_type": "qwen3",
        "vocab_size": 10,
        "hidden_size": 4,
        "intermediate_size": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 3,
    }
    of_layer = 4 * 6 + 2 * 4 * 3 + 6 * 4 + 3 * 4 * 8
    matrices = 2 * (5 + 3) * 2 * of_layer
    attention = 2 * (25 + 9) * 6 * 2
    output = 2 * 4 * 4 * 10
    assert forward_flops(hf, [5, 3], 4) == matrices + attention + output


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
    ],
)
def test_gpus_are_known_by_their_names(name, tflops):
    assert peak_flops(name) == tflops * 1e12


def test_an_unknown_gpu_has_no_peak():
    assert peak_flops("pretended GPU") is None


def test_fewer_layers_fit_into_less_memory(tmp_path):
    settings = {"precision": "bfloat16", "recompute": "full", "max_tokens_per_microbatch": 4096}
    sizes = {"num_samples": 2, "longest": 2048, "num_gpus": 1}
    whole = planned_memory(tmp_path / "plan", QWEN3_4B, settings, **sizes).total

    def fitting(num_bytes: int) -> int:
        return layers_that_fit(
            tmp_path / "plan", QWEN3_4B, settings, memory_bytes=num_bytes, **sizes
        )

    assert fitting(whole) == 36
    assert fitting(whole - 1) == 18
    assert fitting(1) == 0


# --- ranks that go wrong: stand-ins that answer as ranks do, without torch

_STAND_IN = Path(__file__).with_name("stand_in_rank.py")


def asked(tmp_path, ends: list[int], how: str) -> Asked[MeasuredMemory]:
    """Three requests. ends: in which of its requests each start of the rank goes wrong."""
    starts = iter(ends)

    def launch(folder):
        num_requests = len(decode_requests((folder / "requests.json").read_bytes()))
        wrong = str(next(starts))
        argv = [sys.executable, str(_STAND_IN), str(folder), str(num_requests), wrong, how]
        return [ChildProcess("rank-0", argv, folder / "rank-0.log")]

    request = MeasureMemory(hf={}, samples=tmp_path, trainer={})
    return Asked([request] * 3, MeasuredMemory, tmp_path / "asked", launch, patience_s=5.0)


def test_a_rank_that_dies_in_one_request_does_not_hide_the_others(tmp_path):
    found = asked(tmp_path, [1, -1], "die").answers()
    assert isinstance(found[1], TrainerError) and "Traceback of the end" in str(found[1])
    assert isinstance(found[0], MeasuredMemory) and found[0].peak == 10
    assert isinstance(found[2], MeasuredMemory) and found[2].peak == 10  # of another start


def test_a_rank_that_hangs_in_one_request_does_not_hide_the_others(tmp_path):
    found = asked(tmp_path, [0, -1], "hang").answers()
    assert isinstance(found[0], TrainerError) and "answered nothing for 5 s" in str(found[0])
    assert [type(answer) for answer in found[1:]] == [MeasuredMemory, MeasuredMemory]


def test_requests_survive_the_way_to_the_ranks(tmp_path):
    request = MeasureMemory(hf={"a": [1]}, samples=tmp_path, trainer={"num_ranks": 2})
    assert decode_requests(encode_requests([request])) == [request]
