"""Guided retries: what they continue, what is trained of them, what metrics say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.controller.loops import Loop
from tests.controller.scored_groups import recipe

CORRECTION = {
    "probability": 1.0,
    "answer_share": 0.5,
    "cue": "?",
    "answer_cue": "={answer}",
    "max_retry_tokens": 4,
}


class Retrying(Loop):
    """First tries are right for sample 0 of every second prompt, all retries of prompt p3 are."""

    def __init__(self, root, **correction):
        self.retried = []
        config = recipe(("p",), num_steps=2, correction=CORRECTION | correction)
        super().__init__(root, config, num_prompts=8)

    async def rollouts(self, step, prompts, *, num_samples=None, max_tokens=None):
        found = await super().rollouts(step, prompts, num_samples=num_samples)
        if num_samples == 1:
            assert max_tokens == 4
            self.retried += [(step, p) for p in prompts]
        return found

    async def score(self, groups):
        retry = len(groups[0].completions) == 1
        self.answer = lambda step, prompt, sample: (
            prompt.prompt_id == "p3" if retry else sample == 0 and int(prompt.prompt_id[1]) % 2
        )
        return await super().score(groups)


def test_a_retry_continues_prompt_attempt_and_cue(tmp_path):
    loop = Retrying(tmp_path, probability=1.0)
    loop.run()
    retried = {(step, p.prompt_id): p.token_ids for step, p in loop.retried}
    assert len(retried) == len(loop.retried) == 28  # of 8 prompts with 4 samples, 4 were right
    cues = set()
    for step, (_, table) in enumerate(loop.trained):
        assert len(table) == 16 and np.bincount(table.group).tolist() == [4] * 4
        contexts = {tuple(table.prompt_ids(row).tolist()) for row in range(16)} - {(1, 2)}
        assert contexts == {ids for (s, _), ids in retried.items() if s == step}
        for row in range(16):
            prompt, (completion, _) = table.prompt_ids(row).tolist(), table.completion(row)
            assert (completion == 1).all()  # what the policy said; never the cue
            if len(prompt) > 2:
                assert prompt[:2] == [1, 2]
                text = [t for t in prompt[2:] if t != 1]
                cues.add("".join(map(chr, text)))
                assert prompt == [1, 2, *[1] * (len(prompt) - 2 - len(text)), *text]
    assert cues == {"?", "="}  # the answer is empty


def test_metrics_describe_first_tries_and_count_retries(tmp_path):
    loop = Retrying(tmp_path, probability=1.0)
    loop.run()
    records = loop.metrics()
    assert sum(r["accuracy/pass_at_1"] for r in records) == 2 * 4 / 32
    assert sum(r["correction/retries"] for r in records) == 28
    assert sum(
        r["correction/corrected_fraction"] * r["correction/retries"] for r in records
    ) == pytest.approx(3)  # of p3
    trained = sum(table.reward.sum() for _, table in loop.trained)
    assert trained == 4 + 3 and sum(16 * r["reward/mean"] for r in records) == 4


def test_some_are_left_as_they_are_always_the_same(tmp_path):
    first, again = (Retrying(tmp_path / name, probability=0.5) for name in ("a", "b"))
    first.run(), again.run()
    assert first.retried == again.retried and 5 < len(first.retried) < 23


def test_a_retry_needs_room(tmp_path):
    loop = Retrying(tmp_path, probability=1.0)
    rollout = loop.config.rollout.model_copy(update={"max_model_len": 8, "max_new_tokens": 5})
    loop.config = loop.config.model_copy(update={"rollout": rollout})
    loop.run()
    room = sum(r["correction/no_room"] for r in loop.metrics())
    assert room > 0 and room + len(loop.retried) == 28
    assert all(len(p.token_ids) + 4 <= 8 for _, p in loop.retried)


def test_a_retry_of_a_seeded_answer_continues_what_that_answered(tmp_path):
    loop = Retrying(tmp_path, probability=1.0)

    async def rollouts(step, prompts, **settings):
        if settings.get("num_samples") == 1:
            return await Retrying.rollouts(loop, step, prompts, **settings)
        seeded = [replace(prompt, token_ids=(8, 9, 1, 2)) for prompt in prompts]
        found = await Retrying.rollouts(loop, step, seeded, **settings)
        return [g.as_answers_to(p) for g, p in zip(found, prompts, strict=True)]

    loop.rollouts = rollouts
    loop.run()
    assert all(prompt.token_ids[:4] == (8, 9, 1, 2) for _, prompt in loop.retried)
    for _, table in loop.trained:
        for row in range(len(table)):
            assert table.prompt_ids(row).tolist()[:4] == [8, 9, 1, 2]
