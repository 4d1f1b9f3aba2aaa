"""Episodes on their way from a rollout worker into the table of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_megatron.batching.columns import read_columns, write_columns
from grpo_megatron.batching.manifest import StepFacts, read_manifest, write_manifest
from grpo_megatron.batching.spool import (
    ShardReport,
    SpoolDirectory,
    StoredShard,
    spool_groups,
    store_groups,
)
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.controller.recorder import record_completions, record_step
from grpo_megatron.errors import DataError, EngineError
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    ScoredGroup,
    StoredCompletion,
    Turn,
)
from tests import episodes
from tests.episodes import sequence_of

MANY = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def decode(ids) -> str:
    return "".join(chr(97 + token % 26) for token in ids)


def scored(groups: list[RolloutGroup[StoredCompletion]]) -> list[ScoredGroup]:
    """Every completion has the reward of its place in its group."""
    found = []
    for group in groups:
        rewards = np.arange(len(group.completions), dtype=float)
        found.append(ScoredGroup(group, {"r": rewards}, rewards))
    return found


def same_turns(found: tuple[Turn, ...], given: tuple[Turn, ...]) -> bool:
    """As `==`, and a reward that is not there equals one that is not there."""
    return repr(found) == repr(given)


@MANY
@given(episodes.groups())
def test_a_stored_completion_has_the_turns_that_were_sampled(tmp_path, given_groups):
    path = tmp_path / f"spool{len(list(tmp_path.iterdir()))}"
    for group, stored in zip(given_groups, store_groups(path, given_groups), strict=True):
        for completion, found in zip(group.completions, stored.completions, strict=True):
            assert repr(found.outcome) == repr(float(completion.outcome))
            assert found.num_policy_tokens == completion.num_policy_tokens
            assert len(found.sequences) == len(completion.sequences)
            for one, expected in zip(found.sequences, completion.sequences, strict=True):
                assert same_turns(one.turns, expected.turns)
                assert one.text == expected.text
                assert one.finish_reason == expected.finish_reason
                assert one.token_ids.tolist() == expected.token_ids.tolist()
                assert one.policy_mask.tolist() == expected.policy_mask.tolist()
                prompt_ids = expected.answered_ids or group.prompt.token_ids
                assert one.prompt_ids(group.prompt) == prompt_ids
                assert one.prompt_length(group.prompt) == len(prompt_ids)


@MANY
@given(episodes.groups())
def test_the_table_of_a_step_has_them_too(tmp_path, given_groups):
    number = len(list(tmp_path.iterdir()))
    stored = scored(store_groups(tmp_path / f"spool{number}", given_groups))
    directory = tmp_path / f"step_{number:06d}"
    record_step(directory, stored, 1, StepFacts(domains=["d"]), decode)
    table = SampleTable(directory)
    row = 0
    episode = 0
    for number, group in enumerate(given_groups):
        for place, completion in enumerate(group.completions):
            num_policy_tokens = 0
            for sequence in completion.sequences:
                ids, logprobs = table.completion(row)
                np.testing.assert_array_equal(ids, sequence.token_ids)
                np.testing.assert_array_equal(logprobs, sequence.logprobs)
                policy_ids, policy_logprobs = table.policy_tokens(row)
                mask = sequence.policy_mask
                np.testing.assert_array_equal(policy_ids, sequence.token_ids[mask])
                np.testing.assert_array_equal(policy_logprobs, sequence.logprobs[mask])
                assert table.policy_places(row).tolist() == np.flatnonzero(mask).tolist()
                assert same_turns(table.turns(row), sequence.turns)
                prompt_ids = sequence.answered_ids or group.prompt.token_ids
                assert table.prompt_ids(row).tolist() == list(prompt_ids)
                assert table.prompt_lengths[row] == len(prompt_ids)
                assert table.completion_lengths[row] == len(ids)
                assert table.policy_lengths[row] == mask.sum()
                assert table.truncated[row] == completion.truncated
                assert (table.episode[row], table.group[row]) == (episode, number)
                assert table.reward[row] == table.components["r"][row] == place
                num_policy_tokens += int(mask.sum())
                row += 1
            first_row = table.first_rows[episode]
            assert table.episode[first_row] == episode
            assert table.episode_policy_lengths[episode] == num_policy_tokens
            episode += 1
    assert len(table) == row
    assert len(table.all_policy_ids()) == table.policy_lengths.sum()


@MANY
@given(episodes.groups())
def test_lengths_are_found_in_shards_where_the_table_has_none(tmp_path, given_groups):
    number = len(list(tmp_path.iterdir()))
    samples = []
    for group in given_groups:
        for completion in group.completions:
            samples.append((0, group.prompt, completion))
    record_completions(tmp_path / f"step_{number:06d}", samples)
    table = SampleTable(tmp_path / f"step_{number:06d}")
    sequences = [one for _, _, completion in samples for one in completion.sequences]
    assert table.completion_lengths.tolist() == [one.num_tokens for one in sequences]
    assert table.policy_lengths.tolist() == [int(one.policy_mask.sum()) for one in sequences]
    assert len(table.first_rows) == len(samples)


def test_a_report_survives_json(tmp_path):
    rng = np.random.default_rng(0)
    earlier = sequence_of([(2, True), (1, False)], rng, states=["é"], answered_ids=(3, 4, 5))
    last = sequence_of([(1, True)], rng, rewards=[0.5], spoilt=[0])
    completion = replace(last, earlier=(earlier,), outcome=2.0)
    group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (completion,), 0)
    directory = SpoolDirectory(tmp_path / "spool")
    report = spool_groups(directory.path / "rollout-0-000.safetensors", [group])
    told = msgspec.json.decode(msgspec.json.encode(report), type=ShardReport)
    [found] = StoredShard(directory, told).completions()
    assert found.outcome == 2.0
    assert same_turns(found.turns, last.turns)
    assert same_turns(found.earlier[0].turns, earlier.turns)
    assert found.earlier[0].prompt_ids(group.prompt) == (3, 4, 5)
    assert found.prompt_ids(group.prompt) == (1, 2)


def test_a_report_of_plain_completions_is_as_it_was(tmp_path):
    """What a worker says of completions without turns has no word of them."""
    completion = Completion(np.zeros(2, np.int32), np.zeros(2, np.float32), (), "stop", "ab")
    group = RolloutGroup(Prompt("p", "d", "", (1, 2), ""), (completion,), 0)
    report = spool_groups(tmp_path / "rollout-0-000.safetensors", [group])
    assert report.sequences is None
    assert (report.samples[0].turns, report.samples[0].own_prompt) == ([], None)
    columns = read_columns(tmp_path / "rollout-0-000.safetensors")
    assert not [name for name in columns if name.startswith(("turn", "state"))]


def test_steps_of_versions_without_turns_are_read(tmp_path):
    """Of an older step the table has neither episodes nor policy lengths."""
    completion = Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), (), "stop", "")
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), (completion, completion), 0)
    directory = tmp_path / "step_000000"
    stored = scored(store_groups(tmp_path / "spool", [group]))
    record_step(directory, stored, 1, StepFacts(kind="rl", domains=["d"]), decode)
    old = dict(read_columns(directory / "train.safetensors"))
    old = {name: np.array(values) for name, values in old.items()}
    for name in ("policy_length", "episode"):
        del old[name]
    manifest = read_manifest(directory)
    checksum = write_columns(directory / "train.safetensors", old)
    write_manifest(directory, StepFacts(kind="rl", domains=["d"]), checksum, manifest.shards)
    table = SampleTable(directory)
    assert table.policy_lengths.tolist() == table.completion_lengths.tolist() == [3, 3]
    assert table.episode.tolist() == table.first_rows.tolist() == [0, 1]
    assert table.turns(1) == ()
    assert table.policy_tokens(1)[0].tolist() == [0, 1, 2]


def test_rows_of_an_episode_are_neighbours(tmp_path):
    completion = Completion(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), (), "stop", "")
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), (completion,) * 3, 0)
    directory = tmp_path / "step_000000"
    stored = scored(store_groups(tmp_path / "spool", [group]))
    record_step(directory, stored, 1, StepFacts(domains=["d"]), decode)
    columns = {k: np.array(v) for k, v in read_columns(directory / "train.safetensors").items()}
    columns["episode"] = np.array([0, 1, 0])
    checksum = write_columns(directory / "train.safetensors", columns)
    write_manifest(directory, StepFacts(), checksum, read_manifest(directory).shards)
    with pytest.raises(DataError, match="not neighbours"):
        SampleTable(directory)


def test_rewards_of_steps_are_in_the_last_row_of_an_episode(tmp_path):
    rng = np.random.default_rng(0)
    earlier = sequence_of([(2, True)], rng, answered_ids=(3,))
    last = sequence_of([(2, True), (1, False), (2, True)], rng)
    group = RolloutGroup(
        Prompt("p", "d", "", (1,), ""), (replace(last, earlier=(earlier,)), last), 0
    )
    [stored] = scored(store_groups(tmp_path / "spool", [group]))
    # places in the text of the last turn, which begins at token 3
    stored = replace(stored, steps=(((1, 1.0), (2, 3.0)), ((1, 2.0),)))
    record_step(tmp_path / "step_000000", [stored], 1, StepFacts(domains=["d"]), decode)
    rows, ends, rewards = SampleTable(tmp_path / "step_000000").steps
    assert (rows.tolist(), ends.tolist()) == ([1, 1, 2], [3, 4, 3])
    assert rewards.tolist() == [1.0, 3.0, 2.0]


RNG = np.random.default_rng(0)
SOUND = sequence_of([(2, True), (2, False), (1, True)], RNG)


def with_logprob(place: int, value: float) -> Completion:
    logprobs = SOUND.logprobs.copy()
    logprobs[place] = value
    return replace(SOUND, logprobs=logprobs)


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(SOUND, turns=(Turn(0, 2), Turn(1, 5))), r"turn 1 has the tokens \[1, 5\)"),
        (replace(SOUND, turns=(Turn(4, 5), Turn(0, 2))), r"turn 1 has the tokens \[0, 2\)"),
        (replace(SOUND, turns=(Turn(0, 2), Turn(4, 6))), "a response of 5"),
        (replace(SOUND, turns=(Turn(0, 2), Turn(4, 4))), r"turn 1 has the tokens \[4, 4\)"),
        (replace(SOUND, turns=(Turn(-1, 2), Turn(4, 5))), r"turn 0 has the tokens \[-1, 2\)"),
        (with_logprob(1, math.nan), "token 1 was sampled by the policy and has no log-prob"),
        (with_logprob(2, -0.5), "token 2 is the environment's and has a log-prob"),
        (replace(SOUND, logprobs=SOUND.logprobs[:4]), "4 log-probs for 5 tokens"),
        (replace(SOUND, turns=()), "token 2 was sampled by the policy and has no log-prob"),
        (replace(SOUND, earlier=(with_logprob(2, 0.0),)), "sequence 0"),
        (
            replace(SOUND, earlier=(replace(SOUND, earlier=(SOUND,)),)),
            "has earlier sequences itself",
        ),
    ],
)
def test_a_record_that_contradicts_itself_is_not_written(tmp_path, broken, message):
    group = RolloutGroup(Prompt("broken-7", "d", "", (1,), ""), (SOUND, broken), 0)
    with pytest.raises(EngineError, match=message) as caught:
        spool_groups(tmp_path / "rollout-0-000.safetensors", [group])
    assert "broken-7" in str(caught.value)
    assert not (tmp_path / "rollout-0-000.safetensors").exists()


@given(st.integers(0, 2**16))
def test_kept_ids_of_the_environment_are_not_missed(seed):
    rng = np.random.default_rng(seed)
    found = episodes.with_kept(SOUND, rng).kept_counts
    assert found == (6, 3, 0)
