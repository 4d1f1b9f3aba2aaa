"""Checkpoints that a run begins with are looked through before anything starts."""

from __future__ import annotations

import json
import shutil

import pytest

from grpo_megatron.cli.main import main
from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import CheckpointError
from grpo_megatron.launch.model_files import refuse_incomplete_models
from grpo_megatron.plan.resolve import resolve

RECIPE = "demo/gspo-moe-cpu"


@pytest.fixture
def model(tmp_path):
    directory = tmp_path / "model"
    write_tiny_model(directory, load_preset("tiny-qwen3-moe"))
    (directory / "model.safetensors").touch()
    return directory


def settings(model) -> list[str]:
    return ["model.preset=null", f"model.path={model}"]


@pytest.mark.parametrize(
    ("lost", "code", "words"),
    [
        ("model.safetensors", 8, "model.path: model.safetensors is missing"),
        ("tokenizer.json", 4, "tokenizer.json"),
    ],
)
def test_a_model_without_some_of_its_files_starts_nothing(
    tmp_path, monkeypatch, capsys, model, lost, code, words
):
    monkeypatch.chdir(tmp_path)
    (model / lost).unlink()
    assert main(["train", RECIPE, *settings(model)]) == code
    assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_checkpoint_of_a_run_serves_as_a_model(model):
    (model / "model.safetensors").unlink()
    (model / "weights").mkdir()
    (model / "weights" / ".metadata").touch()
    refuse_incomplete_models(resolve(RECIPE, settings(model)).config)


def test_every_file_that_an_index_names_is_there(model):
    (model / "model.safetensors").unlink()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    weight_map = {f"layer.{number}": name for number, name in enumerate(names)}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    config = resolve(RECIPE, settings(model)).config
    with pytest.raises(CheckpointError, match="3 of 3 files of weights are missing, model-00001"):
        refuse_incomplete_models(config)
    for name in names[:2]:
        (model / name).touch()
    with pytest.raises(CheckpointError, match=f"model.path: {names[2]} is missing"):
        refuse_incomplete_models(config)
    (model / names[2]).touch()
    refuse_incomplete_models(config)
    index.write_text("{")  # the trainer says what is wrong with it
    refuse_incomplete_models(config)


def test_a_whole_model_is_taken(model):
    refuse_incomplete_models(resolve(RECIPE, settings(model)).config)


def test_weights_of_a_run_that_goes_on_are_in_its_checkpoint(model):
    (model / "model.safetensors").unlink()
    config = resolve(RECIPE, settings(model)).config
    with pytest.raises(CheckpointError):
        refuse_incomplete_models(config)
    refuse_incomplete_models(config, has_checkpoint=True)
    shutil.rmtree(model)  # told by who looks for inputs
    refuse_incomplete_models(config)


def test_other_models_have_weights_too(tmp_path, model):
    reference = tmp_path / "reference"
    reference.mkdir()
    shutil.copy(model / "config.json", reference)
    flags = [*settings(model), "objective.preset=grpo", f"domains.0.reference={reference}"]
    config = resolve(RECIPE, flags).config
    with pytest.raises(CheckpointError, match=r"domains\.0\.reference: model\.safetensors is"):
        refuse_incomplete_models(config)
    (reference / "model.safetensors").touch()
    refuse_incomplete_models(config)
