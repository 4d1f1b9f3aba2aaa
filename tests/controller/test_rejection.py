"""Which samples become the responses of a data set."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import numpy as np
import pytest

from grpo_megatron.config.run import RejectionConfig, RunConfig
from grpo_megatron.controller.rejection import _responses, sample_dataset
from grpo_megatron.data.dataset_answers import unsampled
from grpo_megatron.errors import DataError
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup

WORDS = SimpleNamespace(encode=lambda text: text.split())


def test_empty_samples_are_no_responses():
    """Also where their reward calls them correct."""
    texts = ["", "5", " \n", "five", "5 "]
    completions = [unsampled([1], 0, "stop", text) for text in texts]
    group = SimpleNamespace(group=SimpleNamespace(completions=completions))
    selection = SimpleNamespace(correct=lambda group: np.ones(len(texts)))
    assert _responses(group, selection, RejectionConfig(), WORDS) == ["5", "five"]


RECIPE = {
    "name": "case",
    "kind": "rejection_sample",
    "num_steps": 0,
    "model": {"preset": "tiny-qwen3-moe"},
    "domains": [
        {
            "name": "sums",
            "source": "file",
            "path": "rows.jsonl",
            "rewards": [{"function": "grpo_megatron.rewards.functions:exact_match"}],
        }
    ],
    "rejection": {"num_samples": 4},
}
PROMPT = Prompt("sums-1", "sums", "2 + 3?", (1, 2), "5")


def sampled(tmp_path, rewards, finish_reasons) -> dict[str, float]:
    """Sample a data set of one prompt: the answers are numbers, with these rewards."""
    config = RunConfig.model_validate(RECIPE)
    completions = []
    for number, reason in enumerate(finish_reasons):
        completions.append(unsampled([1], 0, reason, str(number)))
    group = RolloutGroup(PROMPT, tuple(completions), 0)

    async def rollouts(step, prompts, *, num_samples):
        return [group]

    async def score(groups):
        values = np.array(rewards, np.float64)
        name = config.domains[0].accuracy_component
        return [ScoredGroup(group, {name: values}, values)]

    found = sample_dataset(
        config,
        SimpleNamespace(dataset=tmp_path / "dataset.jsonl"),
        splits=SimpleNamespace(train={"sums": (PROMPT,)}),
        dispatcher=SimpleNamespace(rollouts=rollouts),
        rewards=SimpleNamespace(score=score),
        tokenizer=WORDS,
    )
    return asyncio.run(found)


def test_a_data_set_without_samples_is_refused_with_what_became_of_them(tmp_path):
    reasons = ["length", "length", "stop", "stop"]
    with pytest.raises(DataError) as caught:
        sampled(tmp_path, [0.0, 1.0, np.nan, 0.0], reasons)
    told = "kept 0 of 4 samples (2 truncated, 1 unscorable, 1 incorrect): there is no data set"
    assert caught.value.message == told
    assert "max_new_tokens" in caught.value.remedy
    assert not (tmp_path / "dataset.jsonl").exists()


def test_what_became_of_samples_is_told(tmp_path, monkeypatch):
    shown = []
    monkeypatch.setattr(
        "grpo_megatron.controller.rejection.show", lambda kind, text: shown.append(text)
    )
    counts = sampled(tmp_path, [0.0, 1.0, 1.0, 1.0], ["stop", "length", "stop", "stop"])
    assert counts["kept_samples"] == 2
    row = json.loads((tmp_path / "dataset.jsonl").read_text())
    assert row["responses"] == ["2", "3"]
    assert shown == ["kept 2 of 4 samples (1 incorrect, 1 truncated), for 1 of 1 prompts"]
