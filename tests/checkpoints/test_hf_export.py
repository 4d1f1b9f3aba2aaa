"""Exported checkpoints load into transformers and mean the same; failed ones leave nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints import shard_files
from grpo_megatron.checkpoints.hf_export import HFTarget, SafetensorsFile
from grpo_megatron.errors import CheckpointError, MismatchError, SetupError
from grpo_megatron.weights.tensor_entry import digest_tensor, entry_of
from tests.trainer.reference import reference_logprobs

CASE = "tests.checkpoints.checkpoint_ranks:export_after_training"
LAYOUTS = {
    "w1": (1, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "tp2_pp2_ep2": (
        4,
        {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 2,
            "expert_parallel_size": 2,
            "expert_tensor_parallel_size": 1,
        },
    ),
}


@pytest.mark.engine
@pytest.mark.parametrize(
    ("layout", "model"),
    [
        ("w1", "moe"),
        ("tp2", "moe"),
        ("pp2", "moe"),
        ("ep2", "moe"),
        ("tp2_pp2_ep2", "moe"),
        ("tp2", "tied"),
        ("pp2", "tied"),
    ],
)
def test_transformers_computes_the_same(request, samples, tmp_path, layout, model):
    (size, parallel), source = LAYOUTS[layout], request.getfixturevalue(f"{model}_model")
    directory = tmp_path / "export"
    found = request.getfixturevalue(f"world{size}").run(
        CASE,
        model=source,
        samples=samples,
        layout=parallel,
        directory=str(directory),
        shard_bytes=100_000,
    )
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
    (directory / "config.json").write_text('{ "odd":   "spacing" }')
    for name in (
        "tokenizer.json",
        "model.safetensors",
        "pytorch_model.bin",
        "conversion.json",
        "model.safetensors.index.json",
        "chat_template.jinja",
    ):
        (directory / name).write_text(f"of the source: {name}")
    for name in ("additional_chat_templates/rag.jinja", "original/consolidated.pth"):
        (directory / name).parent.mkdir()
        (directory / name).write_text(f"of the source: {name}")
    return directory


@pytest.fixture
def written(source, tmp_path):
    """Write `TENSORS` and what goes with them; returns their directory and the target."""

    def write(shard_bytes: int = 2048, tensors=TENSORS):
        out = tmp_path / "export"
        out.mkdir()
        target = HFTarget(out, [[entry_of(*item)] for item in tensors.items()], shard_bytes)
        for file in target.files:
            target.write(file, [(e.name, tensors[e.name]) for e in file.entries])
        target.wait()
        target.finish(source)
        return out, target

    return write


def read_back(target: HFTarget) -> list[str]:
    return [name for file in target.files for name in target.read_back(file)]


@pytest.mark.parametrize("shard_bytes", [1, 2048, 2049, 1 << 30])
def test_all_tensors_arrive_and_no_file_of_the_source_is_taken_for_weights(
    source, written, shard_bytes
):
    out, target = written(shard_bytes)
    assert read_back(target) == []
    files = sorted(out.glob("*.safetensors"))
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())
    assert len(files) == {1: 5, 2048: 3, 2049: 3, 1 << 30: 1}[shard_bytes]
    assert not (out / "pytorch_model.bin").exists()
    assert not (out / "original").exists()
    templates = ("chat_template.jinja", "additional_chat_templates/rag.jinja")
    for name in ("config.json", "tokenizer.json", *templates):
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert json.loads((out / "conversion.json").read_text())["tensors"] == {
        name: digest_tensor(tensor) for name, tensor in TENSORS.items()
    }
    if len(files) > 1:
        index = json.loads((out / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == 5120
        for name, file in index["weight_map"].items():
            assert name in load_file(out / file)
    else:
        assert not (out / "model.safetensors.index.json").exists()


def test_tensors_of_several_widths_stay_aligned(written):
    tensors = {
        "a": torch.ones(3, dtype=torch.bfloat16),
        "b": torch.ones(5),
        "c": torch.ones(2, dtype=torch.float16),
        "d": torch.arange(12.0).view(3, 4).t(),
    }
    out, target = written(1 << 20, tensors)
    assert read_back(target) == []
    found = load_file(out / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert all(found[name].data_ptr() % tensor.itemsize == 0 for name, tensor in tensors.items())


def test_one_changed_bit_on_the_disk_is_found(written):
    out, target = written()
    with open(out / target.files[1].name, "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    bad = read_back(target)
    assert len(bad) == 1 and bad[0] in {entry.name for entry in target.files[1].entries}
    assert [target.record(file) is None for file in target.files] == [False, True, False]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(MismatchError, match="tensors were read back as something else"):
            shard_files.read_back(target, out)
    finally:
        dist.destroy_process_group()


def test_a_disk_that_was_full_is_told_with_the_next_file(tmp_path, monkeypatch):
    """A file is closed while the next one is written, which must not hide how that ended."""
    units = [[entry_of(name, torch.ones(2))] for name in "ab"]
    target = HFTarget(tmp_path, units, 1)

    def full(self: SafetensorsFile) -> None:
        raise SetupError("cannot write: no space left")

    with monkeypatch.context() as patched:
        patched.setattr(SafetensorsFile, "close", full)
        target.write(target.files[0], [("a", torch.ones(2))])
        with pytest.raises(SetupError, match="no space left"):
            target.wait()
    with pytest.raises(SetupError, match="no space left"):
        target.write(target.files[1], [("b", torch.ones(2))])


def test_a_tensor_that_does_not_come_or_is_another_is_refused(tmp_path):
    target = HFTarget(tmp_path, [[entry_of("a", torch.ones(2)), entry_of("b", torch.ones(2))]], 100)
    target.write(target.files[0], [("a", torch.ones(2))])
    with pytest.raises(CheckpointError, match=r"1 tensors did not come, for example \['b'\]"):
        target.wait()
    with pytest.raises(CheckpointError, match=r"'b' torch.float32 \(3,\) was not planned"):
        target.write(target.files[0], [("b", torch.ones(3))])


def test_a_config_that_says_not_quantised_is_copied(source, written):
    text = '{"quantization_config": null,\n\n "model_type": "x"}\n'
    (source / "config.json").write_text(text)
    out, _ = written()
    assert (out / "config.json").read_text() == text


def test_a_config_that_says_quantised_loses_that(source, written):
    config = {"model_type": "x", "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(config))
    out, _ = written()
    assert json.loads((out / "config.json").read_text()) == {"model_type": "x"}
