"""Hugging Face files without engines: slices, block-quantised tensors, parts of a model, export."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from grpo_megatron.checkpoints import hf_import, shard_files
from grpo_megatron.checkpoints.hf_export import export_model
from grpo_megatron.checkpoints.hf_import import (
    HFReader,
    HFSource,
    import_weights,
    refuse_unfit,
)
from grpo_megatron.errors import CheckpointError
from grpo_megatron.weights.fp8_blocks import dequantise
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import TensorMap, carried_parameter, rules_for

# --- reading


def sharded(directory: Path, *files: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of several files with an index."""
    directory.mkdir(exist_ok=True)
    weight_map = {}
    for number, tensors in enumerate(files):
        save_file(tensors, directory / f"part-{number}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"part-{number}.safetensors")
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def test_rows_of_tensors_in_several_files(tmp_path):
    one, two = torch.randn(7, 3), torch.randn(4).bfloat16()
    reader = HFReader(sharded(tmp_path, {"one": one}, {"two": two}))
    assert reader.names() == {"one", "two"}
    assert reader.shapes() == {"one": (7, 3), "two": (4,)}
    assert (reader.dtype("one"), reader.dtype("two")) == (torch.float32, torch.bfloat16)
    assert torch.equal(reader.rows("one", 2, 5), one[2:5])
    assert torch.equal(reader.tensor("two"), two)
    reader.check_index()


def test_rows_of_a_block_quantised_tensor_are_those_of_the_whole(tmp_path):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 200, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, generator=generator)
    reader = HFReader(sharded(tmp_path, {"w": weight}, {"w_scale_inv": scales}))
    whole = dequantise(weight, scales)
    assert reader.names() == {"w"}
    assert reader.dtype("w") == torch.bfloat16
    for start, end in [(0, 300), (0, 128), (128, 256), (100, 140), (255, 257), (299, 300), (7, 7)]:
        assert torch.equal(reader.rows("w", start, end), whole[start:end])


def test_what_is_no_weight_is_refused(tmp_path):
    reader = HFReader(
        sharded(
            tmp_path, {"ids": torch.arange(3), "fp8": torch.zeros(2, 2).to(torch.float8_e4m3fn)}
        )
    )
    for name in ("ids", "fp8"):
        with pytest.raises(CheckpointError, match=f"tensor '{name}' is "):
            reader.tensor(name)
    with pytest.raises(CheckpointError, match="tensor 'other' is missing"):
        reader.tensor("other")


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (
            torch.ones(4, 2),
            r"'w_scale_inv' is \(4, 2\), and 'w', \(300, 200\), has \(3, 2\) blocks",
        ),
        (torch.ones(2, 2), r"'w_scale_inv' is \(2, 2\)"),
        (torch.ones(3), r"'w_scale_inv' is \(3,\)"),
        (torch.tensor(1.0), r"'w_scale_inv' is \(\)"),
    ],
)
def test_scales_of_other_blocks_are_refused(tmp_path, scales, message):
    weight = torch.zeros(300, 200).to(torch.float8_e4m3fn)
    reader = HFReader(sharded(tmp_path, {"w": weight, "w_scale_inv": scales}))
    for read in (reader.dtype, reader.tensor):
        with pytest.raises(CheckpointError, match=message):
            read("w")


def test_scales_beside_a_weight_that_is_not_quantised_are_refused(tmp_path):
    """They were left there when it was dequantised, or the weight is of another checkpoint."""
    reader = HFReader(
        sharded(tmp_path, {"w": torch.ones(3, 2).bfloat16(), "w_scale_inv": torch.ones(1, 1)})
    )
    for read in (reader.dtype, reader.tensor):
        with pytest.raises(CheckpointError, match="'w' is BF16, and 'w_scale_inv' has scales"):
            read("w")


def test_a_tensor_without_dimensions_is_read(tmp_path):
    reader = HFReader(sharded(tmp_path, {"scale": torch.tensor(2.5), "count": torch.tensor(3)}))
    assert reader.shapes() == {"count": (), "scale": ()}
    assert torch.equal(reader.tensor("scale"), torch.tensor(2.5))
    with pytest.raises(CheckpointError, match="tensor 'count' is I64"):
        reader.tensor("count")


def test_a_single_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path):
    """transformers reads the file, and engines what the index names."""
    sharded(tmp_path, {"w": torch.ones(2)})
    save_file({"w": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.safetensors is beside .*index.json") as error:
        HFReader(tmp_path)
    assert error.value.where == str(tmp_path)
    index = {"weight_map": {"w": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(HFReader(tmp_path).tensor("w"), torch.zeros(2))


def test_an_index_that_names_other_tensors_than_its_files_is_refused(tmp_path):
    sharded(tmp_path, {"a": torch.ones(1)}, {"b": torch.ones(1)})
    save_file({"c": torch.ones(1)}, tmp_path / "part-1.safetensors")
    with pytest.raises(CheckpointError, match=r"part-1.safetensors and .* about \['b', 'c'\]"):
        HFReader(tmp_path).check_index()
    (tmp_path / "part-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing shards: \['part-1.safetensors'\]"):
        HFReader(tmp_path)


@pytest.mark.parametrize("file", [3, None, ["part-0.safetensors"]])
def test_an_index_with_files_that_are_no_names_is_refused(tmp_path, file):
    index = {"weight_map": {"a": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"unreadable index: .* no text"):
        HFReader(tmp_path)


def test_the_bytes_of_a_tensor_are_asked_for_beforehand(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(3), "b": torch.randn(5, 2).bfloat16(), "c": torch.randn(1)}
    reader = HFReader(sharded(tmp_path, tensors))
    asked = []
    monkeypatch.setattr(hf_import, "will_need", lambda *place: asked.append(place))
    for name in tensors:
        reader.prefetch(name)
    for (path, start, count), tensor in zip(asked, tensors.values(), strict=True):
        data = path.read_bytes()[start : start + count]
        assert torch.equal(torch.frombuffer(bytearray(data), dtype=tensor.dtype), tensor.flatten())


def test_the_next_items_are_asked_for_while_one_is_used():
    asked: list[int] = []
    seen = []
    for item in shard_files.read_ahead(range(40), asked.append):
        seen.append(item)
        ahead = len(asked) - len(seen)
        assert asked == list(range(len(asked)))
        assert min(8, 40 - len(seen)) <= ahead < 16
    assert seen == asked == list(range(40))


# --- against a model


def test_all_differences_are_listed_up_to_twenty():
    found = {f"extra.{n:02d}": (1,) for n in range(21)} | {"same": (2, 3), "other": (2, 3)}
    wanted = {f"gone.{n:02d}": (1,) for n in range(20)} | {"same": (2, 3), "other": (3, 2)}
    refuse_unfit(Path("here"), wanted, wanted)
    with pytest.raises(CheckpointError) as caught:
        refuse_unfit(Path("here"), found, wanted)
    lines = str(caught.value).splitlines()
    assert "the tensors are not those of config.json:" in lines[0]
    assert [line for line in lines if line.endswith(":")][1:] == [
        "  20 missing:",
        "  1 of another shape:",
        "  21 without a place in the model:",
    ]
    assert "    other: (2, 3), the model has (3, 2)" in lines
    assert sum(line.startswith("    gone.") for line in lines) == 20
    assert sum(line.startswith("    extra.") for line in lines) == 20
    assert lines.count("    ...") == 1
    assert lines.index("    ...") > lines.index("    extra.19")


CONFIG = {"model_type": "qwen2", "num_hidden_layers": 1}
MAP = TensorMap(
    rules=rules_for("qwen2"),
    num_heads=4,
    num_query_groups=2,
    head_dim=3,
    vocab_size=7,
    tied_embeddings=False,
)
LAYER = "decoder.layers.0."
FULL = {
    "embedding.word_embeddings.weight": ((8, 6), 0),
    LAYER + "self_attention.linear_qkv.weight": ((24, 6), 0),
    LAYER + "self_attention.linear_qkv.bias": ((24,), 0),
    LAYER + "self_attention.linear_proj.weight": ((6, 12), 1),
    LAYER + "mlp.linear_fc1.weight": ((20, 6), 0),
    LAYER + "mlp.linear_fc2.weight": ((6, 10), 1),
    "decoder.final_layernorm.weight": ((6,), None),
    "output_layer.weight": ((8, 6), 0),
}
"""Full shapes, and the dimension that tensor parallelism splits."""


def checkpoint(directory: Path, config: dict = CONFIG, **more: torch.Tensor) -> Path:
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for name, (shape, _) in FULL.items():
        for hf_name, hf_shape in MAP.parameter(name, shape).hf:
            tensors[hf_name] = torch.randn(hf_shape, generator=generator)
    directory.mkdir()
    save_file(tensors | more, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def model_of(size: int, rank: int) -> ShardedModel:
    """The parts of one rank, filled with NaN."""
    shards = []
    for name, (shape, dim) in FULL.items():
        own = list(shape)
        if dim is None or size == 1:
            shards.append(Shard(name, torch.full(own, torch.nan)))
            continue
        own[dim] //= size
        shards.append(Shard(name, torch.full(own, torch.nan), dim, size, rank))
    return ShardedModel(MAP, shards)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parts_of_two_ranks_are_together_what_one_rank_imports(one_rank, tmp_path):
    directory = checkpoint(tmp_path / "hf")
    whole, *parts = (model_of(*place) for place in ((1, 0), (2, 0), (2, 1)))
    for model in (whole, *parts):
        import_weights(model, directory)
    for full, first, second in zip(whole.shards, parts[0].shards, parts[1].shards, strict=True):
        assert not full.tensor.isnan().any()
        if first.dim is None:
            assert torch.equal(full.tensor, first.tensor)
            continue
        parameter = MAP.parameter(full.name, full.full_shape)
        joined = parameter.join([first.tensor, second.tensor], first.dim)
        assert torch.equal(joined, full.tensor), full.name
    assert not whole.shards[0].tensor[7:].any()  # padding of the vocabulary
    assert whole.shards[0].tensor[6].any()


def test_what_is_exported_is_what_was_imported(one_rank, tmp_path):
    source = checkpoint(tmp_path / "hf")
    model = model_of(1, 0)
    import_weights(model, source)
    expected = load_file(source / "model.safetensors")
    num_bytes = export_model(model, tmp_path / "out", source, shard_bytes=600)
    assert num_bytes == sum(tensor.nbytes for tensor in expected.values())
    reader = HFReader(tmp_path / "out")
    reader.check_index()
    assert len(set(reader.files.values())) > 2
    assert reader.names() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(reader.tensor(name), tensor)
    assert not (tmp_path / "out.partial").exists()


EXTRA = "model.layers.1.eh_proj.weight"


@pytest.mark.parametrize("carry", [True, False])
def test_layers_after_the_last_are_carried_along_or_left_out(tmp_path, carry):
    directory = checkpoint(
        tmp_path / "hf", CONFIG | {"num_nextn_predict_layers": 1}, **{EXTRA: torch.ones(2, 4)}
    )
    parameters = [MAP.parameter(name, shape) for name, (shape, _) in FULL.items()]
    source = HFSource(parameters, directory, carry=carry)
    names = [name for parameter in source.parameters for name, _ in parameter.hf]
    assert (EXTRA in names) is carry
    assert source.parameters[: len(parameters)] == parameters
    assert dict(source.tensors(parameters[0])).keys() == {"model.embed_tokens.weight"}
    with pytest.raises(CheckpointError, match="without a place in the model"):
        (directory / "config.json").write_text(json.dumps(CONFIG))
        HFSource(parameters, directory, carry=carry)


def test_a_carried_tensor_may_have_no_dimensions(tmp_path):
    """Through a distributed checkpoint."""
    from grpo_megatron.checkpoints.torch_dist import MegatronSource, MegatronTarget, ParameterTable

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    carried = [carried_parameter(name, shape) for name, shape in (("scale", ()), ("w", (3, 2)))]
    tensors = {"scale": torch.tensor(1.5), "w": torch.randn(3, 2)}
    units = [parameter.entries(torch.float32) for parameter in carried]
    table = ParameterTable((), {}, ())
    (tmp_path / "out").mkdir()
    target = MegatronTarget(table, carried, tmp_path / "out", units, 10_000)
    for file in target.files:
        target.write(file, iter(tensors.items()))
    target.wait()
    target.finish(tmp_path)
    assert not target.read_back(target.files[0])
    source = MegatronSource(table, tmp_path / "out")
    for parameter in source.parameters:
        for name, tensor in source.tensors(parameter):
            assert torch.equal(tensor, tensors.pop(name))
    assert not tensors


def test_tensors_of_one_parameter_have_one_dtype(tmp_path):
    """Their own, or the one that is wanted of them."""
    from grpo_megatron.trainer import conversion_worker

    gate = "model.layers.0.mlp.gate_proj.weight"
    directory = checkpoint(tmp_path / "hf", **{gate: torch.zeros(10, 6).bfloat16()})
    parameters = [MAP.parameter(name, shape) for name, (shape, _) in FULL.items()]
    source = HFSource(parameters, directory)
    of = {parameter.name: parameter for parameter in parameters}
    assert source.dtype(of["output_layer.weight"]) == torch.float32
    mixed = of[LAYER + "mlp.linear_fc1.weight"]
    with pytest.raises(CheckpointError, match=r"are one parameter in Megatron, but have dtypes"):
        source.dtype(mixed)
    with pytest.raises(CheckpointError, match=r"are one parameter in Megatron, but have dtypes"):
        conversion_worker._dtype_of(mixed, source, None)
    assert conversion_worker._dtype_of(mixed, source, torch.float16) == torch.float16


def test_what_is_no_weight_is_refused_before_anything_is_read(tmp_path):
    """Whatever dtype is wanted of it."""
    up = "model.layers.0.mlp.up_proj.weight"
    directory = checkpoint(tmp_path / "hf", **{up: torch.zeros(10, 6, dtype=torch.int64)})
    parameters = [MAP.parameter(name, shape) for name, (shape, _) in FULL.items()]
    with pytest.raises(CheckpointError, match=f"tensor '{up}' is I64"):
        HFSource(parameters, directory)
