"""Distributed checkpoints: saved at one layout, resumed at the same and at others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.checkpoints.retention import complete_steps, prune, sizes_match
from grpo_megatron.errors import SetupError
from tests.trainer.models import MOE, write_model
from tests.trainer.vision import write_vision_model, write_vision_samples

pytestmark = pytest.mark.engine

CASES = "tests.checkpoints.checkpoint_ranks:"
LAYOUTS = {
    "w1": (1, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "dp2": (2, {}),
    "pp2_vpp2": (2, {"pipeline_parallel_size": 2, "virtual_pipeline_parallel_size": 2}),
    "pp2_ep2": (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp2_ep2": (4, {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "cp4": (4, {"context_parallel_size": 4}),
}
CHANGES = [
    ("pp2_vpp2", "dp2"),
    ("dp2", "ep2"),
    ("pp2_ep2", "tp2_pp2"),
    ("pp2_ep2", "cp2_ep2"),
]
FURTHER_CHANGES = [
    ("tp2_pp2", "w1"),
    ("cp2", "dp2"),
    ("w1", "tp2"),
    ("tp2", "pp2"),
    ("ep2", "w1"),
    ("tp2", "pp2_ep2"),
    ("cp4", "cp2"),
    ("cp2_ep2", "w1"),
]


@pytest.fixture(scope="module")
def checkpoints(request, moe_model, samples, tmp_path_factory):
    """By layout: a checkpoint after two steps, and what the run that wrote it did next."""
    root, found = tmp_path_factory.mktemp("checkpoints"), {}

    def saved(layout: str) -> tuple[str, dict]:
        if layout not in found:
            size, parallel = LAYOUTS[layout]
            directory = str(root / layout / "step_000002")
            group = request.getfixturevalue(f"world{size}")
            found[layout] = (
                directory,
                group.run(
                    CASES + "save_after",
                    model=moe_model,
                    samples=samples,
                    layout=parallel,
                    directory=directory,
                    steps=2,
                ),
            )
        return found[layout]

    return saved


@pytest.fixture(scope="module")
def resume(request, moe_model, samples):
    def run(case: str, layout: str, directory: str) -> dict:
        size, parallel = LAYOUTS[layout]
        return request.getfixturevalue(f"world{size}").run(
            CASES + case, model=moe_model, samples=samples, layout=parallel, directory=directory
        )

    return run


def assert_same_weights(found: dict, expected: dict, tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        worst, scale = np.abs(found[name] - tensor).max(), max(np.abs(tensor).max(), 1e-3)
        assert worst <= tolerance * scale, f"{name}: {worst} of {scale}"


@pytest.mark.parametrize(
    "layout",
    [
        "dp2",
        "pp2_ep2",
        *(
            pytest.param(name, marks=pytest.mark.matrix)
            for name in ("w1", "tp2", "pp2_vpp2", "cp2")
        ),
    ],
)
@pytest.mark.parametrize("case", ["resume_fresh", "resume_from"])
def test_the_same_layout_goes_on_bit_for_bit(checkpoints, resume, layout, case):
    """Three steps: a wrong optimizer state shows in the second resumed one at the earliest."""
    directory, expected = checkpoints(layout)
    found = resume(case, layout, directory)
    assert found["metrics"] == expected["metrics"]
    assert_same_weights(found["tensors"], expected["tensors"])
    assert len({metrics["grad/norm"] for metrics in found["metrics"]}) == 3


@pytest.mark.parametrize(
    ("before", "after"),
    [*CHANGES, *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in FURTHER_CHANGES)],
    ids=lambda layout: layout,
)
def test_another_layout_goes_on_alike(checkpoints, resume, before, after):
    directory, expected = checkpoints(before)
    found = resume("resume_from", after, directory)
    assert found["state"] == {"step": 2}
    assert_same_weights(found["saved"], expected["saved"])  # bit for bit
    for mine, theirs in zip(found["metrics"], expected["metrics"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    assert_same_weights(found["tensors"], expected["tensors"], 1e-4)


@pytest.mark.parametrize("layout", ["w1", "ep2"])
def test_an_optimizer_that_never_stepped(request, resume, moe_model, samples, tmp_path, layout):
    size, parallel = LAYOUTS[layout]
    directory = str(tmp_path / "step_000000")
    expected = request.getfixturevalue(f"world{size}").run(
        CASES + "save_after",
        model=moe_model,
        samples=samples,
        layout=parallel,
        directory=directory,
        steps=0,
    )
    found = resume("resume_fresh", layout, directory)
    assert found["metrics"] == expected["metrics"]
    assert_same_weights(found["tensors"], expected["tensors"])


@pytest.mark.parametrize(
    ("interval", "references", "precision"),
    [(0, [1], "float32"), (1, [1, 2], "float32"), (1, [1, 2], "bfloat16")],
    ids=["never refreshed", "refreshed by every step", "an average finer than its dtype"],
)
def test_reference_weights_are_saved_once_and_resumed(
    world2, moe_model, samples, tmp_path, interval, references, precision
):
    found = world2.run(
        CASES + "resume_with_reference",
        model=moe_model,
        samples=samples,
        layout={"num_ranks": 2, "pipeline_parallel_size": 2},
        root=str(tmp_path),
        interval=interval,
        precision=precision,
    )
    assert found["files"] == [
        *(f"reference_step_{n:06d}" for n in references),
        *(f"step_{n:06d}" for n in (1, 2, 3)),
    ]
    has_remainder = (tmp_path / "reference_step_000001" / "remainder").is_dir()
    assert has_remainder == (precision == "bfloat16")
    assert found["loaded"] == found["state"]
    assert found["found"] == found["expected"] and found["found"]["reference/k3"] > 0
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        f"reference_step_{references[-1]:06d}",
        "step_000003",
    ]


@pytest.mark.parametrize("distributed", [True, False])
def test_an_optimizer_goes_on_by_other_settings(world2, moe_model, samples, tmp_path, distributed):
    """Its moments are those of the checkpoint; rates, decay and betas are the recipe's."""
    found = world2.run(
        CASES + "load_with_other_settings",
        model=moe_model,
        samples=samples,
        layout={"expert_parallel_size": 2, "distributed_optimizer": distributed},
        directory=str(tmp_path / "step_000001"),
    )
    assert found["is_equal"] and found["num_moments"] > 10
    assert {wd_mult for wd_mult, *_ in found["settings"]} == {0.0, 1.0}
    for wd_mult, weight_decay, betas, eps in found["settings"]:
        assert weight_decay == 0.02 * wd_mult  # norms and biases do not decay
        assert (betas, eps) == ((0.8, 0.9), 1e-6)


def test_a_run_that_begins_with_a_checkpoint_has_whole_ones(world1, moe_model, tmp_path):
    """Side files of the one it begins with are copied; its list of digests is none of them."""
    corrupt, loaded = world1.run(
        CASES + "saves_after_a_checkpoint", model=moe_model, root=str(tmp_path)
    )
    assert corrupt == [] and loaded == {"step": 1}
    assert sizes_match(tmp_path / "second" / "step_000001")
    written = json.loads((tmp_path / "second" / "step_000001" / "digests.json").read_text())
    assert "digests.json" not in written and "config.json" in written


@pytest.fixture
def copy(checkpoints, tmp_path) -> Path:
    directory, _ = checkpoints("w1")
    return Path(shutil.copytree(directory, tmp_path / "step_000002"))


def _refusal(world1, model: str, directory: Path) -> str:
    found = world1.run(CASES + "load_refusal", model=model, directory=str(directory))
    assert found is not None, "it was loaded"
    return found


def test_without_its_mark_a_checkpoint_does_not_exist(world1, moe_model, copy):
    (copy / "complete.json").unlink()
    assert "not a complete checkpoint" in _refusal(world1, moe_model, copy)
    assert complete_steps(copy.parent) == []


@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_damaged_weights_are_refused(world1, moe_model, copy, damage):
    file = max((copy / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    found = _refusal(world1, moe_model, copy)
    assert "cannot load" in found and str(copy) in found


def test_a_flipped_bit_is_found_and_the_older_checkpoint_kept(world1, copy):
    older = Path(shutil.copytree(copy, copy.with_name("step_000001")))
    file = max((copy / "weights").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    assert world1.run(CASES + "damaged_files", directory=str(copy)) == [f"weights/{file.name}"]
    assert world1.run(CASES + "damaged_files", directory=str(older)) == []
    file.write_bytes(data[:-1])
    assert prune(copy.parent, keep=1) == [] and older.exists()  # the newest is not whole


def test_a_checkpoint_of_another_model_is_refused(world1, copy, tmp_path):
    other = write_model(tmp_path / "other", MOE | {"moe_intermediate_size": 64}, 1)
    assert "cannot load" in _refusal(world1, other, copy)


def test_leftovers_of_a_killed_save_are_replaced(world1, moe_model, samples, tmp_path):
    directory = tmp_path / "step_000000"
    leftover = tmp_path / "step_000000.tmp" / "weights"
    leftover.mkdir(parents=True)
    (leftover / "__0_0.distcp").write_text("half")
    world1.run(
        CASES + "save_after",
        model=moe_model,
        samples=samples,
        layout={},
        directory=str(directory),
        steps=0,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["step_000000"]
    assert complete_steps(tmp_path) == [0]


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_is_told_by_every_rank(world2, moe_model, tmp_path, full_rank):
    directory = tmp_path / "step_000001"
    text, exit_code = world2.run(
        CASES + "failed_save",
        model=moe_model,
        layout={"tensor_parallel_size": 2},
        directory=str(directory),
        full_rank=full_rank,
    )
    assert "could not be written" in text and "make room and resume" in text
    assert exit_code == SetupError.exit_code
    assert not directory.exists()
    assert complete_steps(tmp_path) == []


def test_only_the_newest_complete_checkpoints_are_kept(tmp_path):
    for step in (2, 10, 100, 1000):
        (tmp_path / f"step_{step:06d}").mkdir()
        if step != 100:
            (tmp_path / f"step_{step:06d}" / "complete.json").write_text("{}")
            (tmp_path / f"step_{step:06d}" / "digests.json").write_text("{}")
    (tmp_path / "step_000200.tmp").mkdir()
    (tmp_path / "step_000010" / "complete.json").write_text('{"reference": "reference_step_2"}')
    for name in ("reference_step_2", "reference_step_9", "reference_step_9.tmp"):
        (tmp_path / name).mkdir()
    assert complete_steps(tmp_path) == [2, 10, 1000]
    assert prune(tmp_path, keep=2) == [2]
    assert complete_steps(tmp_path) == [10, 1000]
    assert [path.name for path in tmp_path.glob("reference_*")] == ["reference_step_2"]
    assert complete_steps(tmp_path / "absent") == []


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory) -> str:
    return write_vision_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture(scope="module")
def seen_samples(seeing_model, tmp_path_factory) -> str:
    return write_vision_samples(tmp_path_factory.mktemp("vision") / "step_000000", seeing_model)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("tp2", "dp2"),
        ("pp2", "tp2"),
        ("dp2", "tp2_pp2"),
        ("tp2_pp2", "w1"),
        ("dp2", "dp2"),
        ("cp2", "pp2"),
    ],
)
def test_a_trained_tower_goes_on_at_another_layout(
    request, seeing_model, seen_samples, tmp_path, before, after
):
    """With its optimizer state: a wrong one shows in the second resumed step at the earliest."""
    found = []
    directory = str(tmp_path / "step_000002")
    for case, layout, more in (
        ("save_after", before, {"steps": 2}),
        ("resume_fresh", after, {}),
    ):
        size, parallel = LAYOUTS[layout]
        group = request.getfixturevalue(f"world{size}")
        parallel = {**parallel, "vision_tower": "trained", "max_tokens_per_microbatch": 128}
        done = group.run(
            CASES + case,
            model=seeing_model,
            samples=seen_samples,
            layout=parallel,
            directory=directory,
            **more,
        )
        found.append(done)
    expected, resumed = found
    for ours, theirs in zip(resumed["metrics"], expected["metrics"], strict=True):
        assert ours["grad/norm"] == pytest.approx(theirs["grad/norm"], rel=1e-5)
    assert_same_weights(resumed["tensors"], expected["tensors"], 1e-4)
    moved = []
    for name, tensor in expected["saved"].items():
        if name.startswith("visual."):
            moved.append(np.abs(expected["tensors"][name] - tensor).max())
    assert len(moved) > 20 and min(moved) > 0
