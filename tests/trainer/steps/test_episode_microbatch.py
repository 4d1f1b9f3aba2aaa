"""Episodes as micro-batches: what the environment said is in the row and never in the loss."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.shared_prompts import shared_prompts
from grpo_megatron.batching.spool import store_groups
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_step
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.steps.microbatch import MicroBatch, build_microbatch
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup
from tests import episodes
from tests.episodes import PIECE, sequence_of
from tests.trainer.episode_samples import DOMAINS, random_groups, write_groups

MANY = settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def config(**objective) -> RunConfig:
    rewards = [{"function": "a:b", "name": name} for name in ("first", "second")]
    domain = {"source": "file", "path": "x", "rewards": rewards}
    return RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "objective": objective,
            "domains": [{"name": name, **domain} for name in DOMAINS],
        }
    )


def recorded(directory: Path, groups: list[RolloutGroup[Completion]]) -> SampleTable:
    place = directory / f"step_{len(list(directory.iterdir())):06d}"
    return SampleTable(Path(write_groups(place, groups)))


def packed(table: SampleTable, *, share: bool = True) -> MicroBatch:
    rows = np.arange(len(table))
    paths = shared_prompts(table, rows).paths
    if not share:
        paths = paths.apart()
    return build_microbatch(0, table, rows, pad_to=4, device=torch.device("cpu"), paths=paths)


def one_group(completions: list[Completion]) -> list[RolloutGroup[Completion]]:
    return [RolloutGroup(Prompt("p", DOMAINS[0], "", (7, 8, 9), ""), tuple(completions), 0)]


def with_environment(
    policy: list[tuple[np.ndarray, np.ndarray]], between: list[int], seed: int
) -> Completion:
    """Turns of these ids and log-probs, and between them, before and after as many tokens of the
    environment as `between` says: any ids."""
    rng = np.random.default_rng(seed)
    pieces: list[PIECE] = []
    for number, (ids, _) in enumerate(policy):
        if between[number]:
            pieces.append((between[number], False))
        pieces.append((len(ids), True))
    if between[-1]:
        pieces.append((between[-1], False))
    found = sequence_of(pieces, rng)
    for turn, (ids, logprobs) in zip(found.turns, policy, strict=True):
        found.token_ids[turn.start : turn.end] = ids
        found.logprobs[turn.start : turn.end] = logprobs
    return found


@MANY
@given(st.data())
def test_the_environments_tokens_never_change_the_loss_tokens(tmp_path, data):
    """Others in their place, more of them or fewer: targets, log-probs, samples and weights of the
    loss stay, and the weights of a sample's tokens add up as those of its policy tokens."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    sizes = data.draw(
        st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=3)
    )
    policy = []
    for of_sample in sizes:
        turns = []
        for size in of_sample:
            turns.append((rng.integers(2, 99, size), -rng.random(size, np.float32)))
        policy.append(turns)
    aggregation = data.draw(
        st.sampled_from(["seq_mean_token_mean", "token_mean", "seq_mean_token_sum", "constant"])
    )
    settings_of = config(preset="grpo", aggregation=aggregation, aggregation_length=7)
    if aggregation != "constant":
        settings_of = config(preset="grpo", aggregation=aggregation)
    found = []
    for seed in (1, 2):
        completions = []
        for turns in policy:
            count = len(turns) + 1
            between = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
            completions.append(with_environment(turns, between, seed))
        table = recorded(tmp_path, one_group(completions))
        batch = sample_batch(settings_of, table)
        objective = objective_of(settings_of, {})
        every_sample = torch.arange(len(batch))
        constants = loss_constants(
            objective, batch, advantages_of(objective, batch), every_sample, 7
        )
        found.append((packed(table), constants))
    (first, first_constants), (second, second_constants) = found
    for name in ("targets", "rollout_logprobs", "sample"):
        assert torch.equal(getattr(first, name), getattr(second, name))
    assert torch.equal(first_constants.weights, second_constants.weights)
    assert torch.equal(first_constants.batch.token_counts, second_constants.batch.token_counts)
    counts = first_constants.batch.token_counts
    total = float((first_constants.weights * counts).sum())
    expected = {
        "seq_mean_token_mean": 1.0,
        "token_mean": 1.0,
        "seq_mean_token_sum": float(counts.double().mean()),
        "constant": float(counts.double().mean()) / 7,
    }[aggregation]
    assert total == pytest.approx(expected)


@MANY
@given(episodes.groups(), st.booleans())
def test_a_policy_token_is_the_one_after_its_row(tmp_path, groups, share):
    """In a row where sequences share what they begin with, or lie apart."""
    groups = [replace(group, prompt=replace(group.prompt, domain=DOMAINS[0])) for group in groups]
    table = recorded(tmp_path, groups)
    microbatch = packed(table, share=share)
    tokens = microbatch.tokens[0].numpy()
    start = 0
    number = {episode: place for place, episode in enumerate(microbatch.episodes.tolist())}
    for row, token_rows in zip(
        microbatch.table_rows.tolist(), microbatch.tree.token_rows, strict=True
    ):
        ids, logprobs = table.completion(row)
        places = table.policy_places(row)
        end = start + len(places)
        own = slice(start, end)
        num_prompt = int(table.prompt_lengths[row])
        np.testing.assert_array_equal(
            tokens[token_rows], np.concatenate([table.prompt_ids(row), ids])
        )
        np.testing.assert_array_equal(microbatch.targets[own], ids[places])
        np.testing.assert_array_equal(microbatch.rollout_logprobs[own], logprobs[places])
        np.testing.assert_array_equal(
            microbatch.predicting[own], token_rows[num_prompt + places - 1]
        )
        assert (microbatch.sample[own] == number[int(table.episode[row])]).all()
        start = end
    assert start == len(microbatch.targets)
    assert not torch.isnan(microbatch.rollout_logprobs).any()


def test_kept_ids_are_those_of_policy_tokens(tmp_path):
    rng = np.random.default_rng(0)
    one = episodes.with_kept(sequence_of([(2, True), (3, False), (2, True)], rng), rng)
    microbatch = packed(recorded(tmp_path, one_group([one])))
    assert microbatch.kept is not None
    assert microbatch.kept.token.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not microbatch.kept.missing.any()
    of_policy = one.token_ids[one.policy_mask]
    assert microbatch.kept.ids[::2].tolist() == of_policy.tolist()


def test_samples_of_the_objective_are_episodes(tmp_path):
    table = recorded(tmp_path, random_groups(5, forks=True, states=True))
    batch = sample_batch(config(preset="gigpo"), table)
    assert len(table) == 24 and len(batch) == 12
    assert batch.group_ids.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert batch.num_tokens == table.policy_lengths.sum()
    assert batch.domains.tolist() == [0] * 3 + [1] * 3 + [0] * 3 + [1] * 3
    assert batch.turns is not None
    num_turns = [len(table.turns(row)) for row in range(len(table))]
    assert len(batch.turns.sample) == sum(num_turns)
    of_samples = np.bincount(table.episode, num_turns)
    assert torch.bincount(batch.turns.sample).tolist() == of_samples.tolist()


def step_of_an_episode(tmp_path, last_tokens, steps):
    """Record an episode of two sequences with rewards of steps, in places of its last turn."""
    rng = np.random.default_rng(0)
    first = sequence_of([(3, True)], rng)
    turns = [(2, False), (2, True), (3, False), (last_tokens, True)]
    last = sequence_of(turns, rng, answered_ids=(1, 2))
    [stored] = store_groups(tmp_path / "spool", one_group([replace(last, earlier=(first,))]))
    scored = ScoredGroup(stored, {}, np.array([1.0]), (steps,))

    def decode(ids) -> str:
        return "abcdefgh"[: len(ids)]

    record_step(tmp_path / "step_000000", [scored], 1, StepFacts(domains=DOMAINS), decode)
    return SampleTable(tmp_path / "step_000000")


def test_a_step_reward_is_of_a_token_of_the_last_turn(tmp_path):
    table = step_of_an_episode(tmp_path, 3, ((1, 0.5), (3, 3.0)))
    batch = sample_batch(config(preset="grpo"), table)
    assert batch.events is not None
    # of 3 policy tokens before, 2 of an earlier turn, and these
    assert batch.events.end.tolist() == [5, 7]
    assert batch.events.sample.tolist() == [0, 0]


def test_a_step_reward_in_what_the_environment_said_is_of_the_token_before(tmp_path, monkeypatch):
    """As stores of earlier releases have them, whose places are of the whole text."""
    table = step_of_an_episode(tmp_path, 1, ((1, 3.0),))
    places = (np.ones(4, np.int64), np.array([0, 3, 5, 7]), np.array([0.5, 1.0, 2.0, 3.0]))
    monkeypatch.setattr(table, "steps", places)
    batch = sample_batch(config(preset="grpo"), table)
    assert batch.events is not None
    # of 3 policy tokens before, and 2 + 1 here: places 0 and 3 to 5, 5 and 7 of the response
    assert batch.events.end.tolist() == [2, 4, 4, 5]
    assert batch.events.sample.tolist() == [0, 0, 0, 0]


def test_tokens_of_spoilt_turns(tmp_path):
    rng = np.random.default_rng(0)
    one = sequence_of([(2, True), (1, False), (3, True)], rng, spoilt=[1])
    other = sequence_of([(2, True)], rng)
    table = recorded(tmp_path, one_group([one, other]))
    batch = sample_batch(config(preset="grpo"), table)
    assert batch.spoilt is not None
    assert batch.spoilt.tolist() == [False, False, True, True, True, False, False]
    assert table.spoilt_tokens(0).tolist() == batch.spoilt[:5].tolist()
    part = batch.subset(torch.tensor([1, 0]))
    assert part.spoilt is not None
    assert part.spoilt.tolist() == [False, False, False, False, True, True, True]
