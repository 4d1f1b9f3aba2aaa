"""Recorded preferences, and what ranks do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_megatron.algorithms.preferences import MARGIN, REFERENCE
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.preference_steps import read_at_its_end
from grpo_megatron.types import Completion, Prompt, RolloutGroup, Turn, VersionSpan
from tests.trainer.models import VOCAB


def write_preferences(
    directory: Path,
    *,
    is_paired: bool,
    num_groups: int = 10,
    for_reward: bool = False,
    reference: Sequence[float] = (),
) -> str:
    """Ragged pairs, or labelled answers each with one to another prompt, of two domains.

    reference: scores of the rows, made up by default."""
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
            completion = Completion(ids, unknown, span, "stop", "")
            if for_reward:
                completion = read_at_its_end(completion)
            completions.append(completion)
        prompt = Prompt(str(number), "d", "", tuple(rng.integers(0, VOCAB, 6).tolist()), "")
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
        labels = (1.0, 0.0) if is_paired else (float(number % 2), np.nan)
        for answer, label in enumerate(labels):
            index = 2 * number + answer
            episode = number if is_paired else index
            rows.append(SampleRow(0, index, number, 0, label, number % 2, episode=episode))
    shard = write_shard(working / "rollout-0.safetensors", groups)
    lengths = [len(one.token_ids) for group in groups for one in group.completions]
    made_up = -4.5 * np.array(lengths) + rng.normal(size=len(rows))
    scores = np.array(reference or made_up)
    facts = StepFacts(domains=["even", "odd"])
    components = {REFERENCE: scores, MARGIN: np.repeat(rng.random(num_groups), 2)}
    finish_step(directory, [shard], rows, facts, components)
    return str(directory)


def write_steps(directory: Path, num_answers: int = 12) -> str:
    """Ragged answers of two domains whose steps have labels, some of them between 0 and 1."""
    rng = np.random.default_rng(5)
    working = begin_step(directory)
    groups = []
    rows = []
    for number in range(num_answers):
        ids: list[int] = []
        turns = []
        for _ in range(int(rng.integers(1, 5))):
            ids += rng.integers(0, VOCAB, int(rng.integers(1, 6))).tolist()
            label = float(rng.choice([0.0, 0.25, 1.0]))
            turns.append(Turn(len(ids), len(ids) + 1, label))
        ids.append(int(rng.integers(0, VOCAB)))
        unknown = np.full(len(ids), np.nan, np.float32)
        unknown[[turn.start for turn in turns]] = -np.inf
        span = (VersionSpan(0, 0, len(ids)),)
        answer = Completion(np.array(ids, np.int32), unknown, span, "stop", "", turns=tuple(turns))
        prompt = Prompt(str(number), "d", "", tuple(rng.integers(0, VOCAB, 6).tolist()), "")
        groups.append(RolloutGroup(prompt, (answer,), 0))
        worst = min(turn.reward for turn in turns)
        rows.append(SampleRow(0, number, number, 0, worst, number % 2))
    shard = write_shard(working / "rollout-0.safetensors", groups)
    finish_step(directory, [shard], rows, StepFacts(domains=["even", "odd"]))
    return str(directory)


def process_reward_model_export(model: str, steps: str, directory: str) -> list[list[float]]:
    """Logits of all steps by a model with a head of its own, which is exported."""
    from grpo_megatron.checkpoints.hf_export import export_model
    from grpo_megatron.checkpoints.reward_models import mark_as_reward_model
    from grpo_megatron.plan.reward_labels import PROBABILITIES, RewardHead
    from grpo_megatron.trainer.steps.step_labels import step_logits
    from tests.trainer.trainer_ranks import Setup

    setup = Setup(model, {"max_tokens_per_microbatch": 96}, num_scalars=1)
    logits = step_logits(setup.config(), setup.policy, SampleTable(Path(steps)))
    export_model(setup.policy.sharded, Path(directory), Path(model))
    mark_as_reward_model(Path(directory), RewardHead(("LABEL_0",), PROBABILITIES, "<step>"))
    return logits


def reward_model_export(
    model: str, rewarded: str, directory: str, *, by_domain: bool = False
) -> list[float]:
    """Scalars of all answers by a model with a head of its own, which is exported."""
    from grpo_megatron.checkpoints.hf_export import export_model
    from grpo_megatron.checkpoints.reward_models import mark_as_reward_model
    from grpo_megatron.config.preferences import PreferencesConfig
    from grpo_megatron.plan.reward_labels import RewardHead
    from grpo_megatron.trainer.steps.answer_scores import answer_scores
    from tests.trainer.trainer_ranks import Setup

    num_scalars = 2 if by_domain else 1
    setup = Setup(model, {"max_tokens_per_microbatch": 96}, num_scalars=num_scalars)
    settings = PreferencesConfig(loss="bradley_terry", scalar_per_domain=by_domain)
    changes = {"kind": "reward_model", "preferences": settings}
    config = setup.config().model_copy(update=changes)
    scores = answer_scores(config, setup.policy, SampleTable(Path(rewarded)))

    def mark(working: Path) -> None:
        assert not Path(directory).exists()  # no export without the mark has the name of one
        mark_as_reward_model(working, RewardHead.of_run(config))

    export_model(setup.policy.sharded, Path(directory), Path(model), mark=mark)
    again = Setup(directory, {}, num_scalars=num_scalars)
    found = answer_scores(config, again.policy, SampleTable(Path(rewarded)))
    np.testing.assert_allclose(found, scores, rtol=1e-6)
    return scores.tolist()


def preferences_run(model: str, **settings: Any) -> RunConfig:
    """Configuration of a run on two domains with a small model, and with more `settings`."""
    domain = {"source": "file", "path": "x"}
    values = {
        "name": "case",
        "kind": "preferences",
        "model": {"path": model},
        "trainer": {"precision": "float32", "num_threads": 1},
        "rollout": {"max_new_tokens": 8, "max_model_len": 64},
        "domains": [{"name": name, **domain} for name in ("even", "odd")],
    }
    return RunConfig.model_validate(values | settings)


def scores_of_another_checkpoint(
    model: str, other: str, pairs: str, lora: dict[str, Any]
) -> dict[str, np.ndarray]:
    """Scores of answers by a policy with adapters that are trained, by another checkpoint in the
    place of its weights, and by that checkpoint in a trainer without adapters."""
    from grpo_megatron.config.lora import LoraConfig
    from grpo_megatron.trainer.lora.peft_format import adapter_model
    from grpo_megatron.trainer.requests import ScoreAnswers, TakeWeights
    from tests.integration import trainer_side

    config = preferences_run(model)

    def scores(*, with_adapters: bool = True) -> np.ndarray:
        return np.array(trainer_side.execute(ScoreAnswers(Path(pairs), with_adapters)))

    trainer_side.start(config, other)
    found = {"other": scores()}
    trainer_side.start(config.model_copy(update={"lora": LoraConfig(**lora)}), model)
    for shard in adapter_model(trainer_side.policy()).shards:
        if ".lora_B." in shard.name:
            shard.tensor.data.fill_(0.02)
    found["policy_before"] = scores()
    trainer_side.execute(TakeWeights(Path(other)))
    found["reference"] = scores(with_adapters=False)
    found["with_adapters"] = scores()
    trainer_side.execute(TakeWeights(Path(model)))
    found["policy_after"] = scores()
    return found


def first_step_after_a_checkpoint(model: str, pairs: str, lora: dict[str, Any]) -> float:
    """Take the first step of a policy whose weights are the named reference's, and whose adapters
    came with a checkpoint, as trained ones with which the run began; returns the gap of both."""
    from grpo_megatron.trainer.lora.peft_format import adapter_model
    from grpo_megatron.trainer.requests import ScoreAnswers, Train
    from tests.integration import trainer_side

    config = preferences_run(model, preferences={"reference": model}, lora=lora)
    trainer_side.start(config, model)
    for shard in adapter_model(trainer_side.policy()).shards:
        if ".lora_B." in shard.name:
            shard.tensor.data.fill_(0.02)
    request = ScoreAnswers(Path(pairs), with_adapters=False)
    directory = Path(f"{pairs}_of_reference")
    write_preferences(directory, is_paired=True, reference=trainer_side.execute(request))
    train = Train(directory=directory, first_update=0, num_updates=2, state={})
    gap: float = trainer_side.execute(train).metrics["preference/reference_gap"]
    return gap


def reward_model_files(model: str, root: str) -> None:
    """Save a reward model of two scalars, and export it."""
    from grpo_megatron.trainer.requests import ExportModel, SaveCheckpoint
    from tests.integration import trainer_side

    settings = {"loss": "bradley_terry", "scalar_per_domain": True}
    config = preferences_run(model, kind="reward_model", preferences=settings)
    trainer_side.start(config, model)
    directory = Path(root) / "step_000001"
    trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": 1}))
    trainer_side.execute(ExportModel(Path(root) / "export"))


def preference_step(
    model: str,
    pairs: str,
    labelled: str,
    rewarded: str,
    steps: str,
    layout: dict[str, Any],
    settings: dict[str, dict[str, Any]],
) -> dict[str, dict[str, Any]]:
    """One optimizer step of each loss: its metrics and its gradients before clipping."""
    from grpo_megatron.config.preferences import REWARD_MODEL_LOSSES, PreferencesConfig
    from grpo_megatron.trainer.steps.answer_scores import answer_scores
    from grpo_megatron.trainer.steps.preference_update import train_preferences
    from grpo_megatron.trainer.steps.step_labels import step_logits
    from tests.trainer.trainer_ranks import OPTIMIZER, Setup

    found = {}
    for name, values in settings.items():
        num_scalars = 0
        if values["loss"] in REWARD_MODEL_LOSSES:
            num_scalars = 2 if values.get("scalar_per_domain") else 1
        setup = Setup(
            model,
            {"distributed_optimizer": False, "max_tokens_per_microbatch": 96, **layout},
            num_scalars=num_scalars,
        )
        preferences = PreferencesConfig(**values)
        kind, recorded = "preferences", pairs
        if values["loss"] == "kto":
            recorded = labelled
        if values["loss"] == "bradley_terry":
            kind, recorded = "reward_model", rewarded
        if values["loss"] == "stepwise":
            kind, recorded = "reward_model", steps
        config = setup.config().model_copy(update={"kind": kind, "preferences": preferences})
        table = SampleTable(Path(recorded))
        scores = answer_scores(config, setup.policy, table)
        if values["loss"] == "stepwise":
            scores = np.concatenate(step_logits(config, setup.policy, table))
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
