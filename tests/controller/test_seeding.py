"""Exemplars: which are remembered and chosen, what a seeded prompt says, what is trained of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.layouts import fill
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.controller.exemplars import Exemplar, ExemplarStore, similarity, trigrams
from grpo_megatron.controller.group_filter import GroupFilter
from grpo_megatron.controller.seeding import Seeding
from grpo_megatron.data.chat_template import read_chat_template
from grpo_megatron.data.prompts import tokenised
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem
from tests.controller.character_texts import answered, asked, characters, text_of
from tests.controller.loops import Crash, Loop
from tests.controller.scored_groups import REWARD, group, recipe
from tests.data.chat_templates import write_tokenizer

ALLOCATION = {"base_samples_per_prompt": 2, "samples_per_round": 4, "bonus": 9.0}
SEEDING = {"num_exemplars": 2, "exemplar": "Q{question}A{answer};", "question": "Q{question}A"}


def numbered(names) -> list[Exemplar]:
    return [Exemplar(name, f"question {name}", f"answer {name}") for name in names]


# --- the store


def test_the_oldest_exemplar_goes_and_a_newer_one_of_a_prompt_replaces_it():
    store = ExemplarStore(2)
    for exemplar in [*numbered("aba"), Exemplar("c", "x", "y")]:
        store.remember("d", exemplar)
    store.remember("other", numbered("z")[0])
    found = store.similar("d", "none", "question", 9)
    assert [exemplar.prompt_id for exemplar in found] == ["a", "c"]  # b was the oldest
    assert len(store) == 3 and store.similar("unknown", "", "", 9) == []


def test_the_most_similar_questions_come_first_and_never_the_own_one():
    store = ExemplarStore(9)
    questions = ["area of a circle", "area of a square", "sum of two primes", "area of a circles"]
    for number, question in enumerate(questions):
        store.remember("d", Exemplar(str(number), question, ""))
    found = store.similar("d", "3", "Area of a circle?", 2)
    assert [exemplar.prompt_id for exemplar in found] == ["0", "1"]


def test_among_equally_similar_ones_the_newest_comes_first():
    store = ExemplarStore(9)
    for name in "abc":
        store.remember("d", Exemplar(name, "same", ""))
    assert [e.prompt_id for e in store.similar("d", "", "same", 2)] == ["c", "b"]


@given(first=st.text(max_size=12), second=st.text(max_size=12))
def test_similarity_is_symmetric_and_one_of_a_text_with_itself(first, second):
    found = similarity(trigrams(first), trigrams(second))
    assert 0 <= found <= 1 and found == similarity(trigrams(second), trigrams(first))
    assert similarity(trigrams(first), trigrams(first)) == 1


def test_the_state_holds_exemplars_in_their_order():
    store = ExemplarStore(3)
    for exemplar in numbered("abcd"):
        store.remember("d", exemplar)
    store.remember("e", Exemplar("ü", "\\boxed{1}", "雪\n"))
    copy = ExemplarStore(3)
    copy.load_state_dict(store.state_dict())
    assert copy.state_dict() == store.state_dict() and len(copy) == 4
    smaller = ExemplarStore(1)
    smaller.load_state_dict(store.state_dict())
    assert [e.prompt_id for e in smaller.similar("d", "", "", 9)] == ["d"]


def test_layouts_take_texts_as_they_are():
    values = {"question": "{answer}", "answer": "{question}"}
    assert fill("{question}|{answer} \\boxed{}", values) == ("{answer}|{question} \\boxed{}")


# --- seeded prompts


def seeding_of(tokenizer=None, domain=None, rollout=None, **settings) -> Seeding:
    config = recipe(
        d=domain or {},
        rollout={"max_model_len": 80, "max_new_tokens": 20} | (rollout or {}),
        allocation=ALLOCATION,
        seeding=SEEDING | settings,
    )
    return Seeding(
        config,
        config.seeding,
        exemplars=ExemplarStore(config.seeding.store_size),
        group_filter=GroupFilter(config),
        tokenizer=tokenizer or characters(),
    )


def test_a_seeded_prompt_has_solved_questions_before_its_own():
    seeding = seeding_of(domain={"template": "<{question}>"})
    seeding.finish_step(
        [
            answered("2+3", ["long way: 5", "7", " 5 "], [1, 0, 1]),
            answered("2+35", ["37"], [1]),
            answered("99", ["x"], [0]),
            answered("abc", ["d"], [1]),
        ]
    )
    prompt = asked("2+34")
    found = seeding.seeded(prompt)
    assert text_of(found) == "<Q2+3A5;Q2+35A37;Q2+34A>"
    assert replace(found, token_ids=prompt.token_ids) == prompt
    assert seeding.finish_step([])["seeding/store_size"] == 3


def test_what_is_remembered_is_short_whole_and_can_be_written():
    seeding = seeding_of(max_answer_tokens=4)
    seeding.finish_step(
        [
            answered("cut", ["5"], [1], truncated=[0]),
            answered("long", ["12345"], [1]),
            answered("empty", ["  "], [1]),
            answered("odd", ["a@"], [1]),
            answered("second", ["12345", "1234", "@"], [1, 1, 1]),
            answered("unscored", ["1"], [np.nan]),
        ]
    )
    assert text_of(seeding.seeded(asked("?"))) == "QsecondA1234;Q?A"


def test_an_answer_begins_with_what_its_prompt_had_opened():
    seeding = seeding_of(domain={"template": "{question}<think>\n"})
    solved = answered("2+3", ["so</think>5"], [1])
    opened = replace(solved.group.prompt, text="2+3<think>\n")
    seeding.finish_step([replace(solved, group=replace(solved.group, prompt=opened))])
    text = text_of(seeding.seeded(asked("9")))
    assert text == "Q2+3A<think>\nso</think>5;Q9A<think>\n"


@pytest.mark.parametrize(
    ("max_model_len", "text", "counted"),
    [
        (42, "Q11A2;Q12A3;Q13A4;Q1A", {}),
        (41, "Q11A2;Q12A3;Q13A4;Q1A", {}),
        (40, "Q11A2;Q12A3;Q1A", {"seeding/shortened": 1}),
        (29, "Q11A2;Q1A", {"seeding/shortened": 1}),
        (28, "1", {"seeding/no_room": 1}),
    ],
)
def test_fewer_exemplars_are_taken_where_all_do_not_fit(max_model_len, text, counted):
    seeding = seeding_of(num_exemplars=3, rollout={"max_model_len": max_model_len})
    solved = [("13", "4"), ("12", "3"), ("11", "2")]
    seeding.finish_step([answered(question, [answer], [1]) for question, answer in solved])
    assert text_of(seeding.seeded(asked("1"))) == text
    metrics = seeding.finish_step([])
    for name in ("seeding/shortened", "seeding/no_room", "seeding/no_exemplars"):
        assert metrics[name] == counted.get(name, 0)


def test_without_exemplars_a_prompt_stays_as_it_is():
    seeding = seeding_of()
    assert seeding.seeded(asked("1")) == asked("1")
    assert seeding.finish_step([])["seeding/no_exemplars"] == 1


@pytest.mark.parametrize(
    ("right", "wanted"), [([0, 0], True), ([0, 1], False), ([np.nan, 0], True), ([np.nan], False)]
)
def test_a_prompt_is_seeded_when_nothing_of_it_is_right(right, wanted):
    assert seeding_of().is_wanted(group(right)) is wanted


@pytest.mark.parametrize("field", ["exemplar", "question"])
def test_layouts_that_the_tokenizer_cannot_write_are_refused_at_once(field):
    layout = {"exemplar": "@{question}{answer}", "question": "@{question}"}[field]
    with pytest.raises(DataError) as caught:
        seeding_of(**{field: layout})
    assert caught.value.where == f"seeding.{field}"


def test_the_chat_template_gets_exemplars_within_the_users_turn(tmp_path):
    tokenizer: TextTokenizer = load_tokenizer(write_tokenizer(tmp_path, "qwen"))
    fields = {"template": "chat", "question_template": "Solve: {question}", "system_prompt": "Be."}
    seeding = seeding_of(
        tokenizer=tokenizer,
        domain=fields,
        rollout={"max_model_len": 4000, "max_new_tokens": 20},
        exemplar="{question} = {answer}. ",
        question="Now {question}",
    )
    reward = {"function": REWARD}
    domain = DomainConfig(name="d", source="reasoning_gym", rewards=[reward], **fields)
    (solved,) = [answered("2 + 3", ["5"], [1])]
    seeding.finish_step([solved])
    (prompt,) = tokenised(domain, [Problem("2 + 4", "6")], tokenizer)
    found = seeding.seeded(prompt)
    messages = [
        {"role": "system", "content": "Be."},
        {"role": "user", "content": "2 + 3 = 5. Now Solve: 2 + 4"},
    ]
    expected = read_chat_template(tmp_path).render(messages, {})
    assert list(found.token_ids) == tokenizer.encode(expected)
    assert found.text == prompt.text and found.metadata == prompt.metadata


# --- through the loop


def rarely(step, prompt, sample):
    """Base samples of even prompts are wrong; what comes later, and odd prompts, may be right."""
    number = int(prompt.prompt_id[1:])
    if number % 2 == 0:
        return float(sample >= 2 and number % 4 == 0)
    return float(sample % 2)


def make(root, crash_at=None, **tables) -> Loop:
    tables = {
        "num_steps": 4,
        "checkpoint": {"interval": 2},
        "allocation": ALLOCATION,
        "seeding": SEEDING,
        "rollout": {"max_model_len": 300, "max_new_tokens": 20},
        **tables,
    }
    loop = Loop(root, recipe(("p",), **tables), answer=rarely, num_prompts=16, crash_at=crash_at)
    for domain, prompts in loop.prompts.items():
        loop.prompts[domain] = [replace(p, question=p.text) for p in prompts]
    loop.written = lambda place, completion: replace(
        completion, text="yes" if place % 2 else "it is so", finish_reason="stop"
    )
    return loop


def test_later_samples_of_a_wrong_prompt_are_trained_on_the_seeded_one(tmp_path):
    loop = make(tmp_path)
    loop.run()
    records = loop.metrics()
    assert records[0]["seeding/prompts"] == 0  # nothing was solved before
    assert sum(record["seeding/prompts"] for record in records[1:]) > 0
    for record, (_, table) in zip(records, loop.trained, strict=True):
        seeded = 0
        for number in range(4):
            rows = np.flatnonzero(table.group == number)
            contexts = [table.prompt_ids(row).tolist() for row in rows]
            assert contexts[:2] == [[1, 2]] * 2  # the base
            texts = {"".join(map(chr, context)) for context in contexts[2:] if context != [1, 2]}
            assert len(texts) <= 1  # one seeded prompt a step
            for text in texts:
                seeded += 1
                assert len([c for c in contexts[2:] if c == [1, 2]]) == 0
                assert text.startswith("Qp") and text.count(";") == 2
                own = text.rsplit("Q", 1)[1].removesuffix("A")
                assert f"Q{own}A" not in text.rpartition(";")[0] + ";"
        assert seeded == record["seeding/prompts"]
        if seeded:
            assert 0 <= record["seeding/solved_fraction"] <= 1
            assert record["seeding/samples"] >= seeded


def test_accuracy_and_curriculum_do_without_exemplars(tmp_path):
    loop = make(tmp_path, curriculum={"rate": 1.0})
    loop.run()
    helped = [r for r in loop.metrics() if r.get("seeding/solved_fraction", 0) > 0]
    assert helped
    for record in helped:
        assert record["accuracy/pass_at_group"] < 1 - record["group/all_wrong_fraction"] + 1e-9
    group_filter = GroupFilter(loop.config)
    found = group([0, 1], name="p", domain="p")
    seeded = replace(found.group.completions[1], answered_ids=(1,))
    aided = replace(
        found, group=replace(found.group, completions=(found.group.completions[0], seeded))
    )
    np.testing.assert_equal(group_filter.unaided(aided), [0, np.nan])
    metrics = group_filter.metrics([aided])
    assert metrics["accuracy/pass_at_1"] == 0 and metrics["group/all_wrong_fraction"] == 0


@pytest.mark.parametrize("crash_at", [1, 2, 3])
def test_a_resumed_run_has_the_exemplars_of_the_uninterrupted_one(tmp_path, crash_at):
    whole = make(tmp_path / "whole")
    whole.run()
    loop = make(tmp_path / "cut", crash_at=crash_at)
    with pytest.raises(Crash):
        loop.run()
    step = max(loop.states, default=0)
    again = make(tmp_path / "cut")
    if step:
        again.run(loop.states[step])
    else:
        again.run()
    assert again.metrics() == whole.metrics()
    assert again.states[4].sampler == whole.states[4].sampler
    assert "exemplars" in again.states[4].sampler
    for (_, table), (_, expected) in zip(again.trained[::-1], whole.trained[::-1], strict=False):
        assert table.manifest == expected.manifest


def test_a_state_without_exemplars_begins_with_none(tmp_path):
    loop = make(tmp_path / "a", seeding=None)
    loop.run()
    state = loop.states[2]
    assert "exemplars" not in state.sampler
    again = make(tmp_path / "b")
    again.run(state)
    assert again.metrics()[0]["seeding/prompts"] == 0
