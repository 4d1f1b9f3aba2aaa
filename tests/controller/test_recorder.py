"""Where samples and step rewards land in the store."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.batching.image_folder import IMAGES, ImageFolder
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.controller.recorder import (
    prune_images,
    prune_store,
    record_completions,
    record_step,
    starting_steps,
    steps_in,
    token_at,
)
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Completion, Prompt, RolloutGroup, ScoredGroup, VersionSpan
from tests.controller.scored_groups import recipe, stored

WORDS = {0: "", 1: "a", 2: "bc", 3: "def"}


def decode(ids) -> str:
    return "".join(WORDS[i] for i in ids)


@pytest.mark.parametrize(
    ("end", "token"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 3), (6, 3), (99, 3)]
)
def test_the_token_that_reaches_a_place(end, token):
    assert token_at(np.array([1, 2, 0, 3]), end, decode) == token


def decode_bytes(ids) -> str:
    """As a byte-level tokenizer does: an incomplete character is U+FFFD."""
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("text", ["ab\n\ncd", "你好。\n\n好", "x 😀\n\ny", "é\n\né", "👍🏽é"])
def test_a_character_of_several_tokens_ends_at_its_last(text):
    ids = np.frombuffer(text.encode(), np.uint8)
    for end in range(1, len(text) + 1):
        whole = len(text[:end].encode())
        assert token_at(ids, end, decode_bytes) == whole - 1


@pytest.mark.parametrize(
    ("text", "end", "token"),
    [
        ("ab 漢".encode()[:-1], 4, 4),  # cut behind its second byte of three
        ("ab 漢".encode()[:-1], 3, 2),
        ("ab 😀".encode()[:-1] + b"\0", 4, 5),  # then a token without text
        ("漢".encode()[:2] + "漢a".encode(), 1, 1),  # a whole one behind it
        ("a\ufffdb".encode(), 2, 3),  # the character that stands for others, as itself
        (b"\xe6\xe6", 1, 0),
    ],
)
def test_a_cut_character_ends_at_its_last_token(text, end, token):
    def decode_some(ids) -> str:
        return decode_bytes(identity for identity in ids if identity)

    ids = np.frombuffer(text, np.uint8)
    assert token_at(ids, end, decode_some) == token


def scored(name, completions, steps=(), replica=0):
    group = RolloutGroup(Prompt(name, "d", "", (1,), ""), completions, replica)
    rewards = np.arange(len(completions), dtype=float)
    return ScoredGroup(group, {"r": rewards}, rewards, steps)


def completion(*ids):
    return Completion(
        np.array(ids, np.int32),
        np.zeros(len(ids), np.float32),
        (VersionSpan(0, 0, len(ids)),),
        "stop",
        decode(ids),
    )


def record(directory, groups, num_updates=1) -> SampleTable:
    groups = stored(directory.with_name("rollouts"), groups)
    record_step(directory, groups, num_updates, StepFacts(domains=["d"]), decode)
    return SampleTable(directory)


def test_steps_are_recorded_by_row(tmp_path):
    row, end, reward = record(
        tmp_path / "step_000001",
        [
            scored(
                "p",
                (
                    completion(1, 2),
                    completion(
                        3,
                    ),
                ),
                (((1, 0.5), (3, 0.25)), ()),
            ),
            scored("q", (completion(2, 3), completion())),
            scored("s", (completion(3, 1), completion()), (((4, 1.0),), ((0, 9.0),))),
        ],
    ).steps
    assert list(zip(row.tolist(), end.tolist(), reward.tolist(), strict=True)) == [
        (0, 0, 0.5),
        (0, 1, 0.25),
        (4, 1, 1.0),
    ]


def test_a_step_is_made_of_the_shards_of_its_groups(tmp_path):
    """Of three shards one has no group that is trained; in the others not every group is."""
    groups = [scored(f"p{i}", (completion(i % 3 + 1), completion(i % 2 + 1))) for i in range(7)]
    in_store = [
        *stored(tmp_path / "b", groups[:3]),
        *stored(tmp_path / "a", groups[3:5]),
        *stored(tmp_path / "c", groups[5:]),
    ]
    chosen = [6, 0, 5, 2]
    trained = [in_store[number] for number in chosen]
    files = [Path(trained[0].group.completions[0].stored_token_ids.path), tmp_path / "b"]
    record_step(tmp_path / "step", trained, 1, StepFacts(domains=["d"]), decode)
    assert (tmp_path / "step/rollout-0.safetensors").samefile(files[0])  # no byte was copied
    del in_store, trained
    assert not files[1].exists()  # forgotten, and with it what was not trained
    table = SampleTable(tmp_path / "step")
    names = ["rollout-0.safetensors", "rollout-1.safetensors"]
    assert sorted(path.name for path in (tmp_path / "step").glob("rollout-*")) == names
    for row in range(8):
        ids, _ = table.completion(row)
        wanted = groups[chosen[row // 2]].group.completions[row % 2]
        assert ids.tolist() == wanted.token_ids.tolist()
    assert table.group.tolist() == [row // 2 for row in range(8)]


@pytest.mark.parametrize(
    ("num_groups", "updates", "wanted"),
    [(6, 2, [0, 0, 0, 1, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (2, 4, [0, 1])],
)
def test_updates_are_contiguous_and_nearly_equal(tmp_path, num_groups, updates, wanted):
    groups = [scored(f"p{i}", (completion(1),)) for i in range(num_groups)]
    assert record(tmp_path / "step", groups, updates).update.tolist() == wanted


@pytest.mark.parametrize(
    ("checkpoints", "cold_start", "starts"),
    [([], None, [0]), ([2, 4], None, [0, 2, 4]), ([0, 2], None, [0, 2]), ([2, 4], {}, [2, 4])],
)
def test_a_run_without_a_cold_start_can_be_computed_from_its_beginning(
    tmp_path, checkpoints, cold_start, starts
):
    run_dir = RunDir(tmp_path)
    for step in checkpoints:
        directory = run_dir.step_checkpoint(step)
        directory.mkdir(parents=True)
        (directory / "complete.json").write_text("{}")
    assert starting_steps(recipe(cold_start=cold_start), run_dir) == starts


def test_images_go_with_the_last_step_that_has_them(tmp_path):
    run_images = ImageFolder(tmp_path / "images")
    store = tmp_path / "store"
    of_step = {}
    for step, pictures in enumerate([(b"a", b"b"), (b"b", b"c"), (b"d",)]):
        of_step[step] = {run_images.keep(content) for content in pictures}
        folder = ImageFolder(store / f"step_{step:06d}" / IMAGES)
        run_images.link_to(folder, of_step[step])
    run_images.keep(b"of no step")
    (run_images.path / "tmp1234").write_bytes(b"of a process that was killed")

    def left() -> set[str]:
        return {file.name for file in run_images.path.iterdir()}

    prune_images(run_images.path, store)
    assert left() == of_step[0] | of_step[1] | of_step[2]
    prune_store(store, [1], keep=1, present=3)
    prune_images(run_images.path, store)
    assert left() == of_step[1] | of_step[2]
    for digest in of_step[1]:  # those of steps are whole
        assert ImageFolder(store / "step_000001" / IMAGES).read(digest)
    prune_images(tmp_path / "absent", store)


@given(
    starts=st.lists(st.integers(0, 30), max_size=4, unique=True).map(sorted),
    recorded=st.sets(st.integers(0, 30)),
    keep=st.integers(0, 5),
    present=st.integers(0, 30),
)
def test_no_step_goes_that_is_still_to_be_trained(starts, recorded, keep, present):
    """Also where a start lies ahead: a checkpoint that a resume has passed over as damaged."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        for step in recorded:
            (store / f"step_{step:06d}").mkdir()
        prune_store(store, starts, keep, present=present)
        left = {step for step, _ in steps_in(store)}
    assert {step for step in recorded if step >= present} <= left <= recorded
    if starts and starts[-1] <= present:
        assert {step for step in recorded if step >= starts[-1]} <= left


def test_completions_have_the_numbers_of_their_domains(tmp_path):
    """Those of the recipe's; and the engines that answered."""
    samples = []
    for domain in ("code", "math", "code"):
        samples.append((0, Prompt("p", domain, "", (1,), ""), completion(1, 2)))
    record_completions(tmp_path / "checked", samples, "engine", domains=["math", "code"])
    table = SampleTable(tmp_path / "checked")
    assert table.domain.tolist() == [1, 0, 1]
    assert table.manifest.domains == ["math", "code"]
    assert table.manifest.engines == ["engine"] * 3
    record_completions(tmp_path / "unnamed", samples)
    assert SampleTable(tmp_path / "unnamed").domain.tolist() == [0, 0, 0]
