"""Which groups are kept, which samples are trained, and what is counted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.sampling_metrics import by_domain
from grpo_megatron.controller.token_ages import without_tokens_before
from grpo_megatron.types import Prompt, RolloutGroup, ScoredGroup
from tests.controller.scored_groups import REWARD, group, recipe, stored
from tests.episodes import sequence_of

NAN = np.nan


def keeps(scored, **sampling) -> bool:
    return GroupFilter(recipe(sampling=sampling)).keeps(scored)


@pytest.mark.parametrize(
    "scored",
    [group([1, 1]), group([0, 0]), group([NAN, NAN]), group([1]), group([0, 1], truncated=[0, 1])],
)
def test_the_default_keeps_everything_untouched(scored):
    selection = GroupFilter(recipe())
    assert selection.keeps(scored)
    assert selection.with_statistics(scored) is scored


@pytest.mark.parametrize(
    ("right", "kept"),
    [
        ([1, 0], True),
        ([1, 1], False),
        ([0, 0], False),
        ([1], False),
        ([0], False),
        ([NAN, NAN], False),
        ([1, NAN], False),
        ([0, NAN], False),
        ([1, 0, NAN], True),
        ([1 - 1e-10, 1], False),
        ([1 - 1e-6, 1], True),
    ],
)
def test_dynamic_sampling_needs_a_correct_and_an_incorrect_completion(right, kept):
    assert keeps(group(right), dynamic=True) is kept


def test_dynamic_sampling_looks_at_accuracy_not_at_the_sum():
    shaped = group([1, 1], short=[0, -0.5])  # all right, rewards differ
    assert not keeps(shaped, dynamic=True)
    assert keeps(group([1, 0], short=[0, 1]), dynamic=True)  # equal sums
    other = GroupFilter(
        recipe(d={"accuracy": "short", "accuracy_threshold": 0.0}, sampling={"dynamic": True})
    )
    assert other.keeps(shaped)
    np.testing.assert_array_equal(other.correct(shaped), [1, 0])


def test_zero_variance_groups_can_be_left_out():
    assert not keeps(group([1, 1, NAN]), zero_variance="drop")
    assert not keeps(group([1, 0], short=[0, 1]), zero_variance="drop")
    assert not keeps(group([NAN, NAN]), zero_variance="drop")
    assert keeps(group([1, 1], short=[0, 1]), zero_variance="drop")


def drops(scored, **objective) -> bool:
    config = recipe(sampling={"zero_variance": "drop"}, objective=objective)
    return not GroupFilter(config).keeps(scored)


def test_components_that_differ_where_their_sum_does_not_are_a_signal():
    names = ("right", "short", "polite")
    rewards = [{"function": REWARD, "name": name} for name in names]
    components = {
        "right": np.array([1, 0, 0.0]),
        "short": np.array([0, 1, 0.5]),
        "polite": np.array([0, 0, 0.5]),
    }
    equal_sums = replace(group([1, 1, 1]), components=components)
    for preset, dropped in (("grpo", True), ("mo_grpo", False)):
        config = recipe(
            d={"rewards": rewards}, sampling={"zero_variance": "drop"}, objective={"preset": preset}
        )
        assert GroupFilter(config).keeps(equal_sums) is not dropped


def test_a_group_of_one_is_a_signal_for_a_baseline_of_the_batch():
    assert drops(group([1]), preset="grpo")
    assert not drops(group([1]), preset="reinforce_pp")
    assert not drops(group([0, 0]), preset="reinforce_pp")
    assert drops(group([NAN]), preset="reinforce_pp")


def test_lengths_of_right_answers_are_a_signal_where_they_may_be_paid_for():
    assert not drops(group([1, 1]), preset="grpo_lambda_length")  # of 1 and 2 tokens
    assert drops(group([0, 0]), preset="grpo_lambda_length")


def test_steps_that_differ_where_their_sum_does_not_are_a_signal():
    steps = (((3, 1.0), (9, 0.0)), ((3, 0.0), (9, 1.0)))
    equal_sums = replace(group([1, 1], lengths=(2, 2)), steps=steps)
    assert not drops(equal_sums, preset="deepseekmath_process")
    same = replace(equal_sums, steps=(steps[0], steps[0]))
    assert not drops(same, preset="deepseekmath_process")  # steps within a sample differ
    flat = replace(equal_sums, steps=(((3, 1.0),), ((3, 1.0),)))
    assert drops(flat, preset="deepseekmath_process")


def test_a_group_without_any_step_is_no_signal_for_process_rewards():
    assert drops(group([1, 0]), preset="deepseekmath_process")


def test_whitening_over_tokens_moves_groups_without_spread_too():
    assert not drops(group([1, 1]), preset="reinforce_pp_baseline")


def test_a_kl_without_a_weight_is_no_signal():
    kl = {"preset": "grpo", "kl": "reward_k1"}
    assert drops(group([1, 1]), **kl, kl_beta=0.0)
    assert not drops(group([1, 1]), **kl, kl_beta=0.1)


def test_pass_at_k_has_no_signal_where_every_set_of_k_has_a_right_answer():
    almost_all = group([1, 1, 1, 0])
    assert drops(almost_all, advantage="passk", passk_k=2)
    assert not drops(group([1, 0, 0, 0]), advantage="passk", passk_k=2)


@pytest.mark.parametrize("kind", ["sft", "distil"])
def test_what_has_no_rewards_trains_everything(kind):
    other = {
        "sampling": {"zero_variance": "drop", "dynamic": True},
        "kind": kind,
        "objective": {"overlong": "loss"},
    }
    assert GroupFilter(recipe(**other)).keeps(group([0, 0], truncated=[0, 1]))


def test_overlong_loss_keeps_the_reward_in_group_statistics():
    selection = GroupFilter(recipe(objective={"overlong": "loss"}))
    scored = group([1, 0, 1], truncated=[1])
    assert selection.with_statistics(scored) is scored
    assert not selection.keeps(group([1, 0], truncated=[0, 1]))  # nothing to train


def test_overlong_drop_unscores_truncated_samples():
    settings = {"sampling": {"dynamic": True}, "objective": {"overlong": "drop"}}
    selection = GroupFilter(recipe(**settings))
    scored = group([1, 0, 1], truncated=[1])
    seen = selection.with_statistics(scored)
    np.testing.assert_array_equal(seen.rewards, [1, NAN, 1])
    np.testing.assert_array_equal(seen.components["right"], [1, NAN, 1])
    assert not selection.keeps(scored)  # the only incorrect one does not count
    settings["objective"] = {"overlong": "loss"}
    assert GroupFilter(recipe(**settings)).keeps(scored)
    np.testing.assert_array_equal(scored.rewards, [1, 0, 1])


def test_groups_with_older_tokens_are_found():
    groups = [group([1], version=version) for version in (3, 4, 5)]
    assert without_tokens_before(groups, 4) == groups[1:]


def test_metrics_by_domain():
    config = recipe(("d", "e"), sampling={"dynamic": True})
    groups = [
        group([1, 0, 0, 0]),
        group([1, 1, 1, 1]),
        group([0, NAN, 0, 0], domain="e"),
        group([NAN, NAN, NAN, NAN], domain="e"),
    ]
    metrics = by_domain(GroupFilter(config).metrics, groups)
    assert metrics["sampling/acceptance_rate"] == 1 / 4
    assert metrics["sampling/acceptance_rate@d"] == 1 / 2
    assert metrics["group/all_correct_fraction"] == metrics["group/all_wrong_fraction"] == 1 / 3
    assert metrics["group/all_wrong_fraction@e"] == 1
    assert metrics["accuracy/pass_at_1"] == pytest.approx(1.25 / 3)
    assert metrics["accuracy/pass_at_group"] == pytest.approx(2 / 3)
    assert metrics["response/length_correct_mean"] == 11 / 5
    assert metrics["response/length_incorrect_mean"] == (2 + 3 + 4 + 1 + 3 + 4) / 6
    assert metrics["response/length_p95"] == 4
    assert "response/length_correct_mean@e" not in metrics  # nothing was correct
    assert all(math.isfinite(value) for value in metrics.values())
    assert not any("@" in name for name in by_domain(GroupFilter(config).metrics, groups[:2]))


def test_groups_without_a_score_have_lengths_only():
    metrics = GroupFilter(recipe()).metrics([group([NAN])])
    assert metrics == {"response/length_p95": 1.0, "sampling/acceptance_rate": 1.0}


def episodes_of(turns: list[list[tuple[float, str]]]) -> ScoredGroup:
    """Of equal rewards; turns of two tokens with these rewards and states."""
    rng = np.random.default_rng(0)
    completions = []
    for of_episode in turns:
        pieces = [piece for _ in of_episode for piece in ((2, True), (1, False))]
        rewards = [reward for reward, _ in of_episode]
        states = [state for _, state in of_episode]
        completions.append(sequence_of(pieces, rng, rewards=rewards, states=states))
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), tuple(completions), 0)
    values = np.zeros(len(completions))
    return ScoredGroup(group, {"right": values, "short": values}, values)


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([[(0.0, "s"), (1.0, "t")], [(0.0, "s"), (0.0, "t")]], True),
        ([[(0.0, "s"), (1.0, "t")], [(0.0, "s"), (1.0, "t")]], False),
        ([[(0.0, "s"), (1.0, "t")], [(0.0, "u")]], False),  # nobody else was there
        ([[(0.0, ""), (1.0, "")], [(0.0, ""), (0.0, "")]], False),
    ],
)
def test_gigpo_has_a_signal_where_turns_from_one_state_differ(turns, kept):
    objective = {"preset": "gigpo"}
    selection = GroupFilter(recipe(objective=objective, sampling={"zero_variance": "drop"}))
    assert selection.keeps(episodes_of(turns)) is kept


def test_an_episode_of_several_sequences_is_not_aided(tmp_path):
    """That a template rewrote its history is no help, though it answers other tokens."""
    scored = episodes_of([[(0.0, "s")], [(1.0, "s")]])
    first, second = scored.group.completions
    later = replace(second, answered_ids=(1, 9, 9), earlier=(first,))
    group = replace(scored.group, completions=(first, later))
    [found] = stored(tmp_path / "spool", [replace(scored, group=group)])
    assert found.group.completions[1].prompt_ids(found.group.prompt) == (1, 9, 9)
    assert not np.isnan(GroupFilter(recipe()).unaided(found)).any()
