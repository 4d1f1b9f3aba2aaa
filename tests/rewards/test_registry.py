"""References, signatures and arguments are checked before anything starts."""

from __future__ import annotations

import math

import pytest

from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.pool import components_of
from grpo_megatron.rewards.registry import bind
from tests.rewards.reward_pools import HOSTILE, domain

FUNCTIONS = "grpo_megatron.rewards.functions"


@pytest.mark.parametrize(
    ("reference", "arguments", "words"),
    [
        ("exact_match", {}, ["module:function"]),
        (f"{FUNCTIONS}:exact_mach", {}, ["no function 'exact_mach'", "did you mean 'exact_match'"]),
        (f"{FUNCTIONS}:zzz", {}, ["no function 'zzz'", "numeric_match"]),
        ("no_such_module.rewards:f", {}, ["no module 'no_such_module'", "install it"]),
        (f"{HOSTILE}:not_a_function", {}, ["int, not a function"]),
        (f"{HOSTILE}:greedy", {}, ["cannot be called", "def reward(completion: str, answer: str"]),
        (f"{HOSTILE}:always_raises", {"num_tokens": 1}, ["'num_tokens' is the pool's own"]),
        (f"{FUNCTIONS}:language_consistency", {"scripts": ["klingon"]}, ["klingon", "cyrillic"]),
        (f"{FUNCTIONS}:language_consistency", {"scripts": "latin"}, ["not a list"]),
        (
            f"{FUNCTIONS}:cosine_length",
            {"max_tokens": 9, "accuracy": "x"},
            ["not `module:function`"],
        ),
        (
            f"{FUNCTIONS}:cosine_length",
            {"max_tokens": 9, "accuracy_arguments": {"tolerance": 1}},
            ["'tolerance' is not an argument"],
        ),
        (f"{FUNCTIONS}:code_tests", {"mode": "some"}, ["some", "fraction"]),
        (
            f"{HOSTILE}:scaled",
            {"facto": 1},
            ["'facto' is not an argument", "did you mean 'factor'"],
        ),
        (f"{HOSTILE}:weighed", {}, ["set it in the recipe: arguments = { weight = … }"]),
        (f"{HOSTILE}:asks_for_the_promt", {}, ["did you mean 'prompt'"]),
        (f"{HOSTILE}:always_raises", {"prompt": 1}, ["'prompt' is the pool's own"]),
        ("numeric_mach", {}, [f'did you mean "{FUNCTIONS}:numeric_match"?']),
        ("functions.exact_match", {}, [f'did you mean "{FUNCTIONS}:exact_match"?']),
        (f"{FUNCTIONS}:cosine_length", {"accuracy": 5}, ["reward 5 is not", "exact_match"]),
        (
            f"{FUNCTIONS}:cosine_length",
            {"accuracy_arguments": 5},
            ["arguments of reward", "are 5, not a table", "{ name = value }"],
        ),
        (f"{FUNCTIONS}:language_consistency", {"scripts": 5}, ["scripts = 5 is not a list"]),
        (f"{FUNCTIONS}:language_consistency", {"scripts": [["latin"]]}, ["is not a list"]),
        (f"{HOSTILE}:checked", {"size": "x"}, ["cannot work with its arguments: TypeError"]),
        (f"{FUNCTIONS}:cosine_length", {"correct": 1.0}, ["correct = 1.0", "[1.0, 0.5]"]),
        (f"{FUNCTIONS}:cosine_length", {"wrong": [1, 2, 3]}, ["wrong = [1, 2, 3]", "a pair"]),
        (f"{FUNCTIONS}:cosine_length", {"wrong": [0, "x"]}, ["a number of wrong = 'x'"]),
        (f"{FUNCTIONS}:numeric_match", {"tolerance": -1}, ["tolerance = -1", "at least 0"]),
        (f"{FUNCTIONS}:numeric_match", {"tolerance": "x"}, ["tolerance = 'x'", "at least 0"]),
        (f"{FUNCTIONS}:numeric_match", {"tolerance": math.nan}, ["tolerance = nan"]),
        (f"{FUNCTIONS}:repetition", {"n": 0}, ["n = 0", "whole number of at least 1"]),
        (f"{FUNCTIONS}:repetition", {"n": 2.5}, ["n = 2.5"]),
        (f"{FUNCTIONS}:repetition", {"penalty": True}, ["penalty = True", "a finite number"]),
        (f"{FUNCTIONS}:soft_overlong", {"buffer": 0}, ["buffer = 0", "above 0"]),
        (f"{FUNCTIONS}:length_penalty", {"max_tokens": 0}, ["max_tokens = 0", "above 0"]),
        (f"{FUNCTIONS}:code_tests", {"timeout_s": 0}, ["timeout_s = 0", "above 0"]),
        (f"{FUNCTIONS}:code_tests", {"memory_mib": 0.5}, ["memory_mib = 0.5", "at least 1"]),
    ],
)
def test_what_cannot_be_a_reward(reference, arguments, words):
    with pytest.raises(RewardError) as caught:
        components_of(domain({"function": reference, "arguments": arguments}), 16)
    assert caught.value.remedy
    for word in [*words, "[[domains]] d"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "reference",
    [
        f"{FUNCTIONS}:exact_match",
        f"{FUNCTIONS}:numeric_match",
        f"{FUNCTIONS}:math_verify",
        f"{FUNCTIONS}:reasoning_gym_score",
        f"{FUNCTIONS}:format_tags",
        f"{FUNCTIONS}:code_tests",
        "grpo_megatron.rewards.boxes:box_iou",
        "grpo_megatron.rewards.boxes:format_box",
    ],
)
@pytest.mark.parametrize("tag", ["<answer>", "</answer>", "answer>", "", "the answer", 5])
def test_a_tag_is_a_bare_name(reference, tag):
    with pytest.raises(RewardError, match="is not the bare name of a tag") as caught:
        bind(reference, {"answer_tag": tag})
    if "answer>" in str(tag):
        assert caught.value.remedy == 'write answer_tag = "answer"'


@pytest.mark.parametrize(
    ("reference", "arguments"),
    [
        (f"{FUNCTIONS}:format_think", {}),
        (f"{FUNCTIONS}:language_consistency", {}),
        ("grpo_megatron.rewards.judge:judge", {"url": "http://judge", "model": "m"}),
        ("grpo_megatron.rewards.judge:reward_model", {"url": "http://judge", "model": "m"}),
    ],
)
def test_so_is_that_of_a_thought(reference, arguments):
    with pytest.raises(RewardError, match="think_tag = '<think>'") as caught:
        bind(reference, {**arguments, "think_tag": "<think>"})
    assert caught.value.remedy == 'write think_tag = "think"'
    bind(reference, {**arguments, "think_tag": "think"})


def test_errors_inside_a_users_module_are_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    (tmp_path / "breaks.py").write_text("1 / 0\n")
    with pytest.raises(RewardError, match=r"needs_more fails to import.*no_such_dependency"):
        bind("needs_more:f", {})
    with pytest.raises(RewardError, match="breaks fails to import: ZeroDivisionError"):
        bind("breaks:f", {})


def test_a_module_beside_the_recipe_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_own_rewards.py").write_text("def one(completion, answer):\n    return 1\n")
    assert bind("my_own_rewards:one", {})("", "", {"prompt": "", "metadata": {}}) == 1


def test_a_reward_takes_the_context_that_it_names():
    context = {"prompt": "p", "metadata": {}}
    assert bind(f"{HOSTILE}:length", {}).context == ()
    assert bind(f"{HOSTILE}:obey", {}).context == ("prompt", "metadata")
    assert bind(f"{HOSTILE}:always_raises", {}).context == ("prompt", "metadata")
    assert bind(f"{FUNCTIONS}:repetition", {}).context == ("token_ids",)
    assert bind(f"{FUNCTIONS}:soft_overlong", {"max_tokens": 9, "buffer": 3}).context == (
        "num_tokens",
    )
    assert bind(f"{HOSTILE}:coroutine", {}).is_async
    assert bind(f"{HOSTILE}:scaled", {"factor": 3})("2", "", context) == 6


@pytest.mark.parametrize(
    "name",
    [
        "swapped",
        "swapped_by_place",
        "by_name",
        "prompt_first",
        "text_and_answer",
        "answer_named",
        "under_a_decorator",
        "in_the_plural",
    ],
)
def test_texts_reach_the_parameters_that_have_their_names(name):
    """Wherever they stand; without names the first is the completion, the second the answer."""
    bound = bind(f"{HOSTILE}:{name}", {})
    assert bound("a completion", "an answer", {"prompt": "a prompt"}) == [
        "a completion",
        "an answer",
    ]


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("answer_before_text", {}, ["'answer' would not get the answer"]),
        ("text_before_completion", {}, ["'completion' would not get the completion"]),
        ("text_and_answer_and_completion", {}, ["'completion' would not get the completion"]),
        ("weighed_by_name", {}, ["set it in the recipe: arguments = { weight = … }"]),
        ("weighed_between", {}, ["set it in the recipe: arguments = { weight = … }"]),
        ("swapped", {"answer": "x"}, ["argument 'answer' is the pool's own"]),
        ("greedy", {}, ["too many positional arguments", "a reward is def reward("]),
        ("of_many", {}, ["a call is for one completion: name it 'completion'"]),
        ("of_many", {"completions": "x"}, ["cannot be called"]),
        ("of_many_by_name", {}, ["'prompts' would get the completion", "`completion`, `answer`"]),
        ("answers_first", {}, ["'answers' would get the completion"]),
        ("wants_prompts", {}, ["a call is for one completion: name it 'prompt'"]),
        ("nearly_named", {}, ["or did you mean 'completion', which every call offers?"]),
    ],
)
def test_a_text_in_the_place_of_the_other_is_refused(name, arguments, words):
    with pytest.raises(RewardError) as caught:
        bind(f"{HOSTILE}:{name}", arguments)
    for word in words:
        assert word in str(caught.value)
    if "would not get" in words[0]:
        assert "name one `completion` and the other `answer`" in caught.value.remedy


def test_components_have_unique_names():
    match = f"{FUNCTIONS}:exact_match"
    with pytest.raises(RewardError, match="two reward components are called 'exact_match'"):
        components_of(domain(match, match))
    found = components_of(
        domain(
            match,
            {
                "function": match,
                "name": "tagged",
                "weight": 0.5,
                "arguments": {"answer_tag": "answer"},
            },
        )
    )
    assert [(c.name, c.weight) for c in found] == [("exact_match", 1.0), ("tagged", 0.5)]


def test_a_missing_library_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(RewardError, match="needs math_verify"):
        bind(f"{FUNCTIONS}:math_verify", {})


def test_the_length_budget_reaches_rewards_that_take_it():
    overlong = "grpo_megatron.rewards.functions:soft_overlong"
    [found] = components_of(domain({"function": overlong, "arguments": {"buffer": 4}}), 16)
    assert found.reward.arguments == {"buffer": 4, "max_tokens": 16}
    own = {"function": overlong, "arguments": {"buffer": 4, "max_tokens": 8}}
    [found] = components_of(domain(own), 16)
    assert found.reward.arguments["max_tokens"] == 8
    exact = "grpo_megatron.rewards.functions:exact_match"
    [found] = components_of(domain({"function": exact}), 16)
    assert "max_tokens" not in found.reward.arguments


def test_a_reward_that_has_a_default_keeps_it():
    """The judge's `max_tokens` is the length of its verdict, not of completions."""
    judge = "grpo_megatron.rewards.judge:judge"
    judged = {"function": judge, "arguments": {"url": "http://judge", "model": "m"}}
    [found] = components_of(domain(judged), 16)
    assert "max_tokens" not in found.reward.arguments


def test_a_reward_that_changes_its_arguments_changes_those_of_no_other_call():
    bound = bind(f"{HOSTILE}:takes_an_argument", {"words": ["x", "y"]})
    assert [bound("", "", {}) for _ in range(3)] == [2, 2, 2]
