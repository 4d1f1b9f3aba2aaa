"""A recorded step with samples of full length, as the plan takes them to be."""

import math
from collections.abc import Sequence
from pathlib import Path

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
from grpo_megatron.config.objective import OF_TURNS
from grpo_megatron.config.preferences import PreferenceRows
from grpo_megatron.config.run import RunConfig
from grpo_megatron.routing.shape import RouteShape, RouteStatus
from grpo_megatron.trace.loads import Load
from grpo_megatron.types import Completion, Prompt, RolloutGroup, Turn, VersionSpan, policy_mask


class FullTable(SampleTable):
    """A step of which every route is recorded: the experts 0 to K - 1."""

    def __init__(self, directory: Path, shape: RouteShape | None):
        super().__init__(directory)
        self._route_shape = shape

    @property
    def route_shapes(self) -> list[RouteShape]:
        """The route shape of the one shard."""
        if self._route_shape is None:
            return []
        return [self._route_shape]

    def routes(
        self, row: int, layers: Sequence[int], shape: RouteShape
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [layers, T_p + T - 1, K] and that all of them are known."""
        num_layers = len(layers)
        num_rows = int(self.prompt_lengths[row] + self.completion_lengths[row]) - 1
        of_token = np.arange(shape.experts_per_token).astype(shape.dtype)
        ids = np.broadcast_to(of_token, (num_layers, num_rows, shape.experts_per_token))
        known = np.broadcast_to(np.uint8(RouteStatus.OK), (num_layers, num_rows))
        return ids, known


def write_full_step(
    directory: Path,
    config: RunConfig,
    num_samples: int,
    load: Load,
    *,
    vocab_size: int,
    route_shape: RouteShape | None,
) -> FullTable:
    """Record `num_samples` samples for one optimizer step of a run's kind, each as long as the
    recipe allows. Samples of RL have a loss at every token, which is the most that an environment
    leaves to the policy."""
    if config.trains_preferences:
        _write_preferences(directory, config, num_samples, load, vocab_size)
    else:
        _write_groups(directory, config, num_samples, load, vocab_size)
    return FullTable(directory, route_shape)


def _write_preferences(
    directory: Path, config: RunConfig, num_samples: int, load: Load, vocab_size: int
) -> None:
    """Record answers as `controller.preference_steps` does: both of a pair in one episode, and
    beside each answer with a label another one that is only looked at."""
    settings = config.preferences
    rng = np.random.default_rng(0)
    working = begin_step(directory)
    num_tokens = load.completion
    ids = rng.integers(0, vocab_size, num_tokens).astype(np.int32)
    turns = tuple(Turn(place, place + 1, 1.0) for place in load.read_at)
    logprobs = np.where(policy_mask(turns, num_tokens), -1.0, np.nan).astype(np.float32)
    span = (VersionSpan(0, 0, num_tokens),)
    answer = Completion(ids, logprobs, span, "stop", "", turns=turns)
    prompt_ids = tuple(rng.integers(0, vocab_size, load.sequence - num_tokens).tolist())
    labels = _LABELS[settings.rows]
    num_groups = num_samples // _num_trained(labels)
    groups: list[RolloutGroup[Completion]] = []
    rows: list[SampleRow] = []
    for number in range(num_groups):
        prompt = Prompt(str(number), config.domains[0].name, "", prompt_ids, "")
        groups.append(RolloutGroup(prompt, (answer,) * len(labels), 0))
        for label in labels:
            episode = len(rows)
            if settings.is_paired:
                episode = number
            rows.append(SampleRow(0, len(rows), number, 0, label, 0, episode=episode))
    components = {}
    if settings.has_reference:
        components[REFERENCE] = rng.normal(size=len(rows))
    if settings.use_margins:
        components[MARGIN] = np.ones(len(rows))
    shard = write_shard(working / "answers.safetensors", groups)
    facts = StepFacts(kind=config.kind, domains=[domain.name for domain in config.domains])
    finish_step(directory, [shard], rows, facts, components)


_LABELS: dict[PreferenceRows, tuple[float, ...]] = {
    "pairs": (1.0, 0.0),
    "labelled": (1.0, math.nan),
    "steps": (1.0,),
}
"""Rewards of the answers to a prompt; NaN: of one to another prompt, which is not trained."""


def _num_trained(labels: Sequence[float]) -> int:
    return len([label for label in labels if not math.isnan(label)])


def _write_groups(
    directory: Path, config: RunConfig, num_samples: int, load: Load, vocab_size: int
) -> None:
    num_completion = load.completion
    rng = np.random.default_rng(0)
    group_size = min(config.batch.num_samples_per_prompt, num_samples)
    working = begin_step(directory)
    ids = rng.integers(0, vocab_size, num_completion).astype(np.int32)
    logprobs = np.full(num_completion, -1.0, np.float32)
    turns: tuple[Turn, ...] = ()
    if config.objective.advantage in OF_TURNS:
        half = num_completion // 2
        turns = (Turn(0, half, 0.0, "first"), Turn(half, num_completion, 1.0, "second"))
    completion = Completion(
        ids, logprobs, (VersionSpan(0, 0, num_completion),), "stop", "", turns=turns
    )
    prompt_ids = tuple(rng.integers(0, vocab_size, load.sequence - num_completion).tolist())
    domain = config.domains[0].name
    groups: list[RolloutGroup[Completion]] = []
    for first in range(0, num_samples, group_size):
        size = min(group_size, num_samples - first)
        prompt = Prompt(str(len(groups)), domain, "", prompt_ids, "")
        groups.append(RolloutGroup(prompt, (completion,) * size, 0))
    rows = []
    for index in range(num_samples):
        group = index // group_size
        rows.append(SampleRow(0, index, group, 0, float(rng.normal()), 0))
    components = {}
    for of_domain in config.domains:
        for reward in of_domain.rewards:
            components[reward.component] = rng.normal(size=num_samples)
    is_stale = config.batch.max_staleness > 0 or config.batch.updates_per_rollout > 1
    shard = write_shard(working / "rollout-0.safetensors", groups)
    steps = []  # for process supervision: one ends in the middle of a completion, one with it
    for index in range(num_samples):
        for end in (num_completion // 2, num_completion - 1):
            steps.append((index, end, float(rng.normal())))
    facts = StepFacts(kind="rl", stale=is_stale)
    finish_step(directory, [shard], rows, facts, components, steps)
