"""Files in which the experts of a layer are one tensor, transposed or not: read and written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.checkpoints.hf_export import HFTarget
from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.checkpoints.merge import merge_checkpoints
from grpo_megatron.checkpoints.stacked_experts import stacks_of
from grpo_megatron.errors import CheckpointError, ConfigError
from grpo_megatron.weights.tensor_entry import entry_of
from tests.checkpoints.test_hf_files import sharded

LAYER = "model.language_model.layers.1."
GATE_UP = LAYER + "mlp.experts.gate_up_proj"
DOWN = LAYER + "mlp.experts.down_proj"
ROUTER = LAYER + "mlp.gate.weight"
NUM_EXPERTS = 3


def config_of(hidden: int, width: int) -> dict:
    text = {"hidden_size": hidden, "moe_intermediate_size": width}
    return {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {}}


def matrices_of(hidden: int, width: int) -> dict[str, torch.Tensor]:
    """A layer's router and experts, by the names that the trainer has for them."""
    generator = torch.Generator().manual_seed(hidden)
    found = {ROUTER: torch.randn(NUM_EXPERTS, hidden, generator=generator)}
    for expert in range(NUM_EXPERTS):
        of_expert = f"{LAYER}mlp.experts.{expert}."
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            found[f"{of_expert}{name}.weight"] = torch.randn(shape, generator=generator)
    return found


def in_stacks(matrices: dict[str, torch.Tensor], *, transposed: bool) -> dict[str, torch.Tensor]:
    """The tensors of a file, written down independently of what is tested."""
    gate_up = []
    down = []
    for expert in range(NUM_EXPERTS):
        of_expert = f"{LAYER}mlp.experts.{expert}."
        gate = matrices[of_expert + "gate_proj.weight"]
        up = matrices[of_expert + "up_proj.weight"]
        gate_up.append(torch.cat([gate, up]))
        down.append(matrices[of_expert + "down_proj.weight"])
    stacks = {GATE_UP: torch.stack(gate_up), DOWN: torch.stack(down)}
    if transposed:
        stacks = {name: stack.mT.contiguous() for name, stack in stacks.items()}
    return {ROUTER: matrices[ROUTER], **stacks}


def write(directory: Path, hf: dict, *files: dict[str, torch.Tensor]) -> Path:
    sharded(directory, *files)
    (directory / "config.json").write_text(json.dumps(hf))
    return directory


SIZES = {"wide": (8, 12), "narrow": (12, 5), "square_gate_up": (8, 4), "square_down": (6, 6)}
"""Hidden size, and width of an expert."""


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("sizes", ["wide", "narrow"])
def test_a_matrix_is_read_from_its_stack(tmp_path, sizes, transposed):
    hidden, width = SIZES[sizes]
    matrices = matrices_of(hidden, width)
    stacks = in_stacks(matrices, transposed=transposed)
    down = {DOWN: stacks.pop(DOWN)}  # stacks of a layer may be in several files
    reader = HFReader(write(tmp_path / "model", config_of(hidden, width), stacks, down))
    reader.check_index()
    assert reader.names() == matrices.keys()
    assert reader.shapes() == {name: tuple(matrices[name].shape) for name in sorted(matrices)}
    for name, matrix in matrices.items():
        reader.prefetch(name)
        assert reader.dtype(name) == torch.float32
        assert torch.equal(reader.tensor(name), matrix), name
        assert torch.equal(reader.rows(name, 1, 3), matrix[1:3]), name


@pytest.mark.parametrize("sizes", ["square_gate_up", "square_down"])
def test_what_fits_both_ways_is_read_as_transformers_does(tmp_path, sizes):
    hidden, width = SIZES[sizes]
    matrices = matrices_of(hidden, width)
    stacks = in_stacks(matrices, transposed=False)
    reader = HFReader(write(tmp_path / "model", config_of(hidden, width), stacks))
    for name, matrix in matrices.items():
        assert torch.equal(reader.tensor(name), matrix), name


def write_target(directory: Path, hf: dict, matrices: dict, shard_bytes: int) -> HFTarget:
    directory.mkdir()
    source = write(directory.with_name("source"), hf)
    units = []
    for name, matrix in matrices.items():
        if name.endswith("up_proj.weight"):
            units[-1].append(entry_of(name, matrix))  # one parameter with the gate
        else:
            units.append([entry_of(name, matrix)])
    target = HFTarget(directory, units, shard_bytes, stacks_of(hf))
    for file in target.files:
        target.write(file, [(entry.name, matrices[entry.name]) for entry in file.entries])
    target.wait()
    target.finish(source)
    return target


@pytest.mark.parametrize("shard_bytes", [1, 1 << 20])
@pytest.mark.parametrize("sizes", SIZES)
def test_stacks_are_written_as_everybody_reads_them(tmp_path, sizes, shard_bytes):
    """Transposed, as released and as vLLM wants them; as they are where transformers would not
    transpose them back. The experts of a layer are in one file, however small files shall be."""
    hidden, width = SIZES[sizes]
    matrices = matrices_of(hidden, width)
    target = write_target(tmp_path / "out", config_of(hidden, width), matrices, shard_bytes)
    assert len(target.files) == (2 if shard_bytes == 1 else 1)
    found = {}
    for file in target.files:
        assert target.read_back(file) == []
        found |= load_file(tmp_path / "out" / file.name)
    wanted = in_stacks(matrices, transposed=True)
    as_they_are = in_stacks(matrices, transposed=False)
    if sizes == "square_gate_up":
        wanted[GATE_UP] = as_they_are[GATE_UP]
    if sizes == "square_down":
        wanted[DOWN] = as_they_are[DOWN]
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def test_the_index_names_what_is_in_the_files(tmp_path):
    write_target(tmp_path / "out", config_of(8, 12), matrices_of(8, 12), 1)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {ROUTER, GATE_UP, DOWN}
    HFReader(tmp_path / "out").check_index()


def test_a_changed_bit_in_a_stack_is_found_by_the_name_of_its_matrix(tmp_path):
    target = write_target(tmp_path / "out", config_of(8, 12), matrices_of(8, 12), 1 << 20)
    [file] = target.files
    with open(tmp_path / "out" / file.name, "r+b") as opened:
        opened.seek(-1, 2)
        last = opened.read(1)[0]
        opened.seek(-1, 2)
        opened.write(bytes([last ^ 1]))
    [bad] = target.read_back(file)
    assert bad.startswith(LAYER + "mlp.experts.2.")


def test_an_expert_that_did_not_come_whole_is_named(tmp_path):
    (tmp_path / "out").mkdir()
    matrices = matrices_of(8, 12)
    units = [[entry_of(name, matrix)] for name, matrix in matrices.items()]
    target = HFTarget(tmp_path / "out", units, 1 << 20, stacks_of(config_of(8, 12)))
    [file] = target.files
    lacking = LAYER + "mlp.experts.1.up_proj.weight"
    target.write(file, [(name, matrices[name]) for name in matrices if name != lacking])
    with pytest.raises(
        CheckpointError, match=r"1 tensors did not come, for example \['.*1.up_proj"
    ):
        target.wait()


@pytest.mark.parametrize(
    ("lacking", "words"),
    [
        (
            "mlp.experts.1.",
            "gate_up_proj' would lack 2 of its matrices, for example '.*1.gate_proj",
        ),
        ("2.up_proj", "gate_up_proj' would lack 1 of its matrices, for example '.*2.up_proj"),
    ],
)
def test_a_stack_with_a_hole_is_not_planned(tmp_path, lacking, words):
    matrices = matrices_of(8, 12)
    units = [[entry_of(name, matrix)] for name, matrix in matrices.items() if lacking not in name]
    target = HFTarget(tmp_path, units, 1 << 20, stacks_of(config_of(8, 12)))
    with pytest.raises(CheckpointError, match=words):
        target.open(target.files[0])


def test_a_stack_of_two_types_is_not_planned(tmp_path):
    matrices = matrices_of(8, 12)
    name = LAYER + "mlp.experts.2.down_proj.weight"
    matrices[name] = matrices[name].bfloat16()
    units = [[entry_of(name, matrix)] for name, matrix in matrices.items()]
    target = HFTarget(tmp_path, units, 1 << 20, stacks_of(config_of(8, 12)))
    with pytest.raises(CheckpointError, match=r"0\.down_proj.*float32.*2\.down_proj.*bfloat16"):
        target.open(target.files[0])


@pytest.mark.parametrize("shape", [(3, 24), (3, 9, 25), (3, 8, 25), (3, 25, 8)])
def test_a_stack_that_holds_no_such_matrices_is_refused(tmp_path, shape):
    stacks = in_stacks(matrices_of(8, 12), transposed=True)
    stacks[GATE_UP] = torch.zeros(shape)
    reader = HFReader(write(tmp_path / "model", config_of(8, 12), stacks))
    with pytest.raises(CheckpointError, match=r"holds no 2 matrices of 8 inputs") as caught:
        reader.shapes()
    assert str(shape) in caught.value.message
    assert caught.value.where == str(tmp_path / "model")


@pytest.mark.parametrize("model_type", ["gpt_oss", "qwen3_next", "qwen3_moe", "other"])
def test_files_of_other_families_are_read_as_they_are(tmp_path, model_type):
    """Also of one that nothing here can train, and where config.json is at odds with itself."""
    hf = {"model_type": model_type, "dtype": "float32", "torch_dtype": "bfloat16"}
    tensors = {GATE_UP: torch.ones(2, 3, 4)}
    reader = HFReader(write(tmp_path / "model", hf, tensors))
    assert reader.names() == {GATE_UP}
    assert reader.shape(GATE_UP) == (2, 3, 4)


def test_a_configuration_without_the_size_is_named(tmp_path):
    directory = write(tmp_path / "model", {"model_type": "qwen3_vl_moe"}, {"a": torch.ones(1)})
    with pytest.raises(
        ConfigError, match="hidden_size is missing in the configuration of qwen3_vl"
    ):
        HFReader(directory)


def test_quantised_stacks_are_refused(tmp_path):
    stacks = in_stacks(matrices_of(8, 12), transposed=True)
    stacks[DOWN] = stacks[DOWN].to(torch.float8_e4m3fn)
    stacks[DOWN + "_scale_inv"] = torch.ones(NUM_EXPERTS, 1, 1)
    reader = HFReader(write(tmp_path / "model", config_of(8, 12), stacks))
    with pytest.raises(CheckpointError, match="down_proj' is F8_E4M3; experts in one") as caught:
        reader.tensor(LAYER + "mlp.experts.0.down_proj.weight")
    assert caught.value.remedy == "take the release whose weights are not quantised"


def test_an_expert_that_a_stack_does_not_have_is_missing(tmp_path):
    stacks = in_stacks(matrices_of(8, 12), transposed=True)
    reader = HFReader(write(tmp_path / "model", config_of(8, 12), stacks))
    with pytest.raises(CheckpointError, match=r"experts\.3\.down_proj\.weight' is missing"):
        reader.shape(LAYER + "mlp.experts.3.down_proj.weight")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_a_damaged_configuration_is_named(tmp_path, text):
    directory = write(tmp_path / "model", {}, {"a": torch.ones(1)})
    (directory / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"unreadable config.json"):
        HFReader(directory)


def test_means_of_checkpoints_whose_stacks_lie_differently(tmp_path):
    """One as released, one as transformers saves it."""
    hf = config_of(8, 12)
    one = matrices_of(8, 12)
    two = {name: 2 * matrix for name, matrix in one.items()}
    parts = {
        write(tmp_path / "one", hf, in_stacks(one, transposed=True)): 1.0,
        write(tmp_path / "two", hf, in_stacks(two, transposed=False)): 1.0,
    }
    merge_checkpoints(parts, tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    mean = {name: (1.5 * matrix.double()).float() for name, matrix in one.items()}
    for name, tensor in in_stacks(mean, transposed=True).items():
        assert torch.equal(found[name], tensor), name
