"""What a trace is for: a trainer that does something else than the plan says is found out."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.trace
LAYOUT = {"num_ranks": 4, "tensor_parallel_size": 2, "recompute": "full"}


def differences(world1, tmp_path, fault: str) -> dict:
    return world1.run(
        "tests.trace.cases:compared",
        folder=str(tmp_path),
        preset="qwen3-8b",
        trainer=LAYOUT,
        fault=fault,
    )


def test_without_a_fault_everything_agrees(world1, tmp_path):
    assert differences(world1, tmp_path, "")["differences"] == {0: []}


def test_a_layer_that_takes_five_gigabytes_more(world1, tmp_path):
    found = differences(world1, tmp_path, "greedy layer")
    assert found["differences"] == {0: ["peak"]}
    planned, traced = found["peaks"][0]
    assert traced - planned > 4 * 10**9  # the moment that was highest without it took some too
    [place] = found["places"]
    assert "decoder.layers" in place


def test_gradients_of_another_type(world1, tmp_path):
    [wrong] = differences(world1, tmp_path, "half gradients")["differences"].values()
    assert "gradients" in wrong
    assert "gradients: reduce-scatter dp bfloat16" in wrong
    assert "gradients: reduce-scatter dp float32" in wrong


def test_one_more_collective_in_every_layer(world1, tmp_path):
    [wrong] = differences(world1, tmp_path, "one more collective")["differences"].values()
    assert "gradients: all-reduce tp bfloat16" in wrong
