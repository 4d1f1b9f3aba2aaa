"""Conversions: bit for bit there and back, at every layout; what fails leaves nothing finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from grpo_megatron.cli.main import main
from grpo_megatron.config.trainer import refuse_other_than_layout
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.plan.reward_labels import labels_of
from grpo_megatron.weights.fp8_blocks import dequantise, scale_name
from tests.checkpoints.test_hf_import import _change, _split_in_two
from tests.checkpoints.test_resume import LAYOUTS
from tests.trainer.families import MODELS
from tests.trainer.models import write_model

pytestmark = pytest.mark.engine

CASES = "tests.checkpoints.checkpoint_ranks:"
MANY = LAYOUTS | {
    "etp2": (2, {"tensor_parallel_size": 1, "expert_tensor_parallel_size": 2}),
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


@pytest.fixture
def convert(request):
    """Run a job at a layout; returns what it was refused with."""

    def run(
        source: Path | str,
        target: Path | None,
        *,
        to: str = "",
        layout: str = "w1",
        file_limit: int | None = None,
        free_bytes: int | None = None,
        **job,
    ):
        size, parallel = MANY[layout]
        job = {
            "source": str(source),
            "target": target and str(target),
            "to": to,
            "layout": parallel,
            "shard_bytes": 100_000,
            "probe": False,
            **job,
        }
        return request.getfixturevalue(f"world{size}").run(
            CASES + "convert", job=job, file_limit=file_limit, free_bytes=free_bytes
        )

    return run


def tensors_of(directory: Path | str) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in Path(directory).glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def assert_same(found: Path | str, expected: dict[str, torch.Tensor]) -> None:
    tensors = tensors_of(found)
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize(
    ("layout", "model", "probe"),
    [
        ("tp2_pp2_ep2", "moe", True),
        pytest.param("tp2", "tied", True, marks=pytest.mark.matrix),
        pytest.param("w1", "moe", True, marks=pytest.mark.matrix),
        pytest.param("cp2", "moe", True, marks=pytest.mark.matrix),
        pytest.param("pp2_vpp2", "dense", True, marks=pytest.mark.matrix),
        pytest.param("etp2", "moe", False, marks=pytest.mark.matrix),
    ],
)
def test_there_and_back_is_bit_exact(request, convert, tmp_path, layout, model, probe):
    """And Megatron's log-probs, at the layout, are those of transformers."""
    source = request.getfixturevalue(f"{model}_model")
    megatron, back = tmp_path / "megatron", tmp_path / "back"
    assert convert(source, megatron, to="megatron", layout=layout, probe=probe) is None
    assert len(list((megatron / "weights").glob("part-*.distcp"))) > 3
    size, parallel = MANY[layout]
    found = request.getfixturevalue(f"world{size}").run(
        CASES + "loaded", model=source, layout=parallel, directory=str(megatron)
    )
    for name, tensor in tensors_of(source).items():
        np.testing.assert_array_equal(found[name], tensor.numpy())
    assert convert(megatron, back, to="hf", layout=layout) is None
    assert_same(back, tensors_of(source))
    assert (back / "config.json").read_bytes() == Path(source, "config.json").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"megatron", "back"}
    assert not list(tmp_path.rglob(".*progress*"))
    for directory in (megatron, back):
        assert convert(directory, None) is None


@pytest.mark.parametrize(
    "layout",
    [
        "w1",
        "tp2_pp2_ep2",
        *(pytest.param(name, marks=pytest.mark.matrix) for name in ("tp2", "ep2", "pp2_vpp2")),
    ],
)
def test_checkpoints_of_a_run_at_any_layout(request, convert, moe_model, samples, tmp_path, layout):
    """With optimizer state, and not what the run started from."""
    size, parallel = MANY[layout]
    directory, out = tmp_path / "step_000001", tmp_path / "hf"
    saved = request.getfixturevalue(f"world{size}").run(
        CASES + "save_after",
        model=moe_model,
        samples=samples,
        layout=parallel,
        directory=str(directory),
        steps=1,
    )["saved"]
    error = convert(directory, out, to="hf")
    assert error[:2] == ("ConfigError", 2) and "config.json" in error[2]
    shutil.copy(Path(moe_model, "config.json"), directory)
    assert convert(directory, out, to="hf") is None
    assert_same(out, {name: torch.from_numpy(tensor) for name, tensor in saved.items()})
    assert not torch.equal(
        tensors_of(moe_model)["lm_head.weight"], tensors_of(out)["lm_head.weight"]
    )
    _damage_is_found_before_anything_is_written(convert, directory, layout)


def _damage_is_found_before_anything_is_written(convert, directory: Path, layout: str) -> None:
    """A flipped bit of a weight is still a number: only the file's digest tells it."""
    assert convert(directory, None, layout=layout) is None
    file = max((directory / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for target, to in ((None, ""), (directory.with_name("damaged"), "hf")):
        kind, exit_code, told = convert(directory, target, to=to, layout=layout)
        assert (kind, exit_code) == ("CheckpointError", 8)
        assert f"1 files are not as they were written, for example ['weights/{file.name}']" in told
    assert not list(directory.parent.glob("damaged*/*"))


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_beside_rounded_weights(world1, convert, moe_model, three_updates, tmp_path, dora):
    """The sums have the dtype of the run, as its export, or are rounded once to the one that is
    asked for; norms of DoRA are always rounded as the run has trained them."""
    world1.run(
        "tests.trainer.lora_ranks:service_run",
        model=moe_model,
        samples=three_updates,
        layout={"precision": "bfloat16"},
        root=str(tmp_path),
        lora={"rank": 2, "dora": dora},
    )
    checkpoint, same, exact = tmp_path / "step_000001", tmp_path / "same", tmp_path / "exact"
    exported = tensors_of(tmp_path / "export")
    assert convert(checkpoint, same, to="hf", probe=True) is None
    assert_same(same, exported)
    assert convert(checkpoint, exact, to="hf", probe=True, dtype="float32") is None
    sums = tensors_of(exact)
    rounded = set()
    for name, tensor in exported.items():
        assert torch.equal(sums[name].to(tensor.dtype), tensor), name
        if not torch.equal(sums[name], tensor.float()):
            rounded.add(name)
    assert any(name.endswith("q_proj.weight") for name in rounded)
    assert not any("norm" in name for name in rounded)


@pytest.mark.parametrize("model", ["dense", "tied"])
def test_a_reward_model_has_its_head(request, world1, convert, tmp_path, model):
    """As a run saves and exports it, and there and back."""
    source = request.getfixturevalue(f"{model}_model")
    world1.run(
        "tests.trainer.preference_ranks:reward_model_files", model=source, root=str(tmp_path)
    )
    checkpoint, export = tmp_path / "step_000001", tmp_path / "export"
    exported = tensors_of(export)
    assert exported["score.weight"].shape[0] == 2 and "lm_head.weight" not in exported
    hf = json.loads((export / "config.json").read_text())
    for directory in (checkpoint, export):
        assert labels_of(json.loads((directory / "config.json").read_text())) == ["even", "odd"]
        assert convert(directory, None) is None
    of_run, megatron, back = tmp_path / "of_run", tmp_path / "megatron", tmp_path / "back"
    assert convert(checkpoint, of_run, to="hf", probe=True) is None
    assert convert(export, megatron, to="megatron", probe=True) is None
    assert convert(megatron, back, to="hf", probe=True) is None
    for directory in (of_run, back):
        assert_same(directory, exported)
    assert json.loads((back / "config.json").read_text()) == hf
    shutil.copy(Path(source, "config.json"), checkpoint)  # as earlier releases have saved it
    (checkpoint / "digests.json").unlink()
    _, code, text = convert(checkpoint, tmp_path / "older", to="hf")
    assert code == 8 and "it is of a reward model" in text


def test_another_dtype_by_choice(convert, tied_model, tmp_path):
    half, back = tmp_path / "half", tmp_path / "back"
    assert convert(tied_model, half, to="megatron", dtype="bfloat16", probe=True) is None
    assert convert(half, back, to="hf") is None
    assert_same(back, {n: t.bfloat16() for n, t in tensors_of(tied_model).items()})


def test_what_chooses_experts_keeps_its_dtype(convert, tmp_path):
    """A rounded bias would choose other experts, in a conversion to bfloat16, too."""
    source = write_model(tmp_path / "model", MODELS["deepseek_v3"], 5)
    config = read_config(Path(source)) | {"dtype": "float32"}
    Path(source, "config.json").write_text(json.dumps(config))
    half, back = tmp_path / "half", tmp_path / "back"
    assert convert(source, half, to="megatron", dtype="bfloat16") is None
    assert convert(half, back, to="hf") is None
    for directory in (half, back):  # engines load weights as what stands there
        assert read_config(directory) == config | {"dtype": "bfloat16"}
    expected = {}
    for name, tensor in tensors_of(source).items():
        expected[name] = tensor.bfloat16()
        if name.endswith("e_score_correction_bias"):
            expected[name] = tensor
    assert torch.float32 in {tensor.dtype for tensor in expected.values()}
    assert_same(back, expected)


def test_numbers_that_a_dtype_cannot_hold_are_named(convert, broken, tmp_path):
    large = torch.ones(64)
    large[7] = 1e6
    _change(broken, **{NORM: large})
    said = convert(broken, tmp_path / "out", to="megatron", dtype="float16")
    assert said[1] == 8 and f"{NORM} has numbers up to 1e+06" in said[2]
    assert not (tmp_path / "out").exists()
    assert convert(broken, tmp_path / "out", to="megatron", dtype="bfloat16") is None


@pytest.mark.parametrize("is_same", [True, False])
def test_tied_embeddings_that_are_stored_twice(convert, tied_model, tmp_path, is_same):
    source = Path(shutil.copytree(tied_model, tmp_path / "twice"))
    head = tensors_of(tied_model)[EMBEDDING].clone()
    if not is_same:
        head[3, 5] += 1
    _change(source, **{"lm_head.weight": head})
    said = convert(source, tmp_path / "out", to="megatron")
    if is_same:
        assert said is None
        assert convert(tmp_path / "out", tmp_path / "back", to="hf") is None
        assert_same(tmp_path / "back", tensors_of(tied_model))
    else:
        assert said[1] == 8 and "lm_head.weight is another matrix" in said[2]


@pytest.fixture
def quantised(dense_model, tmp_path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A block-fp8 checkpoint whose matrices span several blocks, and what it means."""
    directory = tmp_path / "fp8"
    directory.mkdir()
    config = json.loads(Path(dense_model, "config.json").read_text()) | {
        "intermediate_size": 3 * BLOCK + 20,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    generator, stored, meant = torch.Generator().manual_seed(3), {}, {}
    for name, tensor in tensors_of(dense_model).items():
        shape = [config["intermediate_size"] if n == 96 else n for n in tensor.shape]
        meant[name] = stored[name] = torch.randn(shape, generator=generator).bfloat16()
        if name.endswith("_proj.weight"):
            stored[name] = (stored[name].float() * 50).to(torch.float8_e4m3fn)
            blocks = [-(-n // BLOCK) for n in shape]
            scale = stored[scale_name(name)] = torch.rand(blocks, generator=generator) + 0.5
            meant[name] = dequantise(stored[name], scale)
    save_file(stored, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory, meant


@pytest.mark.parametrize("layout", ["w1", "tp2"])
def test_block_fp8_is_dequantised(request, convert, quantised, tmp_path, layout):
    directory, meant = quantised
    size, parallel = MANY[layout]
    found = request.getfixturevalue(f"world{size}").run(
        CASES + "imported", model=str(directory), layout=parallel
    )
    for name, tensor in meant.items():
        np.testing.assert_array_equal(found[name], tensor.float().numpy())
    assert convert(directory, tmp_path / "m", to="megatron", layout=layout) is None
    assert convert(tmp_path / "m", tmp_path / "back", to="hf", layout=layout) is None
    assert_same(tmp_path / "back", meant)
    assert "quantization_config" not in json.loads((tmp_path / "back/config.json").read_text())


@pytest.mark.parametrize("carry", [True, False])
def test_what_megatron_has_no_parameter_for_is_carried_or_dropped(
    convert, tied_model, tmp_path, carry
):
    """Rotary frequencies stand for multi-token prediction: see `carried_names`."""
    source, megatron, back = tmp_path / "source", tmp_path / "megatron", tmp_path / "back"
    shutil.copytree(tied_model, source)
    _change(
        source,
        **{f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.rand(8) for i in range(4)},
    )
    assert convert(source, megatron, to="megatron", carry=carry, probe=carry) is None
    assert convert(megatron, back, to="hf") is None
    assert_same(back, tensors_of(source if carry else tied_model))
    assert convert(megatron, None) is None


QKV, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"
EMBEDDING = "model.embed_tokens.weight"


def _drop_shard(directory: Path) -> None:
    _split_in_two(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()


def _truncate(directory: Path) -> None:
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _configure(**changes):
    def change(directory: Path) -> None:
        file = directory / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return change


FAULTS = {
    "missing_shard": (_drop_shard, 8, "missing shards: ['model-00002-of-00002.safetensors']"),
    "truncated": (_truncate, 8, "unreadable shard model.safetensors"),
    "missing": (lambda d: _change(d, **{QKV: None}), 8, f"1 missing:\n    {QKV}"),
    "extra": (
        lambda d: _change(d, strange=torch.ones(2)),
        8,
        "1 without a place in the model:\n    strange",
    ),
    "shape": (
        lambda d: _change(d, **{NORM: torch.ones(65)}),
        8,
        f"1 of another shape:\n    {NORM}: (65,), the model has (64,)",
    ),
    "dtype": (
        lambda d: _change(d, **{NORM: torch.ones(64, dtype=torch.int32)}),
        8,
        f"tensor '{NORM}' is I32; weights are",
    ),
    "mixed_dtypes": (
        lambda d: _change(d, **{QKV: torch.ones(64, 64).half()}),
        8,
        "are one parameter in Megatron, but have dtypes",
    ),
    "other_family": (
        _configure(
            model_type="qwen3_moe",
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            norm_topk_prob=True,
        ),
        8,
        "    model.layers.0.mlp.experts.0.down_proj.weight",
    ),
    "unknown_family": (_configure(model_type="strange"), 2, "'strange'"),
}


@pytest.fixture
def broken(dense_model, tmp_path) -> Path:
    return Path(shutil.copytree(dense_model, tmp_path / "broken"))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_checkpoint_that_does_not_fit_is_refused(convert, broken, tmp_path, fault):
    break_it, code, message = FAULTS[fault]
    break_it(broken)
    found = convert(broken, tmp_path / "out", to="megatron")
    assert found[1] == code and message in found[2]
    assert not (tmp_path / "out").exists()


def test_a_full_disk_is_named_and_the_conversion_goes_on(convert, dense_model, tmp_path):
    out = tmp_path / "out"
    found = convert(dense_model, out, to="megatron", file_limit=60_000)
    assert found[:2] == ("SetupError", 3) and "File too large" in found[2]
    assert not out.exists() and (tmp_path / "out.partial").exists()
    assert convert(dense_model, out, to="megatron") is None
    assert not (tmp_path / "out.partial").exists()


def test_too_little_space_is_told_before_anything_is_written(convert, dense_model, tmp_path):
    found = convert(dense_model, tmp_path / "out", to="megatron", free_bytes=500_000)
    assert found[:2] == ("SetupError", 3)
    assert "0.001 GB are to be written and 0.001 GB are free" in found[2]
    assert not list(tmp_path.rglob("*.distcp"))


def test_a_damaged_distributed_checkpoint(convert, dense_model, tmp_path):
    megatron = tmp_path / "megatron"
    assert convert(dense_model, megatron, to="megatron") is None
    file = max((megatron / "weights").glob("part-*"), key=lambda path: path.stat().st_size)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    found = convert(megatron, tmp_path / "out", to="hf")
    assert found[1] == 8 and f"from {file.name}" in found[2]
    assert not (tmp_path / "out").exists()


def test_check_finds_changed_bytes_and_numbers_that_are_none(convert, broken, tmp_path):
    megatron = tmp_path / "megatron"
    assert convert(broken, megatron, to="megatron") is None
    values = load_file(broken / "model.safetensors")[EMBEDDING].clone()
    needle = values.numpy().tobytes()
    (file,) = [f for f in (megatron / "weights").glob("part-*") if needle in f.read_bytes()]
    file.write_bytes(file.read_bytes().replace(needle, needle[:-1] + bytes([needle[-1] ^ 1])))
    found = convert(megatron, None)
    assert found[:2] == ("MismatchError", 7)
    assert f"1 tensors are not what was written, for example ['{EMBEDDING}']" in found[2]
    found = convert(megatron, tmp_path / "out", to="hf")
    assert found[:2] == ("MismatchError", 7)
    assert f"tensor '{EMBEDDING}' is not what was written, by conversion.json" in found[2]
    assert not (tmp_path / "out").exists()
    values[3, 3] = torch.nan
    _change(broken, **{EMBEDDING: values})
    assert "hold numbers that are not finite" in convert(broken, None)[2]


def test_a_conversion_takes_keys_of_a_layout_and_of_its_machine():
    for key in ("num_threads", "num_ranks", "tensor_parallel_size"):
        refuse_other_than_layout(key, where="command line")
    with pytest.raises(ConfigError, match="no key of a layout"):
        refuse_other_than_layout("fp8", where="command line")


def _command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "grpo_megatron.cli.main", "convert", *arguments]


@pytest.mark.chaos
def test_killed_in_the_middle_it_goes_on_with_the_next_file(moe_model, tmp_path):
    """Both ranks; finished files are not written again. The whole command, as a user runs it."""
    out, partial = tmp_path / "out", tmp_path / "out.partial"
    command = _command(
        "from-hf", moe_model, "--to", str(out), "--shard-gb", "0.00001", "--no-probe", "num_ranks=2"
    )
    records = partial / ".progress"
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while len(list(records.glob("part-*.json"))) < 3:
        assert first.poll() is None
        time.sleep(0.001)
    first.send_signal(signal.SIGKILL)
    first.wait()
    time.sleep(1)  # its ranks get SIGTERM from the kernel
    assert not out.exists()
    done = {
        path: path.stat().st_mtime_ns
        for path in (
            partial / "weights" / record.name.removesuffix(".json")
            for record in records.glob("part-*.json")
        )
    }
    assert done
    second = subprocess.run(command, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert f"going on: {len(done)} of " in second.stdout
    assert "has no tokenizer" in second.stderr
    assert second.stdout.splitlines()[-1].startswith(f"{out} was read back")
    for path, written in done.items():
        assert (out / "weights" / path.name).stat().st_mtime_ns == written
    assert not partial.exists()
    back = subprocess.run(
        _command("to-hf", str(out), "--to", str(tmp_path / "back"), "--no-probe"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert back.returncode == 0, back.stderr
    assert_same(tmp_path / "back", tensors_of(moe_model))


@pytest.mark.parametrize(
    "targets", [("out",), pytest.param(("out", "again"), marks=pytest.mark.matrix)]
)
def test_ranks_that_somebody_else_starts_meet_where_torchrun_says(moe_model, tmp_path, targets):
    """As docs/conversion.md says for several machines; another start uses the same file again."""
    job = tmp_path / "job.json"
    for target in targets:
        job.write_text(
            json.dumps(
                {
                    "source": str(moe_model),
                    "target": str(tmp_path / target),
                    "to": "megatron",
                    "layout": {"num_ranks": 2},
                    "probe": False,
                }
            )
        )
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "grpo_megatron.trainer.conversion_worker", str(job)],
                env=os.environ
                | {
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": "2",
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "GLOO_SOCKET_IFNAME": "lo",
                    "CUDA_VISIBLE_DEVICES": "",
                },
                stdout=subprocess.DEVNULL,
            )
            for rank in range(2)
        ]
        assert [rank.wait(120) for rank in ranks] == [0, 0]
        assert (tmp_path / target).is_dir()


def test_the_command_ends_with_the_exit_code_of_the_error(broken, tmp_path, capfd):
    _drop_shard(broken)
    assert main(["convert", "from-hf", str(broken), "--to", str(tmp_path / "out")]) == 8
    assert capfd.readouterr().err.startswith("error: missing shards")
    assert [path.name for path in tmp_path.iterdir()] == ["broken"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["tensor_parallel_size=4"],
            "4 attention heads and 2 key-value heads must both be divisible by TP = 4",
        ),
        (["tp=2"], "tensor_parallel_size=2"),
        (["precision=bfloat16"], "'precision' is no key of a layout of ranks"),
        (["trainer.fp8=blockwise"], "'fp8' is no key of a layout of ranks"),
        (["tensor_parallel_size=x"], "valid integer"),
        (["--dtype", "int8"], "--dtype int8 is not a dtype of weights"),
        (["--domain", "math"], "a Hugging Face checkpoint has no adapters of domains"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    dense_model, tmp_path, capsys, arguments, message
):
    out = tmp_path / "out"
    assert main(["convert", "from-hf", dense_model, "--to", str(out), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_existing_directory_is_kept(dense_model, tmp_path, capsys):
    assert main(["convert", "from-hf", dense_model, "--to", str(tmp_path)]) == 2
    assert "exists" in capsys.readouterr().err
