"""A reward model that begins with another one keeps the meaning of its scalars."""

from __future__ import annotations

import json

import pytest

from grpo_megatron.checkpoints.reward_models import mark_as_reward_model
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.plan.reward_labels import RewardHead, labels_of


def checkpoint(folder, *labels: str):
    hf = load_preset("tiny-qwen3-moe").hf | {"vocab_size": 97}
    (folder / "config.json").write_text(json.dumps(hf))
    mark_as_reward_model(folder, RewardHead(tuple(labels) or ("LABEL_0",), "regression"))
    return folder


def resolved(recipe: str, start):
    return resolve(recipe, [f"model.path={start}", "model.preset=null"])


def test_the_same_scalars(tmp_path):
    resolved("stages/tiny-reward-labels", checkpoint(tmp_path, "even", "short"))
    resolved("stages/tiny-reward-model", checkpoint(tmp_path))


@pytest.mark.parametrize(
    ("recipe", "labels"),
    [
        ("stages/tiny-reward-labels", ("short", "even")),
        ("stages/tiny-reward-labels", ()),
        ("stages/tiny-reward-model", ("even", "short")),
    ],
)
def test_other_scalars_are_refused_before_anything_starts(tmp_path, recipe, labels):
    with pytest.raises(ConfigError, match="the scalars of its head are") as error:
        resolved(recipe, checkpoint(tmp_path, *labels))
    assert "model.path" in str(error.value)


@pytest.mark.parametrize(
    ("recipe", "head"),
    [
        ("stages/tiny-reward-model", RewardHead(("LABEL_0",), "regression")),
        ("stages/tiny-reward-labels", RewardHead(("even", "short"), "regression")),
        (
            "stages/tiny-process-reward-model",
            RewardHead(("LABEL_0",), "multi_label_classification", "."),
        ),
    ],
)
def test_a_run_tells_what_its_export_will_say(tmp_path, recipe, head):
    config = resolve(recipe).config
    checkpoint(tmp_path)
    mark_as_reward_model(tmp_path, RewardHead.of_run(config))
    hf = json.loads((tmp_path / "config.json").read_text())
    assert RewardHead.of_run(config) == RewardHead.of_config(hf) == head


def test_a_language_model_has_no_scalars():
    config = resolve("stages/tiny-preferences").config
    hf = load_preset("tiny-qwen3-moe").hf | {"problem_type": "regression"}
    assert RewardHead.of_run(config) == RewardHead.of_config(hf) == RewardHead()


def test_one_scalar_may_have_any_name(tmp_path):
    """Where a run has one, without a name of its own."""
    resolved("stages/tiny-reward-model", checkpoint(tmp_path, "reward"))


ASKED = {
    "model.path": ("stages/tiny-preferences", ["model.preset=null", "model.path=PATH"]),
    "preferences.reference": ("stages/tiny-preferences", ["preferences.reference=PATH"]),
    "domains.0.reference": ("demo/gspo-moe-cpu", ["domains.0.reference=PATH"]),
    "distillation.teachers.0.path": (
        "demo/gspo-moe-cpu",
        ["kind=distil", "distillation.teachers=[{path='PATH'}]"],
    ),
}


@pytest.mark.parametrize("key", ASKED)
def test_a_reward_model_is_no_language_model(tmp_path, key):
    """Neither one that is there, nor the export of a run that is yet to end."""
    recipe, settings = ASKED[key]
    folder = tmp_path / "there"
    folder.mkdir()
    run = tmp_path / "run"
    run.mkdir()
    write_resolved(run / "config.json", resolve("stages/tiny-reward-model"))
    for path in (checkpoint(folder), run / "export"):
        flags = [setting.replace("PATH", str(path)) for setting in settings]
        with pytest.raises(ConfigError, match="is a reward model, and has no output layer") as told:
            resolve(recipe, flags)
        assert key in str(told.value) and "kind reward_model" in str(told.value)


@pytest.mark.parametrize("key", ["preferences.reference", "domains.0.reference"])
@pytest.mark.parametrize("text", ['{"model_type": "qwen3_moe"}', '{"config": {"gone": 1}}', "{"])
def test_what_a_run_will_write_is_not_asked_where_its_settings_cannot_be_read(tmp_path, key, text):
    """A folder that is none of a run, or one of another release, tells nothing of `export/`."""
    (tmp_path / "config.json").write_text(text)
    recipe, settings = ASKED[key]
    resolve(recipe, [setting.replace("PATH", str(tmp_path / "export")) for setting in settings])


@pytest.mark.parametrize(
    ("fields", "labels"),
    [
        ({}, ["LABEL_0", "LABEL_1"]),
        ({"num_labels": 1}, ["LABEL_0"]),
        ({"id2label": {"1": "b", "0": "a"}}, ["a", "b"]),
        ({"id2label": ["a", "b"]}, ["a", "b"]),
        ({"id2label": {"10": "b", "2": "a", "good": "c"}}, ["a", "b", "c"]),
    ],
)
def test_names_of_scalars(fields, labels):
    assert labels_of({"architectures": ["Qwen3ForSequenceClassification"], **fields}) == labels
    assert labels_of({"architectures": ["Qwen3ForCausalLM"], **fields}) == []


def test_a_checkpoint_that_is_yet_to_be_written(tmp_path):
    with pytest.raises(ConfigError) as error:
        resolved("stages/tiny-reward-labels", tmp_path / "none")
    assert "scalars" not in str(error.value)
