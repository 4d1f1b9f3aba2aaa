"""Recorded preferences, and what ranks do with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.algorithms.preferences import REFERENCE
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan
from tests.trainer.models import VOCAB


def write_preferences(directory: Path, *, is_paired: bool, num_groups: int = 10) -> str:
    """Ragged pairs, or labelled answers each with one to another prompt, of two domains."""
    rng = np.random.default_rng(3)
    working = begin_step(directory)
    groups = []
    rows = []
    for number in range(num_groups):
        completions = []
        for _ in range(2):
            length = int(rng.integers(1, 20))
            ids = rng.integers(0, VOCAB, length).astype(np.int32)
            unknown = np.full(length, -np.inf, np.float32)
            span = (VersionSpan(0, 0, length),)
            completions.append(Completion(ids, unknown, span, "stop", ""))
        prompt = Prompt(str(number), "d", "", tuple(rng.integers(0, VOCAB, 6).tolist()), "")
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
        labels = (1.0, 0.0) if is_paired else (float(number % 2), np.nan)
        for answer, label in enumerate(labels):
            index = 2 * number + answer
            episode = number if is_paired else index
            rows.append(SampleRow(0, index, number, 0, label, number % 2, episode=episode))
    shard = write_shard(working / "rollout-0.safetensors", groups)
    lengths = [len(one.token_ids) for group in groups for one in group.completions]
    reference = -4.5 * np.array(lengths) + rng.normal(size=len(rows))
    facts = StepFacts(domains=["even", "odd"])
    finish_step(directory, [shard], rows, facts, {REFERENCE: reference})
    return str(directory)


def preference_step(
    model: str,
    pairs: str,
    labelled: str,
    layout: dict[str, Any],
    settings: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """One optimizer step of each loss: its metrics and its gradients before clipping."""
    from grpo_megatron.config.preferences import PreferencesConfig
    from grpo_megatron.trainer.steps.answer_scores import answer_scores
    from grpo_megatron.trainer.steps.preference_update import train_preferences
    from tests.trainer.trainer_ranks import OPTIMIZER, Setup

    found = {}
    for name, values in settings.items():
        setup = Setup(
            model, {"distributed_optimizer": False, "max_tokens_per_microbatch": 96, **layout}
        )
        preferences = PreferencesConfig(**values)
        config = setup.config().model_copy(
            update={"kind": "preferences", "preferences": preferences}
        )
        table = SampleTable(Path(pairs if preferences.is_paired else labelled))
        scores = answer_scores(config, setup.policy, table)
        report = train_preferences(config, setup.policy, table, 1, 10)
        scale = max(report.grad_norms[0] / OPTIMIZER.clip_grad, 1.0)
        shards = [replace(one, tensor=one.tensor.main_grad * scale) for one in setup.shards]
        found[name] = {
            "scores": scores,
            "metrics": report.metrics,
            "norm": report.grad_norms[0],
            "tensors": setup.gather(shards),
        }
    return found
