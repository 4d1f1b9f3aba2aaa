"""A Hugging Face checkpoint that does not fit is refused, and the message says why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.engine

CASE = "tests.checkpoints.checkpoint_ranks:import_refusal"
ATTENTION = "model.layers.1.self_attn."


@pytest.fixture
def broken(dense_model, tmp_path) -> Path:
    return Path(shutil.copytree(dense_model, tmp_path / "broken"))


def _change(directory: Path, **changes) -> None:
    """Set tensors by name; None: leave it out."""
    tensors = load_file(directory / "model.safetensors") | changes
    save_file(
        {name: t.contiguous() for name, t in tensors.items() if t is not None},
        directory / "model.safetensors",
    )


def _split_in_two(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for part in range(2):
        file = f"model-{part + 1:05d}-of-00002.safetensors"
        mine = dict(sorted(tensors.items())[part::2])
        save_file(mine, directory / file)
        weight_map.update(dict.fromkeys(mine, file))
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture
def refusal(world1, dense_model, broken):
    def run() -> str:
        found = world1.run(CASE, model=dense_model, directory=str(broken))
        assert found is not None, "it was imported"
        assert str(broken) in found
        return found

    return run


@pytest.mark.parametrize("split", [False, True])
def test_whole_checkpoints_are_not_refused(world1, dense_model, broken, split):
    if split:
        _split_in_two(broken)
    assert world1.run(CASE, model=dense_model, directory=str(broken)) is None


def test_a_missing_tensor(refusal, broken):
    _change(broken, **{ATTENTION + "v_proj.weight": None})
    assert f"1 missing:\n    {ATTENTION}v_proj.weight" in refusal()


def test_an_extra_tensor(refusal, broken):
    _change(broken, **{ATTENTION + "q_proj.bias": torch.zeros(64)})
    assert f"1 without a place in the model:\n    {ATTENTION}q_proj.bias" in refusal()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (ATTENTION + "o_proj.weight", (64, 60)),
        (ATTENTION + "q_proj.weight", (63, 64)),
        ("model.embed_tokens.weight", (92, 64)),  # smaller than the vocabulary: not padding
        ("lm_head.weight", (94, 64)),
        ("model.norm.weight", (65,)),
    ],
)
def test_a_wrong_shape(refusal, broken, name, shape):
    _change(broken, **{name: torch.zeros(shape)})
    found = refusal()
    assert f"1 of another shape:\n    {name}: {shape}, the model has" in found


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (ATTENTION + "q_proj.weight", ATTENTION + "k_proj.weight"),
        ("model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_shapes_that_are_right_in_sum_only(refusal, broken, first, second):
    tensors = load_file(broken / "model.safetensors")
    rows = tensors[second].shape[0] // 2
    _change(
        broken,
        **{
            first: torch.cat([tensors[first], tensors[second][:rows]]),
            second: tensors[second][rows:],
        },
    )
    assert f"2 of another shape:\n    {min(first, second)}: (" in refusal()


def test_a_truncated_file(refusal, broken):
    data = (broken / "model.safetensors").read_bytes()
    (broken / "model.safetensors").write_bytes(data[: len(data) // 2])
    assert "unreadable shard model.safetensors" in refusal()


def test_a_truncated_shard(refusal, broken):
    _split_in_two(broken)
    file = broken / "model-00002-of-00002.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "unreadable shard model-00002-of-00002.safetensors" in refusal()


def test_a_missing_shard(refusal, broken):
    _split_in_two(broken)
    (broken / "model-00002-of-00002.safetensors").unlink()
    assert "missing shards: ['model-00002-of-00002.safetensors']" in refusal()


def test_a_shard_without_what_the_index_says(refusal, broken):
    _split_in_two(broken)
    shutil.copy(
        broken / "model-00001-of-00002.safetensors", broken / "model-00002-of-00002.safetensors"
    )
    assert "model-00002-of-00002.safetensors" in refusal()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_a_broken_index(refusal, broken, text):
    (broken / "model.safetensors.index.json").write_text(text)
    assert "unreadable index" in refusal()


def test_no_weights_at_all(refusal, broken):
    (broken / "model.safetensors").unlink()
    assert "no model.safetensors and no index" in refusal()
