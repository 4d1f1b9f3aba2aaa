"""Exported checkpoints load into transformers and mean the same; failed ones leave nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_export import export_checkpoint
from grpo_megatron.errors import CheckpointError
from tests.trainer.reference import reference_logprobs

pytestmark = pytest.mark.timeout(200)

CASE = "tests.checkpoints.cases:export_after_training"
LAYOUTS = {
    "w1": (1, {}), "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}), "ep2": (2, {"expert_parallel_size": 2}),
    "tp2_pp2_ep2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2,
                        "expert_parallel_size": 2, "expert_tensor_parallel_size": 1}),
}


@pytest.mark.engine
@pytest.mark.parametrize(("layout", "model"), [
    ("w1", "moe"), ("tp2", "moe"), ("pp2", "moe"), ("ep2", "moe"), ("tp2_pp2_ep2", "moe"),
    ("tp2", "tied"), ("pp2", "tied")])
def test_transformers_computes_the_same(request, samples, tmp_path, layout, model):
    (size, parallel), source = LAYOUTS[layout], request.getfixturevalue(f"{model}_model")
    directory = tmp_path / "export"
    found = request.getfixturevalue(f"world{size}").run(
        CASE, model=source, samples=samples, layout=parallel, directory=str(directory),
        shard_bytes=100_000)
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert (directory / "config.json").read_bytes() == (Path(source) / "config.json").read_bytes()
    table = SampleTable(Path(samples))
    assert sorted(found) == list(range(len(table)))
    expected = reference_logprobs(directory, table)
    trained_from = reference_logprobs(source, table)
    for row, logprobs in found.items():
        np.testing.assert_allclose(logprobs, expected[row], atol=1e-5)
    assert max(np.abs(a - b).max() for a, b in zip(expected, trained_from, strict=True)) > 1e-2


TENSORS = {f"layer.{i}.weight": torch.full((16, 16), float(i)) for i in range(5)}


@pytest.fixture
def source(tmp_path) -> Path:
    directory = tmp_path / "source"
    directory.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "pytorch_model.bin",
                 "model.safetensors.index.json"):
        (directory / name).write_text(f"of the source: {name}")
    return directory


@pytest.mark.parametrize("shard_bytes", [1, 2048, 2049, 1 << 30])
def test_all_tensors_arrive_and_no_file_of_the_source_is_taken_for_weights(
        source, tmp_path, shard_bytes):
    out = tmp_path / "export"
    assert export_checkpoint(iter(TENSORS.items()), out, source, shard_bytes=shard_bytes) == 5120
    files = sorted(out.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert len(files) == {1: 5, 2048: 3, 2049: 3, 1 << 30: 1}[shard_bytes]
    assert not (out / "pytorch_model.bin").exists()
    assert (out / "tokenizer.json").read_text() == "of the source: tokenizer.json"
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 5120
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
    else:
        assert not (out / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("before", [0, 3])
def test_a_stream_that_raises_leaves_nothing_half_written(source, tmp_path, before):
    def broken():
        yield from list(TENSORS.items())[:before]
        raise OSError("a rank died")

    out = tmp_path / "export"
    with pytest.raises(OSError, match="a rank died"):
        export_checkpoint(broken(), out, source, shard_bytes=1024)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_failed_export_keeps_the_one_before(source, tmp_path):
    out = tmp_path / "export"
    export_checkpoint(iter(TENSORS.items()), out, source)
    with pytest.raises(CheckpointError, match="no tensor to export"):
        export_checkpoint(iter(()), out, source)
    assert load_file(out / "model.safetensors").keys() == TENSORS.keys()


def test_tensors_may_be_reused_by_the_stream(source, tmp_path):
    """A gather may hand out views of one buffer."""
    def stream():
        buffer = torch.empty(16, 16)
        for name, tensor in TENSORS.items():
            buffer.copy_(tensor)
            yield name, buffer.t()

    export_checkpoint(stream(), tmp_path / "export", source)
    found = load_file(tmp_path / "export" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
