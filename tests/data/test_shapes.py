"""Pictures have as many shapes as the answer says, and depend on the seed alone."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.sources import load_problems
from grpo_megatron.errors import DataError

REWARDS = [{"function": "grpo_megatron.rewards.functions:exact_match"}]


def domain_of(**arguments) -> DomainConfig:
    return DomainConfig.model_validate(
        {
            "name": "count",
            "source": "shapes",
            "num_problems": 30,
            "arguments": arguments,
            "rewards": REWARDS,
        }
    )


def count_blobs(picture: bytes) -> int:
    """Count connected parts that are not white."""
    is_shape = (np.asarray(Image.open(io.BytesIO(picture))) != 255).any(-1)
    count = 0
    while is_shape.any():
        count += 1
        pending = [tuple(np.argwhere(is_shape)[0])]
        while pending:
            row, column = pending.pop()
            inside = 0 <= row < is_shape.shape[0] and 0 <= column < is_shape.shape[1]
            if not inside or not is_shape[row, column]:
                continue
            is_shape[row, column] = False
            pending += [(row + 1, column), (row - 1, column)]
            pending += [(row, column + 1), (row, column - 1)]
    return count


def test_the_answer_is_the_number_of_shapes():
    problems = load_problems(domain_of(fewest=0, most=4), 7)
    assert {problem.answer for problem in problems} == {"0", "1", "2", "3", "4"}
    for problem in problems:
        (picture,) = problem.metadata["images"]
        assert count_blobs(picture) == int(problem.answer)
        assert problem.question == "How many circles?"


def test_other_shapes_do_not_count():
    arguments = {"kinds": ["circle", "square"], "most_others": 3, "most": 3}
    problems = load_problems(domain_of(**arguments), 0)
    assert {problem.metadata["kind"] for problem in problems} == {"circle", "square"}
    for problem in problems:
        (picture,) = problem.metadata["images"]
        assert count_blobs(picture) == problem.metadata["num_shapes"] >= int(problem.answer)
    assert any(p.metadata["num_shapes"] > int(p.answer) for p in problems)


def test_pictures_depend_on_the_seed_alone():
    first = load_problems(domain_of(), 1)
    assert first == load_problems(domain_of(), 1)
    assert first == load_problems(domain_of(seed=1), 2)
    assert first[3] != load_problems(domain_of(), 2)[3]
    fewer = domain_of().model_copy(update={"num_problems": 4})
    assert load_problems(fewer, 1) == first[:4]


def test_questions_have_the_kind_where_they_name_it():
    [problem] = load_problems(
        domain_of(question="{kind}s in {{}}?").model_copy(update={"num_problems": 1}), 0
    )
    assert problem.question == "circles in {}?"
    problems = load_problems(domain_of(question="Count."), 0)
    assert {problem.question for problem in problems} == {"Count."}


def test_the_largest_shape_fits():
    problems = load_problems(domain_of(side=28, shape_side=26, most=1), 0)
    assert {count_blobs(problem.metadata["images"][0]) for problem in problems} == {1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sides": 80}, "no argument 'sides'"),
        ({"sides": 80}, "did you mean 'side'"),
        ({"side": 56, "shape_side": 24, "most": 9}, "it has room for 4"),
        ({"fewest": 3, "most": 2}, "most = 2 is less than fewest = 3"),
        ({"most_others": 1}, "more kinds than the one"),
        ({"kinds": ["star"]}, "kinds.0"),
        ({"kinds": ["circle", "circle"], "most_others": 2}, "'circle' several times"),
        ({"side": 28, "shape_side": 27, "fewest": 0, "most": 0}, "shape_side is at most 26"),
        ({"question": "How many {n}?"}, "{n} is not supported"),
        ({"question": "How many {n}?"}, "use {kind}; write literal braces as {{ and }}"),
        ({"question": "{"}, "template '{'"),
        ({"question": "{kind!z}"}, "{kind} is not supported"),
        ({"question": "{kind.x}"}, "{kind.x} is not supported"),
        ({"question": "{metadata[kind]}"}, "{metadata[kind]} is not supported"),
    ],
)
def test_other_arguments_are_refused(arguments, words):
    with pytest.raises(DataError) as caught:
        load_problems(domain_of(**arguments), 0)
    assert words in str(caught.value) and "count, arguments" in str(caught.value)
