"""Shards on their way into the store: what is read of them, and what damage does."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.spool import (
    SampleRecord,
    ShardReport,
    SpoolDirectory,
    StoredShard,
    link_shard,
    spool_groups,
    store_groups,
)
from grpo_megatron.batching.store import SampleRow, SampleTable, begin_step, finish_step
from grpo_megatron.errors import DataError, SetupError
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    SamplingMask,
    VersionSpan,
)

SHAPE = RouteShape((0, 1), 2, 8)


def made(number: int, lengths=(3, 0, 5), text: str = "é\ud800x", routes: bool = False):
    """A group with texts that are not ASCII, and half of a surrogate pair."""
    completions = []
    for length in lengths:
        ids = np.arange(length, dtype=np.int32) + 10 * number
        found, versions = None, ()
        if routes and length:
            found = np.tile(np.array([1, 3], np.uint8), (2 + length - 1, 2, 1))
            versions = (VersionSpan(4, 0, 2 + length - 1),)
        completions.append(
            Completion(
                ids,
                -ids.astype(np.float32),
                (VersionSpan(4, 0, length),) if length else (),
                "stop",
                f"{text}{number}.{length}",
                found,
                versions,
            )
        )
    prompt = Prompt(f"p{number}", "d", "", (number, 2), "")
    return RolloutGroup(prompt, tuple(completions), number % 2)


def test_a_record_reads_what_was_written(tmp_path):
    groups = [made(number) for number in range(3)]
    for given, found in zip(groups, store_groups(tmp_path / "a", groups), strict=True):
        assert (found.prompt, found.replica) == (given.prompt, given.replica)
        for completion, stored in zip(given.completions, found.completions, strict=True):
            assert stored.token_ids.tolist() == completion.token_ids.tolist()
            assert stored.num_tokens == completion.num_tokens
            assert stored.text == completion.text
            assert stored.versions == completion.versions
            assert stored.kept_counts is None and not stored.truncated


def test_what_an_environment_counted_is_in_the_record(tmp_path):
    given = made(1).completions[0]
    counted = replace(
        given, outcome=1.0, outcome_metrics={"calls": 2, "share": 0.5, "unknown": math.nan}
    )
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), (counted, given), 0)
    report = spool_groups(tmp_path / "rollout-0-000.safetensors", [group])
    sent = msgspec.json.encode(report)
    shard = StoredShard(SpoolDirectory(tmp_path / "a"), msgspec.json.decode(sent, type=ShardReport))
    first, second = shard.completions()
    assert first.outcome_metrics == {"calls": 2, "share": 0.5} and second.outcome_metrics == {}

    record = json.loads(sent)["samples"][0]
    older = msgspec.convert(record[:-1], SampleRecord)  # as workers wrote it before
    assert older.outcome == 1.0 and older.outcome_metrics == {}


def test_counts_of_kept_ids(tmp_path):
    kept = SamplingMask(np.zeros(6, np.int32), np.array([0, 2, 2, 6]))
    completion = Completion(
        np.zeros(3, np.int32), np.zeros(3, np.float32), (), "length", "", kept=kept
    )
    group = RolloutGroup(Prompt("p", "d", "", (1,), ""), (completion,), 0)
    [[stored]] = [g.completions for g in store_groups(tmp_path / "a", [group])]
    assert stored.kept_counts == completion.kept_counts == (6, 2, 1)
    assert stored.truncated


def test_two_writers_with_one_name(tmp_path):
    """The second one is told, and what the first one wrote stays."""
    path = tmp_path / "rollout-0-000.safetensors"
    spool_groups(path, [made(1, routes=True)], SHAPE)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with pytest.raises(SetupError, match="File exists"):
        spool_groups(path, [made(2, routes=True)], SHAPE)
    after = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert {name for name in after if not name.endswith(".texts")} == {
        name for name in before if not name.endswith(".texts")
    }
    assert all(after[name] == before[name] for name in before if not name.endswith(".texts"))


def step_of(tmp_path: Path, groups) -> Path:
    """A recorded step of spooled groups."""
    stored = store_groups(tmp_path / "spool", groups, SHAPE)
    shard = stored[0].completions[0].shard
    directory = tmp_path / "step_000000"
    entry = link_shard(shard, begin_step(directory) / "rollout-0.safetensors")
    count = sum(len(group.completions) for group in groups)
    rows = [SampleRow(0, index, 0, 0, 0.0) for index in range(count)]
    finish_step(directory, [entry], rows, StepFacts(domains=["d"]))
    return directory


def test_a_linked_shard_is_read_with_its_routes(tmp_path):
    directory = step_of(tmp_path, [made(1, routes=True), made(2, routes=True)])
    assert not (tmp_path / "spool").exists()
    table = SampleTable(directory)
    ids, status = table.routes(5, [0, 1], SHAPE)
    assert (status == 0).all() and ids.shape == (2, 6, 2)
    assert table.completion(5)[0].tolist() == [20, 21, 22, 23, 24]


@pytest.mark.parametrize("damage", ["truncated", "flipped", "gone"])
def test_damage_is_found_before_anything_is_trained(tmp_path, damage):
    directory = step_of(tmp_path, [made(1, routes=True)])
    path = directory / "rollout-0.safetensors"
    data = bytearray(path.read_bytes())
    path.unlink()
    if damage == "truncated":
        path.write_bytes(data[:-4])
    elif damage == "flipped":
        data[-3] ^= 1
        path.write_bytes(data)
    with pytest.raises(DataError, match=r"rollout-0.safetensors is missing or its checksum"):
        SampleTable(directory)


def test_a_flipped_byte_of_routes_is_corrupt_for_its_tokens_alone(tmp_path):
    directory = step_of(tmp_path, [made(1, routes=True)])
    path = directory / "rollout-0.routes"
    data = bytearray(path.read_bytes())
    data[0] ^= 4
    path.unlink()
    path.write_bytes(data)
    _, status = SampleTable(directory).routes(0, [0, 1], SHAPE)
    assert (status == 3).all()  # one block holds them all


def test_a_table_opens_the_shards_that_are_asked_for(tmp_path):
    """Lengths are in the rows: whoever plans opens no shard."""
    directory = tmp_path / "step_000000"
    working = begin_step(directory)
    entries, rows = [], []
    for number in range(3):
        [group] = store_groups(tmp_path / str(number), [made(number, routes=True)], SHAPE)
        path = working / f"rollout-{number}.safetensors"
        entries.append(link_shard(group.completions[0].shard, path))
        for index, completion in enumerate(group.completions):
            lengths = (2, completion.num_tokens)
            rows.append(SampleRow(number, index, number, 0, 0.0, 0, False, *lengths))
    finish_step(directory, entries, rows, StepFacts(domains=["d"]))
    for number in (0, 2):
        (directory / f"rollout-{number}.safetensors").unlink()
    table = SampleTable(directory, verify=False)
    assert table.completion_lengths.tolist() == [3, 0, 5] * 3
    assert table.prompt_lengths.tolist() == [2] * 9
    assert table.route_shapes == [SHAPE] * 3
    assert table.completion(5)[0].tolist() == [10, 11, 12, 13, 14]
    assert not table.routes(5, [1], SHAPE)[1].any()
    with pytest.raises(DataError, match=r"rollout-0.safetensors"):
        table.completion(0)


def test_without_hard_links_bytes_are_copied(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    directory = step_of(tmp_path, [made(1, routes=True)])
    assert SampleTable(directory).completion(0)[0].tolist() == [10, 11, 12]


def test_a_directory_that_exists_is_refused(tmp_path):
    with pytest.raises(SetupError, match="File exists"):
        SpoolDirectory(tmp_path)


KILLED = """
import sys
from pathlib import Path
from tests.batching.test_spool import SHAPE, made
from grpo_megatron.batching.spool import spool_groups
group = made(1, lengths=(200_000,) * 8, routes=True)
for number in range(1000):
    spool_groups(Path(sys.argv[1]) / f"rollout-0-{number:03d}.safetensors", [group], SHAPE)
    print(number, flush=True)
"""


def test_a_writer_killed_in_mid_shard_leaves_no_half_shard(tmp_path):
    """Whatever has its name is whole, and everything that was reported is there."""
    writer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    reported = [int(writer.stdout.readline()) for _ in range(3)]
    time.sleep(0.02)
    os.kill(writer.pid, signal.SIGKILL)
    reported += [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    whole = sorted(tmp_path.glob("rollout-0-*.safetensors"))
    assert len(whole) >= len(reported)
    sizes = {path.stat().st_size for path in whole}
    routes = {path.with_suffix(".routes").stat().st_size for path in whole}
    assert len(sizes) == len(routes) == 1
