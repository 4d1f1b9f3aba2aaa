"""Steps that learn lessons: what the policy is told, what is kept over a kill, what is measured."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.controller.display import Phases
from grpo_megatron.controller.experience.learner import (
    ExperienceLearner,
    PromptTeller,
    graded,
    rewards_differ,
)
from grpo_megatron.controller.experience.library import Library, Operation
from grpo_megatron.controller.experience.writer import LessonWriter
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import Mirrors
from tests.controller.character_texts import answered, asked, characters, text_of
from tests.controller.scored_groups import recipe

LAYOUT = "({experiences}) {question}"


def teller_of(lessons=(), *, tokenizer=None, rollout=None, **domain) -> PromptTeller:
    library = Library(8, 8)
    library.apply([Operation("add", experience=text) for text in lessons])
    config = recipe(
        d={"template": "<{question}>"} | domain,
        rollout={"max_model_len": 80, "max_new_tokens": 20} | (rollout or {}),
    )
    return PromptTeller(
        config,
        ExperienceConfig(layout=LAYOUT),
        library=library,
        tokenizer=tokenizer or characters(),
    )


def test_lessons_stand_before_the_question():
    told = teller_of(["look", "{question}"]).with_lessons(asked("1+1"))
    assert text_of(told) == "<([E1] look\n[E2] {question}) 1+1>"
    assert replace(told, token_ids=asked("1+1").token_ids) == asked("1+1")


def test_without_lessons_a_prompt_stays_as_it_is():
    teller = teller_of()
    assert teller.with_lessons(asked("1+1")) == asked("1+1") and teller.take_shortened() == 0


def test_the_newest_lessons_are_told_where_not_all_fit():
    teller = teller_of(["a" * 20, "b" * 20, "c" * 10])
    assert text_of(teller.with_lessons(asked("?"))) == f"<([E2] {'b' * 20}\n[E3] {'c' * 10}) ?>"
    assert text_of(teller.with_lessons(asked("q" * 59))) == "q" * 59, "not one of them fits"
    assert teller.take_shortened() == 2 and teller.take_shortened() == 0


def test_a_layout_that_cannot_be_written_is_refused():
    with pytest.raises(DataError, match="@"):
        PromptTeller(
            recipe(d={}),
            ExperienceConfig(layout="@{experiences}{question}"),
            library=Library(8, 8),
            tokenizer=characters(),
        )


@pytest.mark.parametrize("mark", ["[", "E", "7", "]", "\n"])
def test_a_tokenizer_that_cannot_write_the_marks_of_lessons_is_refused(mark):
    tokenizer = characters()
    encode = tokenizer.encode
    tokenizer.encode = lambda text, where=None: encode(text.replace(mark, "@"), where=where)
    with pytest.raises(DataError, match="@") as error:
        teller_of(tokenizer=tokenizer)
    assert error.value.where == "experience.layout, with lessons as [E1]"


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [([1, 0], True), ([1, 1], False), ([1, np.nan], False), ([np.nan] * 2, False), ([0.5], False)],
)
def test_groups_teach_where_rewards_differ(rewards, expected):
    assert rewards_differ(np.array(rewards, float)) is expected


def test_what_was_not_scored_is_not_shown():
    problem = graded(answered("q", ["a", "b", "c"], [1, np.nan, 0]))
    assert [(attempt.text, attempt.reward) for attempt in problem.attempts] == [
        ("a", 1.0),
        ("c", 0.0),
    ]
    assert problem.question == "q"


class Policy:
    """Answers right where it is told to look, else every second time."""

    def __init__(self):
        self.prompts = []

    async def rollouts(self, step, prompts):
        self.prompts.append([text_of(prompt) for prompt in prompts])
        return list(prompts)

    async def score(self, prompts):
        groups = []
        for prompt in prompts:
            right = [1, 0]
            if "look" in text_of(prompt):
                right = [1, 1]
            groups.append(answered(prompt.question, ["x", "y"], right))
        return groups


class Learning:
    """A run's directory and what a step needs; `step` fails where the kill is."""

    def __init__(self, folder):
        self.run_dir = RunDir(folder / "run", "1")
        self.run_dir.create()
        self.policy = Policy()
        self.num_asked = 0
        self.writes_unwritable = False

    async def ask(self, texts):
        self.num_asked += len(texts)
        name = f"look {self.num_asked}"
        if self.writes_unwritable:
            name = "@"
        return [json.dumps([{"operation": "add", "experience": name}]) for _ in texts]

    def run(self, num_steps, *, stopping=None, kill_at=None):
        config = recipe(
            d={"template": "<{question}>"}, batch={"num_prompts": 2, "num_samples_per_prompt": 2}
        )
        config = config.model_copy(update={"num_steps": num_steps, "kind": "experience"})
        settings = ExperienceConfig(layout=LAYOUT)
        prompts = {"d": [asked(f"question {n}", f"p{n}") for n in range(6)]}
        tokenizer = characters()
        library = Library(8, 8, tokenizer)
        learner = ExperienceLearner(
            config,
            self.run_dir,
            sampler=PromptSampler(prompts, {"d": 1.0}, 0),
            dispatcher=self.policy,
            rewards=self.policy,
            teller=PromptTeller(config, settings, library=library, tokenizer=tokenizer),
            writer=LessonWriter(settings, self.ask),
            phases=Phases(),
            stopping=stopping or asyncio.Event(),
        )
        learner.restore()
        metrics = MetricsWriter(self.run_dir)
        if kill_at is not None:
            learner._save = killed(learner, kill_at)
        asyncio.run(learner.run(metrics, Mirrors({})))
        metrics.close()
        return learner

    @property
    def records(self):
        return [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]

    @property
    def saved(self):
        return json.loads(self.run_dir.experience.read_text())


class Killed(Exception):
    pass


def killed(learner, step):
    save = learner._save

    def instead():
        if learner.step == step:
            raise Killed
        save()

    return instead


def test_steps_learn_until_groups_are_all_right(tmp_path):
    learning = Learning(tmp_path)
    assert learning.run(2).step == 2
    first, second = learning.policy.prompts
    assert all("look" not in text for text in first)
    assert all(text.startswith("<([E1] look") for text in second)
    assert [record["experience/groups_that_teach"] for record in learning.records] == [2, 0]
    assert [record["experience/lessons"] for record in learning.records] == [1, 1]
    assert learning.saved["step"] == 2 and len(learning.saved["lessons"]) == 1


def test_a_run_goes_on_after_lessons_that_the_tokenizer_cannot_write(tmp_path):
    learning = Learning(tmp_path)
    learning.writes_unwritable = True
    assert learning.run(2).step == 2
    assert [record["experience/refused"] for record in learning.records] == [1, 1]
    assert learning.saved["lessons"] == {}
    told = learning.run_dir.events.read_text()
    assert "lesson_refused" in told and "add: no token for '@'" in told


def test_a_run_goes_on_after_a_kill_as_if_there_was_none(tmp_path):
    whole = Learning(tmp_path / "whole")
    whole.run(3)
    killed_run = Learning(tmp_path / "killed")
    with pytest.raises(Killed):
        killed_run.run(3, kill_at=2)  # the line of step 1 is written, its lessons are not
    assert killed_run.saved["step"] == 1
    killed_run.run(3)
    assert [record["step"] for record in killed_run.records] == [0, 1, 2]
    assert killed_run.policy.prompts[1] == killed_run.policy.prompts[2]
    assert killed_run.policy.prompts[2:] == whole.policy.prompts[1:]
    assert killed_run.saved == whole.saved


def test_it_stops_between_steps_when_told_to(tmp_path):
    stopping = asyncio.Event()
    stopping.set()
    learning = Learning(tmp_path)
    assert learning.run(2, stopping=stopping).step == 0
    assert learning.policy.prompts == []
