"""The sampler: no repeats, exact shares, resumed equals uninterrupted."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from grpo_megatron.config.run import CurriculumConfig
from grpo_megatron.data.sampler import PromptSampler, turns_of_first_draw
from grpo_megatron.errors import DataError
from tests.data.made_prompts import prompt, prompts

SIZES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(8, 20), min_size=1)
BATCHES = st.lists(st.integers(0, 8), max_size=12)


def make(sizes: dict[str, int], seed: int = 0, weights: dict[str, float] | None = None):
    train = {name: prompts(size, name) for name, size in sizes.items()}
    return PromptSampler(train, weights or dict.fromkeys(sizes, 1.0), seed)


def ids(batch) -> list[str]:
    return [p.prompt_id for p in batch]


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, batches=BATCHES, cut=st.integers(0, 12), seed=st.integers(0, 5))
def test_resumed_equals_uninterrupted(sizes, batches, cut, seed):
    whole, first, second = make(sizes, seed), make(sizes, seed), make(sizes, seed)
    expected = [ids(whole.draw(n)) for n in batches]
    found = [ids(first.draw(n)) for n in batches[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [ids(second.draw(n)) for n in batches[cut:]]
    assert found == expected
    assert whole.state_dict() == (second if batches[cut:] else whole).state_dict()


@settings(max_examples=60, deadline=None)
@given(size=st.integers(8, 20), batches=BATCHES, seed=st.integers(0, 5))
def test_an_epoch_has_every_prompt_once_and_a_batch_no_prompt_twice(size, batches, seed):
    sampler, drawn = make({"a": size}, seed), []
    for n in batches:
        batch = ids(sampler.draw(n))
        assert len(set(batch)) == n
        drawn += batch
    for start in range(0, len(drawn), size):
        epoch = drawn[start : start + size]
        assert len(set(epoch)) == len(epoch)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 3), min_size=1, max_size=36),
    batches=st.lists(st.integers(0, 20), max_size=8),
)
def test_shares_stay_close_to_the_weights(weights, batches):
    by_name = {f"d{number}": weight for number, weight in enumerate(weights)}
    sampler = make(dict.fromkeys(by_name, 200), weights=by_name)
    # The j domains that are furthest behind are so by A_j in sum. A turn of another domain, which
    # was no less behind than they, leaves A_j at most (A_{j+1} + 1) j / (j + 1); A_k is 0.
    most_behind = sum(1 / number for number in range(2, len(weights) + 1))
    drawn: list[str] = []
    for n in batches:
        drawn += [p.domain for p in sampler.draw(n)]
        for name, weight in by_name.items():
            ahead = drawn.count(name) - len(drawn) * weight / sum(weights)
            assert -most_behind - 1e-9 <= ahead < 1


def test_the_order_does_not_depend_on_the_order_of_the_data():
    shuffled = prompts(30)
    random.Random(1).shuffle(shuffled)
    one, other = (
        PromptSampler({"addition": p}, {"addition": 1.0}, 3) for p in (prompts(30), shuffled)
    )
    assert ids(one.draw(30)) == ids(other.draw(30))


def test_seeds_and_epochs_shuffle_differently():
    sampler = make({"a": 30})
    epochs = [ids(sampler.draw(30)) for _ in range(2)]
    assert epochs[0] != epochs[1] and sorted(epochs[0]) == sorted(epochs[1])
    assert ids(make({"a": 30}, seed=1).draw(30)) != epochs[0]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: make({"a": 9}), ["10 prompts", "9 prompts"]),
        (lambda: make({"b": 10}), ["has a,", "has b"]),
        (lambda: make({"a": 10}, seed=4), ["seed", "has 0,", "has 4"]),
        (lambda: make({"a": 10}, weights={"a": 2.0}), ["weight", "1.0", "2.0"]),
        (
            lambda: PromptSampler(
                {"a": [*prompts(9, "a"), prompt("9", "a", answer="2")]}, {"a": 1.0}, 0
            ),
            ["10 prompts", "fingerprint"],
        ),
    ],
)
def test_a_state_of_other_data_is_refused_and_changes_nothing(other, words):
    sampler = other()
    before = sampler.state_dict()
    with pytest.raises(DataError) as caught:
        sampler.load_state_dict(make({"a": 10}).state_dict())
    for word in words:
        assert word in str(caught.value)
    assert sampler.state_dict() == before


def test_a_batch_larger_than_the_domain_is_refused():
    with pytest.raises(DataError, match="has 4 training prompts, but one batch asks for 5"):
        make({"a": 4}).draw(5)


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(8, 12),
    seed=st.integers(0, 5),
    rounds=st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=4), max_size=6),
    carry=st.integers(0, 3),
)
def test_further_draws_of_a_step_never_repeat_a_prompt(size, seed, rounds, carry):
    sampler, had = make({"a": size, "b": size}, seed), []
    for counts in rounds:
        had = had[:carry]  # surplus of the step before
        for n in counts:
            batch = ids(sampler.draw(n, had))
            assert len(batch) <= n and not set(batch) & set(had)
            had += batch
            assert len(set(had)) == len(had)


def test_a_domain_gives_what_it_has_beside_the_excluded():
    sampler = make({"a": 4})
    had = ids(sampler.draw(3))
    assert len(rest := ids(sampler.draw(9, had))) == 1
    assert sampler.draw(9, had + rest) == []
    assert len(sampler.draw(9, ())) == 4


DRAWS = st.lists(st.integers(0, 12), min_size=1, max_size=4)
STEPS = st.lists(DRAWS, max_size=6)


def draw_step(sampler: PromptSampler, counts: list[int]) -> list[str]:
    """Ids of what a step draws with refills."""
    found: list[str] = []
    for n in counts:
        found += ids(sampler.draw(n, found))
    return found


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4),
    weights=st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
    steps=STEPS,
)
def test_a_step_lacks_prompts_only_where_it_has_had_all(sizes, weights, steps):
    names = [f"d{number}" for number in range(len(sizes))]
    sampler = make(
        dict(zip(names, sizes, strict=True)), weights=dict(zip(names, weights, strict=False))
    )
    for counts in steps:
        had: list[str] = []
        for n in counts:
            batch = ids(sampler.draw(n, had))
            assert len(batch) == min(n, sum(sizes) - len(had))
            had += batch
            assert len(set(had)) == len(had)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=3, max_size=3).filter(any),
    steps=STEPS,
)
@example(weights=[1.0, 0.0, 0.0], steps=[[6, 4, 4], [3]])
def test_domains_without_a_weight_have_no_turns_also_where_the_others_run_out(weights, steps):
    by_name = dict(zip(["a", "b", "c"], weights, strict=True))
    sampler = make(dict.fromkeys(by_name, 6), weights=by_name)
    weighted = {name for name, weight in by_name.items() if weight > 0}
    for counts in steps:
        had: list[str] = []
        for n in counts:
            batch = sampler.draw(n, had)
            assert {p.domain for p in batch} <= weighted
            assert len(batch) == min(n, 6 * len(weighted) - len(had))
            had += ids(batch)


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, cut=st.integers(0, 6), curriculum=st.booleans())
def test_resumed_equals_uninterrupted_where_a_domain_runs_out(steps, cut, curriculum):
    def sampler() -> PromptSampler:
        train = {"small": prompts(3, "small"), "large": prompts(40, "large")}
        settings_of = CurriculumConfig() if curriculum else None
        return PromptSampler(train, {"small": 1.0, "large": 0.7}, 0, settings_of)

    whole, first, second = sampler(), sampler(), sampler()
    expected = [draw_step(whole, counts) for counts in steps]
    found = [draw_step(first, counts) for counts in steps[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    found += [draw_step(second, counts) for counts in steps[cut:]]
    assert found == expected


def test_the_turns_of_a_domain_that_runs_out_go_to_the_others_by_weight():
    sampler = make({"a": 4, "b": 200, "c": 200}, weights={"a": 2.0, "b": 1.0, "c": 3.0})
    found = draw_step(sampler, [6, 6, 16, 16])
    by_domain = Counter(name.split("-")[0] for name in found)
    assert by_domain == {"a": 4, "b": 10, "c": 30}


def test_a_domain_makes_up_for_no_turns_that_it_missed():
    sampler = make({"small": 10, "large": 5000})
    for _ in range(20):
        draw_step(sampler, [16] * 5)
    # so few that it does not run out: both have their share, from the first prompt on
    batch = [p.domain for p in sampler.draw(8, ())]
    assert batch.count("small") == 4
    state = sampler.state_dict()
    had = state["num_drawn"]["small"] + state["num_passed"]["small"]
    assert abs(had - state["num_drawn"]["large"]) <= 1
    assert state["num_passed"]["large"] == 0


def test_a_domain_of_hardly_any_weight_takes_the_turns_that_are_left():
    sampler = make({"a": 4, "b": 50}, weights={"a": 1.0, "b": 1e-9})
    for _ in range(3):
        found = draw_step(sampler, [3, 5, 8])
        assert sum(name.startswith("b") for name in found) == 12


@settings(max_examples=100, deadline=None)
@given(
    weights=st.lists(st.floats(0.1, 3), min_size=1, max_size=5),
    steps=STEPS,
)
def test_turns_with_refills_are_those_without_where_no_domain_runs_out(weights, steps):
    by_name = {f"d{number}": weight for number, weight in enumerate(weights)}
    refilled = make(dict.fromkeys(by_name, 60), weights=by_name)
    whole = make(dict.fromkeys(by_name, 60), weights=by_name)
    for counts in steps:
        had: list[str] = []
        for n in counts:
            batch = refilled.draw(n, had)
            had += ids(batch)
            assert [p.domain for p in batch] == [p.domain for p in whole.draw(n)]
    assert set(refilled.state_dict()["num_passed"].values()) == {0}


@pytest.mark.parametrize(
    ("curriculum", "digest"),
    [
        (None, "d572de662f2dfa2d50de803d62b8ce5b1a61a2ab0ccf12b0c578b6ac7f245462"),
        (CurriculumConfig(), "a42d07480e3484eb9db72feb1ba456a7296d92e8981d7e73d04edc4f8653fa92"),
    ],
)
def test_draws_of_recorded_runs_stay_the_same(curriculum, digest):
    """Digests of what samplers drew before domains that run out were out of the turns."""
    weights = {"a": 1.0, "b": 0.3, "c": 2.2}
    train = {"a": prompts(40, "a"), "b": prompts(25, "b"), "c": prompts(60, "c")}
    sampler = PromptSampler(train, weights, 7, curriculum)
    found: list[str] = []
    for _ in range(12):
        found += draw_step(sampler, [9, 5, 3])
        found += ids(sampler.draw(6))
    assert hashlib.sha256("\n".join(found).encode()).hexdigest() == digest


def test_a_state_of_an_older_version_goes_on():
    whole, resumed = make({"a": 20, "b": 20}), make({"a": 20, "b": 20})
    draw_step(whole, [5, 4])
    state = whole.state_dict()
    del state["num_passed"]
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert draw_step(resumed, [7, 3]) == draw_step(whole, [7, 3])
    assert resumed.state_dict() == whole.state_dict()


@pytest.mark.parametrize("n", [1, 4, 7, 18])
def test_turns_of_the_first_draw_are_those_of_the_sampler(n):
    weights = {"a": 1.0, "b": 2.5, "c": 0.0, "d": 0.3}
    drawn = make(dict.fromkeys(weights, 20), weights=weights).draw(n)
    assert +turns_of_first_draw(weights, n) == Counter(prompt.domain for prompt in drawn)
