"""What a reward model's config.json says of its scalars."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_megatron.checkpoints.reward_models import mark_as_reward_model, refuse_other_labels
from grpo_megatron.errors import CheckpointError
from grpo_megatron.plan.reward_labels import PROBABILITIES, SCALARS, RewardHead


def marked(folder: Path, *labels: str, problem_type: str = SCALARS) -> dict:
    hf = {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": [1, 2], "pad_token_id": 2}
    (folder / "config.json").write_text(json.dumps(hf))
    head = RewardHead(labels or ("LABEL_0",), problem_type)
    mark_as_reward_model(folder, head)
    return json.loads((folder / "config.json").read_text())


def test_one_scalar(tmp_path):
    hf = marked(tmp_path)
    assert hf["architectures"] == ["Qwen3ForSequenceClassification"]
    assert (hf["id2label"], hf["problem_type"]) == ({"0": "LABEL_0"}, "regression")
    assert hf["pad_token_id"] is None  # it ends answers
    assert (
        marked(tmp_path, problem_type=PROBABILITIES)["problem_type"] == "multi_label_classification"
    )


@pytest.mark.parametrize(
    ("settings", "is_left_out"),
    [({}, False), ({"answer_ends": [7, 9]}, False), ({"answer_ends": [7, 5]}, True)],
)
def test_padding_that_ends_answers_in_the_chat_template_alone(tmp_path, settings, is_left_out):
    hf = {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": 1, "pad_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(hf))
    mark_as_reward_model(tmp_path, **settings)
    found = json.loads((tmp_path / "config.json").read_text())
    assert found["pad_token_id"] == (None if is_left_out else 5)


@pytest.mark.parametrize("architectures", [{}, {"architectures": []}, {"architectures": None}])
def test_a_config_without_architectures_has_that_of_its_family(tmp_path, architectures):
    text = json.dumps({"model_type": "qwen3", **architectures})
    (tmp_path / "config.json").write_text(text, encoding="utf-8-sig")
    mark_as_reward_model(tmp_path)
    hf = json.loads((tmp_path / "config.json").read_text())
    assert hf["architectures"] == ["Qwen3ForSequenceClassification"]


def test_several_scalars(tmp_path):
    hf = marked(tmp_path, "helpful", "harmless")
    assert hf["id2label"] == {"0": "helpful", "1": "harmless"}
    assert hf["label2id"] == {"helpful": 0, "harmless": 1}


def test_a_model_goes_on_with_its_own_labels(tmp_path):
    two = marked(tmp_path, "helpful", "harmless")
    refuse_other_labels(two, ("helpful", "harmless"), tmp_path)
    refuse_other_labels(marked(tmp_path), (), tmp_path)
    refuse_other_labels({"architectures": ["Qwen3ForCausalLM"]}, ("a", "b"), tmp_path)
    unnamed = {**two, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}}
    refuse_other_labels(unnamed, ("helpful", "harmless"), tmp_path)
    for labels in [("harmless", "helpful"), ("helpful",), ("helpful", "harmless", "brief"), ()]:
        with pytest.raises(CheckpointError, match="its head are helpful, harmless, and those of"):
            refuse_other_labels(two, labels, tmp_path)
    with pytest.raises(CheckpointError, match="LABEL_0, and those of the recipe helpful, harm"):
        refuse_other_labels(marked(tmp_path), ("helpful", "harmless"), tmp_path)
