"""Typo corpus: every key and every choice of the schema, with one edit, finds itself again."""

from __future__ import annotations

import random

import pytest

from grpo_megatron.config import schema
from grpo_megatron.config.keys import KeyPath
from grpo_megatron.config.schema import nearest_keys
from grpo_megatron.config.suggest import nearest


def _paths() -> list[KeyPath]:
    return [tuple(0 if part == "*" else part for part in path) for path in schema.all_fields()]


def _edits(word: str, rng: random.Random) -> dict[str, str]:
    """One of each kind of typing error at a random place."""
    at, letter = rng.randrange(len(word)), rng.choice("abcdefghijklmnopqrstuvwxyz")
    swap = min(at, len(word) - 2)
    return {
        "delete": word[:at] + word[at + 1 :],
        "insert": word[:at] + letter + word[at:],
        "double": word[:at] + word[at] + word[at:],
        "replace": word[:at] + letter + word[at + 1 :],
        "swap": word[:swap] + word[swap + 1] + word[swap] + word[swap + 2 :],
    }


@pytest.mark.parametrize("seed", range(5))
def test_one_edit_finds_the_key(seed):
    rng, tried, missed = random.Random(seed), 0, []
    for path in _paths():
        *table, key = path
        siblings = schema.keys_of(tuple(table))
        for kind, typo in _edits(key, rng).items():
            if typo in siblings or not typo:
                continue
            tried += 1
            found = nearest_keys((*table, typo))
            if not found or found[0] != ".".join(map(str, path)):
                missed.append((kind, typo, key, found))
    assert tried > 400
    assert len(missed) <= 0.01 * tried, missed


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("tensor_parallel_size", "trainer.tensor_parallel_size"),
        ("trainer.tp", "trainer.tensor_parallel_size"),
        ("rollout.tp", "rollout.tensor_parallel_size"),
        ("ep", "trainer.expert_parallel_size"),
        ("trainer.dtype", "rollout.dtype"),
        ("rollout.precision", "trainer.precision"),
        ("trainer.lr", "optimizer.lr"),
        ("learning_rate", "optimizer.lr"),
        ("optimizer.learning_rate", "optimizer.lr"),
        ("cold_start.lr", "cold_start.optimizer.lr"),
        ("trainer.max_new_tokens", "rollout.max_new_tokens"),
        ("group_size", "batch.num_samples_per_prompt"),
        ("trainer.Tensor-Parallel-Size", "trainer.tensor_parallel_size"),
        ("trainer.seed", "seed"),
        ("domain", "domains"),
        ("domains.0.agent.step_s", "domains.0.agent.episode_s"),
        ("domains.0.objective.preset", "objective.preset"),
        ("domains.0.model.preset", "model.preset"),
    ],
)
def test_habits_and_wrong_tables(wrong, right):
    assert nearest_keys(tuple(wrong.split(".")))[0] == right


def test_an_agent_is_not_told_keys_of_an_environment():
    for key in ("step_s", "servers", "demonstration"):
        found = nearest_keys(("domains", 0, "agent", key))
        assert not any(".environment." in name for name in found)


def test_nothing_is_suggested_for_nonsense():
    assert nearest_keys(("qqqqqqqqqq",)) == []
    assert nearest("zzz", ["alpha", "beta"]) == []


def _choices() -> list[tuple[str, ...]]:
    """The words that each setting of the schema takes."""
    found = (schema.choices_at(path) for path in schema.all_fields())
    return [choices for choices in found if choices and isinstance(choices[0], str)]


@pytest.mark.parametrize("seed", range(5))
def test_one_edit_finds_the_value(seed):
    rng, tried, missed = random.Random(seed), 0, []
    for choices in _choices():
        for word in choices:
            for typo in _edits(word, rng).values():
                if typo in choices or not typo:
                    continue
                tried += 1
                found = nearest(typo, choices)
                if not found or found[0] != word:
                    missed.append((typo, word, found))
    assert tried > 200
    assert len(missed) <= 0.03 * tried, missed
