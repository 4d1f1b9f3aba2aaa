"""What is written of a step is read again; what is no manifest is refused with its place."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batching.manifest import (
    FORMAT,
    MANIFEST_FILE,
    Manifest,
    ShardEntry,
    StepFacts,
    is_recorded,
    read_manifest,
    write_manifest,
)
from grpo_megatron.errors import DataError
from grpo_megatron.routing.shape import RouteShape

FACTS = StepFacts(
    kind="rl",
    step=7,
    version=6,
    stale=True,
    domains=["math", "code"],
    verified_replicas=[0, 2],
    sampler={"order": {"math": [3, 1]}, "epoch": 1},
    metrics={"reward/mean": math.nan, "sampling/skipped_steps": 0.0},
    extremes=[{"rank": "best", "reward": 1.0, "group": 3, "index": 0}],
    dropped_rewards={"math": [0.0, math.nan]},
)
SHARDS = [
    ShardEntry(name="rollout-0.safetensors", checksum="ab"),
    ShardEntry(
        name="rollout-2.safetensors",
        checksum="cd",
        routes=RouteShape(layers=(1, 3), num_experts=300, experts_per_token=8),
    ),
]


def test_what_is_written_is_read_again(tmp_path):
    assert not is_recorded(tmp_path)
    write_manifest(tmp_path, FACTS, "ef", SHARDS)
    assert is_recorded(tmp_path)
    found = read_manifest(tmp_path)
    expected = Manifest(
        **msgspec.structs.asdict(FACTS), format=FORMAT, train_checksum="ef", shards=SHARDS
    )
    assert repr(found) == repr(expected)  # not-a-number equals nothing
    assert found.checksums == {
        "train.safetensors": "ef",
        "rollout-0.safetensors": "ab",
        "rollout-2.safetensors": "cd",
    }


@pytest.mark.parametrize(("skipped", "expected"), [(0.0, False), (1.0, True), (3.0, True)])
def test_a_step_without_a_group_is_skipped(skipped, expected):
    assert StepFacts(metrics={"sampling/skipped_steps": skipped}).is_skipped is expected


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda text: text[:-9], "not a recorded step"),
        (lambda text: "[]", "sample store format None"),
        (lambda text: text.replace(f'"format": {FORMAT}', '"format": 99'), "format 99, this"),
        (lambda text: text.replace('"step": 7', '"step": "7th"'), r"`\$\.step`"),
        (lambda text: text.replace('"name": "rollout-2', '"file": "rollout-2'), r"\$\.shards\[1\]"),
    ],
)
def test_what_is_no_manifest_is_refused(tmp_path, damage, expected):
    write_manifest(tmp_path, FACTS, "ef", SHARDS)
    file = tmp_path / MANIFEST_FILE
    file.write_text(damage(file.read_text()))
    with pytest.raises(DataError, match=expected) as caught:
        read_manifest(tmp_path)
    assert str(tmp_path) in str(caught.value.where)


def test_fields_of_another_version_are_passed_over(tmp_path):
    """An older step names its verified replicas otherwise: a resume checks its engines anew."""
    write_manifest(tmp_path, FACTS, "ef", SHARDS)
    file = tmp_path / MANIFEST_FILE
    values = json.loads(file.read_text())
    del values["checksum"]  # neither did it have one
    values["proven"] = values.pop("verified_replicas")
    file.write_text(json.dumps(values))
    assert read_manifest(tmp_path).verified_replicas == []


@given(st.data())
def test_a_flipped_bit_is_refused_or_changes_nothing(data):
    """In a blank, or in the name of the checksum, it changes no value."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_manifest(directory, FACTS, "ef", SHARDS)
        file = directory / MANIFEST_FILE
        whole = repr(read_manifest(directory))
        content = bytearray(file.read_bytes())
        place = data.draw(st.integers(0, len(content) - 1))
        content[place] ^= 1 << data.draw(st.integers(0, 7))
        file.write_bytes(content)
        try:
            found = read_manifest(directory)
        except DataError as error:
            assert str(directory) in str(error.where)
        else:
            assert repr(found) == whole


def test_another_value_is_refused_and_without_a_checksum_taken(tmp_path):
    """The manifest of an earlier release has none."""
    write_manifest(tmp_path, FACTS, "ef", SHARDS)
    file = tmp_path / MANIFEST_FILE
    values = json.loads(file.read_text())
    values["sampler"]["epoch"] = 3
    file.write_text(json.dumps(values))
    with pytest.raises(DataError, match="not as it was written"):
        read_manifest(tmp_path)
    del values["checksum"]
    file.write_text(json.dumps(values))
    assert read_manifest(tmp_path).sampler["epoch"] == 3


def test_a_manifest_that_is_nested_too_deep_is_refused(tmp_path):
    (tmp_path / MANIFEST_FILE).write_text("[" * 200_000)
    with pytest.raises(DataError, match="not a recorded step"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("values", [{"a": [1.0, -0.0, math.inf]}, {"b": "\ud800"}, {"c": 10**30}])
def test_what_json_can_hold_is_summed_up(tmp_path, values):
    facts = msgspec.structs.replace(FACTS, sampler={1: values})
    write_manifest(tmp_path, facts, "ef", SHARDS)
    assert read_manifest(tmp_path).sampler == {"1": values}
