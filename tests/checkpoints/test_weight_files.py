"""Whether the files of a checkpoint's weights are there and whole."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from grpo_megatron.checkpoints.weight_files import has_whole_weights, is_whole, named_files


@pytest.fixture
def checkpoint(tmp_path):
    """Weights in two files."""
    placed = {}
    for name in ("a", "b"):
        file = f"model-{name}.safetensors"
        save_file({name: torch.ones(5)}, tmp_path / file, metadata={"format": "pt"})
        placed[name] = file
    index = {"weight_map": placed}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_what_is_written_is_whole(checkpoint):
    assert named_files(checkpoint) == ["model-a.safetensors", "model-b.safetensors"]
    assert has_whole_weights(checkpoint)


@pytest.mark.parametrize("num_bytes", [0, 7, 8, 20, -1])
def test_what_was_cut_is_not(checkpoint, num_bytes):
    file = checkpoint / "model-b.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    assert not is_whole(file) and not has_whole_weights(checkpoint)


def test_what_is_longer_or_missing_is_not(checkpoint):
    file = checkpoint / "model-b.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"x")
    assert not is_whole(file)
    file.unlink()
    assert not has_whole_weights(checkpoint)
    file.write_bytes(whole)
    (checkpoint / "model.safetensors.index.json").write_text("{")
    assert not has_whole_weights(checkpoint)
