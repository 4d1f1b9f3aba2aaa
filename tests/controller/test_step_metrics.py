"""Metrics of a batch."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.controller.rl_loop import idle_shares, refused_rows
from grpo_megatron.controller.sampling_metrics import by_domain, outcome_metrics, rollout_metrics
from grpo_megatron.controller.token_ages import staleness
from grpo_megatron.data.prompts import Splits
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    SamplingMask,
    ScoredGroup,
    VersionSpan,
)
from tests.controller.scored_groups import recipe
from tests.episodes import sequence_of


def scored(rewards: list[float], domain: str = "d", version: int = 0) -> ScoredGroup:
    completions = tuple(
        Completion(
            np.zeros(n + 1, np.int32),
            np.zeros(n + 1, np.float32),
            (VersionSpan(version, 0, n + 1),),
            "length" if n else "stop",
            "",
        )
        for n in range(len(rewards))
    )
    group = RolloutGroup(Prompt("p", domain, "", (1, 2), ""), completions, 0)
    values = np.array(rewards, float)
    return ScoredGroup(group, {"right": values}, values)


GROUPS = [scored([1, 0, 0, 0]), scored([1, 1, 1, 1]), scored([0, np.nan, 1, 0], "e")]


def test_rows_that_were_refused_because_of_their_images():
    name = "data/rows_refused_for_images"
    one = Splits({}, (), (), 0, {"a": 3})
    assert refused_rows(one) == {name: 3}
    several = Splits({}, (), (), 0, {"a": 3, "b": 0})
    assert refused_rows(several) == {name: 3, f"{name}@a": 3, f"{name}@b": 0}
    assert refused_rows(Splits({}, (), (), 0)) == {}


def test_metrics_of_truncated_sampling():
    completion = Completion(
        np.zeros(3, np.int32),
        np.zeros(3, np.float32),
        (),
        "stop",
        "",
        kept=SamplingMask(np.zeros(6, np.int32), np.array([0, 2, 2, 6])),
    )
    group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (completion,) * 2, 0)
    metrics = rollout_metrics([ScoredGroup(group, {}, np.zeros(2))])
    assert metrics["sampling_mask/size_mean"] == 3 and metrics["sampling_mask/missing"] == 2
    assert not any(name.startswith("sampling_mask") for name in rollout_metrics(GROUPS))


def test_metrics_of_a_batch():
    metrics = by_domain(rollout_metrics, GROUPS)
    assert metrics["reward/unscorable"] == 1
    assert metrics["reward/unscorable_fraction"] == 1 / metrics["batch/num_samples"] == 1 / 12
    np.testing.assert_allclose(metrics["reward/mean"], 6 / 11)
    np.testing.assert_allclose(metrics["reward/mean@e"], 1 / 3)
    assert metrics["group/all_equal_fraction"] == 1 / 3
    assert metrics["response/length_mean"] == 2.5
    assert metrics["response/truncated_fraction"] == 0.75
    of_one_domain = by_domain(rollout_metrics, GROUPS[:2])
    assert not any("@" in name for name in of_one_domain)


def test_staleness_is_a_share_of_tokens():
    """Lengths are 1, 2, 3."""
    groups = [
        scored([1, 0, 1], version=3),
        scored([1, 0, 1], version=5),
        scored([1], "e", version=5),
    ]
    assert by_domain(lambda part: staleness(part, 5), groups) == {
        "staleness/0": 7 / 13,
        "staleness/2": 6 / 13,
        "staleness/0@d": 0.5,
        "staleness/2@d": 0.5,
        "staleness/0@e": 1.0,
    }


def test_who_had_nothing_to_do():
    seconds = {"rollout": 6.0, "reward": 1.0, "train": 2.0, "publish": 0.5, "checkpoint": 0.5}
    roles = recipe().step_roles
    assert idle_shares(seconds, 10.0, roles) == pytest.approx(
        {"idle/trainer": 0.7, "idle/engines": 0.4, "idle/rewards": 0.9}
    )
    began_a_step_earlier = {"rollout": 12.0}
    assert idle_shares(began_a_step_earlier, 10.0, roles)["idle/engines"] == 0


@pytest.mark.parametrize(
    ("tables", "roles"),
    [
        ({"kind": "preferences"}, {"idle/trainer"}),
        ({"kind": "reward_model"}, {"idle/trainer"}),
        ({"kind": "sft"}, {"idle/trainer", "idle/rewards"}),
        ({"kind": "experience"}, {"idle/engines", "idle/rewards"}),
        ({"kind": "eval"}, set()),
    ],
)
def test_who_has_no_part_in_a_step_is_not_idle(tables, roles):
    config = recipe(**tables)
    assert set(idle_shares({"train": 2.0}, 10.0, config.step_roles)) == roles


def episode() -> Completion:
    """Two sequences, of two turns and of one, of which one is spoilt, by two versions."""
    rng = np.random.default_rng(0)
    spans = (VersionSpan(3, 0, 4), VersionSpan(4, 4, 6))
    first = sequence_of([(2, True), (3, False), (1, True)], rng, spoilt=[1], versions=spans)
    return replace(
        sequence_of([(3, True)], rng, versions=(VersionSpan(5, 0, 3),)), earlier=(first,)
    )


def test_metrics_of_episodes():
    plain = scored([1.0]).group.completions[0]  # of one token
    group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (episode(), plain), 0)
    values = np.array([1.0, 0.0])
    metrics = rollout_metrics([ScoredGroup(group, {"right": values}, values)])
    assert metrics["response/length_mean"] == (6 + 1) / 2
    assert metrics["batch/num_tokens"] == 7
    assert metrics["response/turns_mean"] == 3 / 2
    assert metrics["response/sequences_mean"] == 3 / 2
    assert metrics["response/environment_tokens_mean"] == 3 / 2
    assert metrics["response/spoilt_turn_fraction"] == 1 / 3
    assert "response/turns_mean" not in rollout_metrics(GROUPS)


def test_prompts_are_as_long_as_the_engine_read_them():
    """With what an environment put before the first turn, and not with what came later."""
    plain = scored([1.0]).group.completions[0]
    first = replace(episode().earlier[0], answered_ids=(1, 2, 3, 4, 5, 6))
    last = replace(episode(), answered_ids=(1,) * 20, earlier=(first,))
    groups = []
    for completions in ((plain, plain), (last, plain)):
        group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), completions, 0)
        groups.append(ScoredGroup(group, {}, np.zeros(2)))
    assert rollout_metrics(groups)["prompt/length_mean"] == (2 + (6 + 2) / 2) / 2


def test_what_environments_counted_is_averaged_by_domain():
    """Over the episodes that have it: not over completions without an environment."""
    groups = []
    for domain, counts in (("a", [{"calls": 2.0}, {"calls": 3.0, "errors": 1.0}, {}]), ("b", [{}])):
        completions = []
        for of_episode in counts:
            completions.append(replace(episode(), outcome_metrics=of_episode))
        group = RolloutGroup(Prompt("p", domain, "", (1, 2), ""), tuple(completions), 0)
        groups.append(ScoredGroup(group, {}, np.zeros(len(counts))))
    assert outcome_metrics(groups) == {
        "environment/a/calls_mean": 2.5,
        "environment/a/errors_mean": 1.0,
    }


def test_staleness_is_of_policy_tokens():
    """Of the environment's three tokens, two were read by the version of the turn before."""
    group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (episode(),), 0)
    values = np.array([1.0])
    found = staleness([ScoredGroup(group, {"right": values}, values)], 5)
    assert found == {"staleness/0": 3 / 6, "staleness/1": 1 / 6, "staleness/2": 2 / 6}
