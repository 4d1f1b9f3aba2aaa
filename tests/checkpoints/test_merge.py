"""Weighted means of checkpoints, tensor by tensor."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.checkpoints.merge import merge_checkpoints
from grpo_megatron.errors import CheckpointError


def checkpoint(path, **tensors):
    path.mkdir()
    (path / "config.json").write_text(json.dumps({"model_type": "x"}))
    (path / "tokenizer.json").write_text(path.name)
    save_file(tensors, path / "model.safetensors")
    return path


def test_a_weighted_mean(tmp_path):
    torch.manual_seed(0)
    one, two = ({"a": torch.randn(4, 3), "b": torch.randn(5).bfloat16()} for _ in range(2))
    parts = {checkpoint(tmp_path / "one", **one): 3.0, checkpoint(tmp_path / "two", **two): 1.0}
    merge_checkpoints(parts, tmp_path / "out", shard_bytes=40)
    found = {}
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    for file in (tmp_path / "out").glob("*.safetensors"):
        found |= load_file(file)
    for name in one:
        expected = (0.75 * one[name].double() + 0.25 * two[name].double()).to(one[name].dtype)
        assert torch.equal(found[name], expected)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "one"
    assert not (tmp_path / "out.partial").exists()


def test_one_checkpoint_in_another_dtype(tmp_path):
    weights = torch.randn(4, 3)
    merge_checkpoints({checkpoint(tmp_path / "one", a=weights): 1.0}, tmp_path / "out", "bfloat16")
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["a"], weights.bfloat16())


@pytest.mark.parametrize("other", [{"a": torch.ones(3, 3)}, {"b": torch.ones(4, 3)}])
def test_checkpoints_of_other_models_are_refused(tmp_path, other):
    parts = {
        checkpoint(tmp_path / "one", a=torch.ones(4, 3)): 1.0,
        checkpoint(tmp_path / "two", **other): 1.0,
    }
    with pytest.raises(
        CheckpointError,
        match=r"of the model in .*one:\n  1 (of another|missing)",
    ) as caught:
        merge_checkpoints(parts, tmp_path / "out")
    assert caught.value.remedy == "merge models of one shape"
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
