"""The sampler: no repeats, exact shares, resumed equals uninterrupted."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.data.sampler import PromptSampler
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
    weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 3), min_size=1),
    batches=st.lists(st.integers(0, 20), max_size=6),
)
def test_shares_stay_within_one_prompt_of_the_weights(weights, batches):
    sampler = make(dict.fromkeys(weights, 200), weights=weights)
    drawn: list[str] = []
    for n in batches:
        drawn += [p.domain for p in sampler.draw(n)]
        for name, weight in weights.items():
            share = len(drawn) * weight / sum(weights.values())
            assert abs(drawn.count(name) - share) <= len(weights)


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
