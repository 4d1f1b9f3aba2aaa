"""Splits: disjoint by text, exact sizes, independent of order."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.data.prompts import make_splits, share
from grpo_megatron.errors import DataError
from tests.data.made_prompts import prompt, prompts


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    heldout=st.integers(0, 40),
    validation=st.integers(0, 40),
    order=st.randoms(use_true_random=False),
    repeat=st.integers(0, 3),
)
def test_splits_are_exact_disjoint_and_complete(sizes, heldout, validation, order, repeat):
    population = [p for i, size in enumerate(sizes) for p in prompts(size, f"d{i}")]
    shuffled = population + population[:repeat]
    order.shuffle(shuffled)
    try:
        splits = make_splits(shuffled, num_heldout=heldout, num_validation=validation)
    except DataError:
        found = {f"d{i}": size for i, size in enumerate(sizes) if size}
        taken = [share(number, found) for number in (heldout, validation)] if found else []
        assert not found or any(
            size <= sum(part[name] for part in taken) for name, size in found.items()
        )
        return
    train = [p for members in splits.train.values() for p in members]
    texts = [{p.text for p in split} for split in (train, splits.validation, splits.heldout)]
    assert [len(t) for t in texts[1:]] == [validation, heldout]
    assert sum(map(len, texts)) == len(set.union(*texts)) == len({p.text for p in population})
    assert splits.num_duplicates == len(shuffled) - len({p.text for p in population})
    again = make_splits(
        sorted(shuffled, key=lambda p: p.domain), num_heldout=heldout, num_validation=validation
    )
    assert {p.text for p in again.heldout} == texts[2]
    assert dict(again.train) == dict(splits.train)


@given(
    total=st.integers(0, 500),
    sizes=st.dictionaries(st.text(max_size=2), st.integers(1, 99), min_size=1, max_size=6),
)
def test_shares_sum_to_the_total_and_follow_the_sizes(total, sizes):
    parts = share(total, sizes)
    assert sum(parts.values()) == total
    if total >= len(sizes):
        assert min(parts.values()) >= 1
    ordered = sorted(sizes, key=lambda name: sizes[name])
    assert all(parts[a] <= parts[b] + 1 for a, b in itertools.pairwise(ordered))


def test_growing_the_source_moves_no_prompt_from_training_into_an_earlier_position():
    small = make_splits(prompts(100), num_heldout=20, num_validation=0)
    order = [p.text for p in (*small.heldout, *small.train["addition"])]
    large = make_splits(prompts(150), num_heldout=20, num_validation=0)
    larger = [p.text for p in (*large.heldout, *large.train["addition"])]
    assert [text for text in larger if text in set(order)] == order


def test_the_first_of_equal_texts_wins_over_domains():
    first, second = prompt("x", "a", answer="1"), prompt("x", "b", answer="2")
    second = dataclasses.replace(second, text=first.text)
    splits = make_splits([first, second, prompt("y", "b")], num_heldout=0, num_validation=0)
    assert splits.train["a"] == (first,) and [p.prompt_id for p in splits.train["b"]] == ["b-y"]
    assert splits.num_duplicates == 1


@pytest.mark.parametrize(("num_own", "num_heldout"), [(0, 0), (1, 9)])
def test_a_domain_whose_prompts_an_earlier_one_has_is_told_which(num_own, num_heldout):
    """More problems of it would not help."""
    ours = prompts(8)
    same = [dataclasses.replace(each, domain="again") for each in ours]
    own = [prompt(f"own {number}", "again") for number in range(num_own)]
    with pytest.raises(DataError) as caught:
        make_splits([*ours, *same, *own], num_heldout=num_heldout, num_validation=0)
    told = str(caught.value)
    assert f"8 of the {8 + num_own} distinct prompts of domain 'again' are those of" in told
    assert "'addition', which comes first" in told and "num_problems" not in told


@pytest.mark.parametrize("heldout, validation", [(10, 0), (5, 5), (100, 0)])
def test_too_few_problems_names_the_numbers_and_the_remedy(heldout, validation):
    with pytest.raises(DataError) as caught:
        make_splits(prompts(10), num_heldout=heldout, num_validation=validation)
    told = str(caught.value)
    for word in (
        "'addition'",
        "10 distinct",
        f"{heldout} held-out",
        "num_problems",
        f"{validation} validation",
    ):
        assert word in told


def test_no_prompts_at_all():
    with pytest.raises(DataError, match="no prompts"):
        make_splits([], num_heldout=0, num_validation=0)
