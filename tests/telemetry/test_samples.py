"""Best and worst completions."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np

from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.samples import extremes, write_samples
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, Turn


def read_samples(path) -> list[dict]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def scored(name: str, rewards: list[float]) -> ScoredGroup:
    prompt = Prompt(name, "d", f"{name}?", (1,), "42")
    completions = tuple(
        Completion(
            np.zeros(index + 1, np.int32),
            np.zeros(index + 1, np.float32),
            (),
            "stop",
            f"{name}{index}",
        )
        for index in range(len(rewards))
    )
    values = np.array(rewards)
    return ScoredGroup(RolloutGroup(prompt, completions, 0), {"match": values}, values)


def test_extremes_come_from_different_groups_and_rare_ones_first():
    groups = [scored("easy", [1, 1, 1, 0]), scored("hard", [0, 0, 1, 0]), scored("mid", [0, 1])]
    found = extremes(7, groups, 2)
    assert [s["completion"] for s in found] == ["hard2", "mid1", "easy3", "mid0"]
    assert [s["rank"] for s in found] == ["best", "best", "worst", "worst"]
    assert (found[0]["step"], found[0]["length"]) == (7, 3)
    assert extremes(7, groups, 0) == []


def test_unscorable_samples_are_left_out():
    groups = [scored("a", [math.nan, math.nan]), scored("b", [math.nan, 0.5])]
    best, worst = extremes(0, groups, 3)
    assert best["completion"] == worst["completion"] == "b1"
    assert best["components"] == {"match": 0.5}


def characters(ids) -> str:
    return "".join(map(chr, ids))


def test_of_an_episode_all_is_shown_that_the_policy_has_read():
    group = scored("a", [1.0])
    [completion] = group.group.completions
    ids = np.array([ord(character) for character in "call=4=4"], np.int32)
    episode = replace(
        completion,
        token_ids=ids,
        text="4",
        turns=(Turn(0, 4), Turn(7, 8)),
        answered_ids=tuple(map(ord, "rules a?")),
    )
    episode = replace(episode, earlier=(replace(episode, token_ids=ids[:3]),))
    group = replace(group, group=replace(group.group, completions=(episode,)))
    [best, _] = extremes(0, [group], 1, characters)
    assert best["prompt"] == "rules a?"
    assert best["completion"] == "call=4=4" and best["earlier"] == ["cal"]


def test_a_completion_is_shown_behind_what_it_answers():
    group = scored("a", [1.0])
    [completion] = group.group.completions
    retry = replace(completion, answered_ids=tuple(map(ord, "a? wrong, again")))
    other = replace(group, group=replace(group.group, completions=(retry,)))
    [best, _] = extremes(0, [other], 1, characters)
    assert (best["prompt"], best["completion"]) == ("a? wrong, again", "a0")
    [best, _] = extremes(0, [group], 1, characters)
    assert (best["prompt"], best["completion"]) == ("a?", "a0")


def test_files_are_readable_whatever_the_text(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.create()
    groups = [scored("é\n\ud800\u2028", [1.0])]
    best, worst = extremes(123, groups, 1)
    path = write_samples(run_dir, 123, [best, worst])
    assert path == tmp_path / "samples" / "step_000123.jsonl"
    found = read_samples(path)
    assert [s["rank"] for s in found] == ["best", "worst"]
    assert found[0]["completion"] == "é\n\ud800\u20280" and found[0]["answer"] == "42"
    write_samples(run_dir, 123, [best])
    assert len(read_samples(path)) == 1 and len(list(path.parent.iterdir())) == 1
