"""The example that the docstring of `grpo_megatron.types` shows, computed by the library itself."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# first: it prepares the machine for Megatron, which looks at it when it is imported
import grpo_megatron.trainer.megatron.platform  # noqa: F401  isort: skip

from grpo_megatron import types
from grpo_megatron.algorithms import terms
from grpo_megatron.algorithms.advantages.pipeline import advantages_of, select
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.shared_prompts import shared_prompts
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.trainer.steps.microbatch import build_microbatch
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.controller.scored_groups import stored

CONFIG = RunConfig.model_validate(
    {
        "name": "example",
        "model": {"preset": "tiny-qwen3"},
        "objective": {"preset": "grpo"},
        "domains": [
            {
                "name": "addition",
                "source": "file",
                "path": "x",
                "rewards": [{"function": "a:b", "name": "correct"}],
            }
        ],
    }
)


def shown() -> dict[str, Any]:
    """What the docstring says: values by `Record.field`."""
    values = {}
    for line in (types.__doc__ or "").splitlines():
        name, _, literal = line.strip().partition(" ")
        literal = literal.partition("  #")[0].strip()
        if "." in name and literal[:1] in ("[", '"', "0"):
            values[name] = ast.literal_eval(literal)
    return values


def completion(text: str, token_ids: list[int], logprobs: list[float]) -> Completion:
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array(logprobs, np.float32),
        versions=(VersionSpan(version=0, start=0, end=len(token_ids)),),
        finish_reason="stop",
        text=text,
    )


def computed(directory: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The chain from the prompt on, by the functions that a run takes."""
    prompt = Prompt("add-17", "addition", "37+48=", (5, 9, 12, 6, 10, 13), "85")
    completions = (
        completion("85", [10, 7, 1], [-0.1, -0.2, -0.3]),
        completion("7", [9, 1], [-0.4, -0.5]),
    )
    rewards = np.array([1.0, 0.0])
    scored = ScoredGroup(
        RolloutGroup(prompt, completions, replica=0), {"correct": rewards}, rewards
    )

    facts = StepFacts(domains=["addition"])
    in_store = stored(directory.with_name("rollouts"), [scored])
    record_step(directory, in_store, 1, facts, decode=lambda token_ids: "")
    table = SampleTable(directory)

    objective = objective_of(CONFIG, state={})
    batch = sample_batch(CONFIG, table)
    advantages = advantages_of(objective, batch)
    rows = select(objective, batch).nonzero()[:, 0]
    constants = loss_constants(objective, batch, advantages, rows, constant_length=32)

    both = np.array([0, 1])
    paths = shared_prompts(table, both).paths
    device = torch.device("cpu")
    microbatch = build_microbatch(0, table, both, pad_to=1, device=device, paths=paths)
    # on policy, the model computes what the engine reported
    logprobs = microbatch.rollout_logprobs.clone().requires_grad_()
    loss_batch = constants.loss_batch(
        torch.from_numpy(microbatch.episodes),
        logprobs=logprobs,
        old_logprobs=logprobs.detach(),
        rollout_logprobs=microbatch.rollout_logprobs,
        entropies=torch.zeros_like(logprobs),
    )
    clip_inputs = []

    def recorded(o, inputs):
        clip_inputs.append(inputs)
        return terms.ppo(o, inputs)

    monkeypatch.setitem(terms.CLIPS, "ppo", recorded)
    loss, _ = policy_loss(objective, loss_batch)
    loss.backward()
    [inputs] = clip_inputs

    return {
        "Prompt.text": prompt.text,
        "Prompt.token_ids": list(prompt.token_ids),
        "Completion.text": [c.text for c in completions],
        "Completion.token_ids": [c.token_ids.tolist() for c in completions],
        "Completion.logprobs": [c.logprobs.tolist() for c in completions],
        "ScoredGroup.rewards": scored.rewards.tolist(),
        "SampleTable.group": table.group.tolist(),
        "SampleTable.update": table.update.tolist(),
        "SampleTable.reward": table.reward.tolist(),
        "SampleTable.prompt_lengths": table.prompt_lengths.tolist(),
        "SampleTable.completion_lengths": table.completion_lengths.tolist(),
        "SampleBatch.rewards": batch.rewards.tolist(),
        "SampleBatch.group_ids": batch.group_ids.tolist(),
        "SampleBatch.token_counts": batch.token_counts.tolist(),
        "Advantages.values": advantages.values.tolist(),
        "LossConstants.weights": constants.weights.tolist(),
        "MicroBatch.lengths": list(microbatch.lengths),
        "MicroBatch.tokens": microbatch.tokens[0].tolist(),
        "MicroBatch.predicting": microbatch.predicting.tolist(),
        "MicroBatch.targets": microbatch.targets.tolist(),
        "MicroBatch.sample": microbatch.sample.tolist(),
        "MicroBatch.rollout_logprobs": microbatch.rollout_logprobs.tolist(),
        "LossBatch.logprobs": loss_batch.logprobs.tolist(),
        "LossBatch.advantages": loss_batch.advantages.tolist(),
        "LossBatch.weights": loss_batch.weights.tolist(),
        "ClipInputs.log_ratio": inputs.log_ratio.tolist(),
        "ClipInputs.low": inputs.low,
        "ClipInputs.high": inputs.high,
        "loss.value": loss.item(),
        "loss.gradient": logprobs.grad.tolist(),
    }


def rounded(value: Any) -> Any:
    """Three digits after the point, as the docstring has them; lists of any depth."""
    if isinstance(value, list):
        return [rounded(part) for part in value]
    if isinstance(value, float):
        return round(value, 3) + 0.0  # no minus zero
    return value


def test_the_docstring_shows_what_the_library_computes(tmp_path, monkeypatch):
    found = computed(tmp_path / "step_000000", monkeypatch)
    expected = shown()
    assert list(found) == list(expected)
    for name, value in found.items():
        assert rounded(value) == expected[name], name
