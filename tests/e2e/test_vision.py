"""A policy that sees, through the real command: recorded, resumed, replayed, exported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.hf_import import HFReader
from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

SMALL = (
    "num_steps=3",
    "domains.0.rewards.0.function=run_rewards:vowels",  # which an untrained policy has some of
    "cold_start=null",
    "checkpoint.interval=1",
    "checkpoint.keep=5",
    "data.num_validation=4",
    "data.num_heldout=8",
    "domains.0.num_problems=60",
    "batch.num_prompts=6",
    "batch.num_samples_per_prompt=4",
    "trainer.num_ranks=2",
    "trainer.pipeline_parallel_size=2",
    "rollout.deterministic=true",
    "rollout.segment_tokens=2",  # so that images are sent again with the tokens so far
)


def train(root: Path, settings: Sequence[str]) -> Path:
    done = runs.command("train", "demo/vision-count-cpu", f"runs_dir={root}", "name=see", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "see"


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    return train(root, SMALL)


def test_engine_and_trainer_agree_about_every_token(run):
    records = runs.metrics(run)
    assert [record["step"] for record in records] == [0, 1, 2]
    assert all(record["mismatch/abs_max"] < 1e-4 for record in records)
    assert all(record["grad/norm"] > 0 for record in records)
    assert all(record["data/rows_refused_for_images"] == 0 for record in records)
    assert all(record["prompt/length_mean"] == 28 for record in records)  # 9 tokens of an image


def test_a_step_has_its_images(run):
    """One for each prompt, the bytes that were drawn: a step is whole without the run."""
    table = SampleTable(run / "store" / "step_000000")
    digests = set()
    for row in range(len(table)):
        (image,) = table.images(row)
        digests.add(image.digest)
        assert table.image_folder.read(image.digest).startswith(b"\x89PNG")
        assert len(table.prompt_ids(row)) == 28
    assert len(digests) == 6
    assert {file.name for file in table.image_folder.path.iterdir()} == digests


def test_a_finished_run_has_no_images_but_those_of_its_steps(run):
    """Of 60 pictures."""
    recorded = {file.name for file in (run / "store").glob("step_*/images/*")}
    assert {file.name for file in (run / "images").iterdir()} == recorded
    assert 6 < len(recorded) <= 18


def test_a_recorded_step_is_replayed(run):
    done = runs.command("replay", f"{run}@1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout


def test_a_resumed_run_takes_the_same_steps(run):
    """From its first checkpoint, with everything that came later taken away."""
    before = runs.timeless(runs.metrics(run))
    for later in ("step_000002", "step_000003"):
        for file in sorted((run / "checkpoints" / later).rglob("*"), reverse=True):
            file.rmdir() if file.is_dir() else file.unlink()
        (run / "checkpoints" / later).rmdir()
    for file in sorted((run / "store" / "step_000002").rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    (run / "store" / "step_000002").rmdir()
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    again = runs.timeless(runs.metrics(run))
    assert [record["reward/mean"] for record in again] == [r["reward/mean"] for r in before]
    for ours, theirs in zip(again, before, strict=True):
        assert ours["grad/norm"] == pytest.approx(theirs["grad/norm"], rel=1e-5)


def test_the_export_is_a_whole_checkpoint(run):
    """The tower's bytes are those of the beginning; transformers loads all of it."""
    from transformers import AutoModelForImageTextToText

    first = load_file(run / "model" / "model.safetensors")
    last = load_file(run / "export" / "model.safetensors")
    assert first.keys() == last.keys()
    for name, tensor in first.items():
        is_of_tower = name.startswith("visual.")
        assert torch.equal(tensor, last[name]) == is_of_tower, name
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (run / "export" / name).read_bytes() == (run / "model" / name).read_bytes()
    _, loading = AutoModelForImageTextToText.from_pretrained(
        run / "export", output_loading_info=True
    )
    assert not any(loading.values())
    assert json.loads((run / "export" / "config.json").read_text())["image_token_id"] > 0


def test_the_export_is_converted_and_probed(run, tmp_path):
    assert_converts_and_is_probed(run / "export", tmp_path)


def assert_converts_and_is_probed(export: Path, tmp_path: Path) -> None:
    """To Megatron's format and back, byte for byte, with transformers beside it."""
    megatron = tmp_path / "megatron"
    back = tmp_path / "hf"
    for arguments in (
        ("from-hf", str(export), "--to", str(megatron)),
        ("to-hf", str(megatron), "--to", str(back)),
    ):
        done = runs.command("convert", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
    first = load_file(export / "model.safetensors")
    last = load_file(back / "model.safetensors")
    assert first.keys() == last.keys()
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())


@pytest.fixture(scope="module")
def run_of_a_trained_tower(tmp_path_factory) -> Path:
    """Three steps at TP 2 with sequence parallelism, then a fourth at PP 2."""
    root = tmp_path_factory.mktemp("runs")
    settings = [setting for setting in SMALL if not setting.startswith("trainer.pipeline")]
    settings += ["trainer.tensor_parallel_size=2", "trainer.vision_tower=trained"]
    train(root, settings)
    layout = ("trainer.tensor_parallel_size=1", "trainer.pipeline_parallel_size=2")
    done = runs.command("resume", str(root / "see"), "num_steps=4", *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "see"


def test_engine_and_trainer_agree_while_the_tower_changes(run_of_a_trained_tower):
    """An engine that kept what an earlier tower made of an image would not."""
    records = runs.metrics(run_of_a_trained_tower)
    assert [record["step"] for record in records] == [0, 1, 2, 3]
    assert all(record["mismatch/abs_max"] < 1e-4 for record in records)
    first = load_file(run_of_a_trained_tower / "model" / "model.safetensors")
    last = load_file(run_of_a_trained_tower / "export" / "model.safetensors")
    assert first.keys() == last.keys()
    moved = {name: float((last[name] - tensor).abs().max()) for name, tensor in first.items()}
    towers = [name for name in moved if name.startswith("visual.")]
    assert len(towers) > 20
    assert min(moved[name] for name in towers) > 1e-5, min(towers, key=lambda name: moved[name])


def test_a_step_of_a_trained_tower_is_replayed(run_of_a_trained_tower):
    done = runs.command("replay", f"{run_of_a_trained_tower}@1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout


@pytest.fixture(scope="module")
def run_of_a_deep_tower(tmp_path_factory) -> Path:
    """Two steps of a Qwen3-VL at PP 2, whose tower is trained and recomputed."""
    root = tmp_path_factory.mktemp("runs")
    settings = [*SMALL, "model.preset=tiny-qwen3-vl", "num_steps=2", "trainer.recompute=full"]
    settings.append("trainer.vision_tower=trained")
    return train(root, settings)


def test_engine_and_trainer_agree_about_a_deep_tower(run_of_a_deep_tower):
    records = runs.metrics(run_of_a_deep_tower)
    assert [record["step"] for record in records] == [0, 1]
    assert all(record["mismatch/abs_max"] < 1e-4 for record in records)
    assert all(record["grad/norm"] > 0 for record in records)
    assert all(record["prompt/length_mean"] == 28 for record in records)  # 9 tokens of an image


def test_the_export_of_a_deep_tower_is_a_whole_checkpoint(run_of_a_deep_tower):
    """transformers loads all of it; every tensor of the tower has moved."""
    from transformers import AutoModelForImageTextToText

    run = run_of_a_deep_tower
    first = load_file(run / "model" / "model.safetensors")
    last = load_file(run / "export" / "model.safetensors")
    assert first.keys() == last.keys()
    towers = [name for name in first if name.startswith("model.visual.")]
    assert len(towers) > 30
    for name in towers:
        assert float((last[name] - first[name]).abs().max()) > 1e-5, name
    for name in ("config.json", "preprocessor_config.json", "tokenizer.json"):
        assert (run / "export" / name).read_bytes() == (run / "model" / name).read_bytes()
    config = json.loads((run / "export" / "config.json").read_text())
    assert config["text_config"]["vocab_size"] > 0 and "vocab_size" not in config
    _, loading = AutoModelForImageTextToText.from_pretrained(
        run / "export", output_loading_info=True
    )
    assert not any(loading.values())


def test_a_step_of_a_deep_tower_is_replayed(run_of_a_deep_tower):
    done = runs.command("replay", f"{run_of_a_deep_tower}@1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout


def test_the_export_of_a_deep_tower_is_converted_and_probed(run_of_a_deep_tower, tmp_path):
    assert_converts_and_is_probed(run_of_a_deep_tower / "export", tmp_path)


@pytest.fixture(scope="module")
def run_of_experts(tmp_path_factory) -> Path:
    """Two steps of a Qwen3-VL with experts at TP 2 and EP 2, an engine of two workers, R3."""
    root = tmp_path_factory.mktemp("runs")
    settings = [setting for setting in SMALL if not setting.startswith("trainer.pipeline")]
    settings += [
        "model.preset=tiny-qwen3-vl-moe",
        "num_steps=2",
        "trainer.tensor_parallel_size=2",
        "trainer.expert_parallel_size=2",
        "trainer.expert_tensor_parallel_size=1",
        "trainer.vision_tower=trained",
        "rollout.tensor_parallel_size=2",
        "rollout.expert_parallel=true",
        "routing.replay=r3",
    ]
    return train(root, settings)


def test_engine_and_trainer_agree_about_experts_behind_a_tower(run_of_experts):
    """Tokens of images have routes, too."""
    records = runs.metrics(run_of_experts)
    assert [record["step"] for record in records] == [0, 1]
    for record in records:
        assert record["mismatch/abs_max"] < 1e-4
        assert record["grad/norm"] > 0
        assert record["prompt/length_mean"] == 28  # 9 tokens of an image
        assert record["routing/unusable_fraction"] == 0
        assert record["routing/rollout_slot_flip_rate"] < 0.01


def test_the_export_of_stacked_experts_is_a_whole_checkpoint(run_of_experts):
    """transformers loads all of it, and every matrix of an expert has moved."""
    from transformers import AutoModelForImageTextToText

    run = run_of_experts
    first = HFReader(run / "model")
    last = HFReader(run / "export")
    assert first.names() == last.names()
    experts = [name for name in first.names() if ".mlp.experts." in name]
    assert len(experts) == 4 * 8 * 3
    moved = [name for name in experts if not torch.equal(first.tensor(name), last.tensor(name))]
    assert len(moved) > len(experts) / 2  # some are chosen by no token
    policy, loading = AutoModelForImageTextToText.from_pretrained(
        run / "export", output_loading_info=True
    )
    assert not any(loading.values())
    for number, layer in enumerate(policy.model.language_model.layers):
        of_expert = f"model.language_model.layers.{number}.mlp.experts.3."
        gate, up = layer.mlp.experts.gate_up_proj[3].chunk(2)
        assert torch.equal(gate, last.tensor(of_expert + "gate_proj.weight"))
        assert torch.equal(up, last.tensor(of_expert + "up_proj.weight"))
        down = last.tensor(of_expert + "down_proj.weight")
        assert torch.equal(layer.mlp.experts.down_proj[3], down)


def test_a_step_of_experts_behind_a_tower_is_replayed(run_of_experts):
    done = runs.command("replay", f"{run_of_experts}@1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the step is reproduced" in done.stdout


def test_the_export_of_stacked_experts_is_converted_and_probed(run_of_experts, tmp_path):
    assert_converts_and_is_probed(run_of_experts / "export", tmp_path)


def test_adapters_beside_a_tower(tmp_path):
    """The weights of tower and text stay; engines have the sum, which every token agrees with."""
    settings = ["num_steps=2", "lora.rank=4", "trainer.recompute=full"]
    run = train(tmp_path, [*SMALL, *settings])
    records = runs.metrics(run)
    assert [record["step"] for record in records] == [0, 1]
    assert all(record["mismatch/abs_max"] < 1e-4 for record in records)
    assert all(record["grad/norm"] > 0 for record in records)
    first = load_file(run / "model" / "model.safetensors")
    last = load_file(run / "export" / "model.safetensors")
    changed = {name for name, tensor in first.items() if not torch.equal(tensor, last[name])}
    assert len(changed) == 4 * 7
    assert all("_proj.weight" in name and ".layers." in name for name in changed)
    adapters = load_file(run / "adapter" / "adapter_model.safetensors")
    assert len(adapters) == 2 * len(changed)
    assert all(name.startswith("base_model.model.model.language_model.") for name in adapters)
