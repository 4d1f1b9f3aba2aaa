"""A checkpoint that would run code is refused by the name of what it would run."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

import grpo_megatron
from grpo_megatron.checkpoints.durable import explained
from grpo_megatron.checkpoints.plain_pickles import plain_data_only
from grpo_megatron.checkpoints.retention import DIGESTS
from grpo_megatron.errors import CheckpointError

CASES = "tests.checkpoints.checkpoint_ranks:"
REFUSED = r"it names (posix|os)\.mkdir, which no checkpoint needs"


class Harm:
    """As a pickle: makes a directory where it is read."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def saved(directory: Path, **more) -> Path:
    state = {"weight": torch.arange(6.0).bfloat16(), **more}
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)
    return directory


def loaded(directory: Path, **more) -> dict:
    state = {"weight": torch.zeros(6).bfloat16(), **more}
    with explained("cannot load", directory), plain_data_only(directory):
        dcp.load(state, checkpoint_id=str(directory), no_dist=True)
    return state


def test_plain_checkpoints_are_read(tmp_path):
    state = loaded(saved(tmp_path / "c", step=[1, {"a": 2}]), step=[0, {"a": 0}])
    assert state["step"] == [1, {"a": 2}]
    assert state["weight"].tolist() == list(range(6))


def test_an_index_that_would_run_code(tmp_path):
    directory = saved(tmp_path / "c")
    harm = tmp_path / "harm"
    (directory / ".metadata").write_bytes(pickle.dumps(Harm(harm)))
    with pytest.raises(CheckpointError, match=REFUSED):
        loaded(directory)
    assert not harm.exists()
    with contextlib.suppress(AttributeError):
        FileSystemReader(directory).read_metadata()  # what torch itself does
    assert harm.exists()


def test_an_object_beside_the_tensors_that_would_run_code(tmp_path):
    harm = tmp_path / "harm"
    directory = saved(tmp_path / "c", step=Harm(harm))
    with pytest.raises(CheckpointError, match=REFUSED) as caught:
        loaded(directory, step=None)
    assert not harm.exists()
    assert "weights_only" not in str(caught.value)  # torch's advice: load it without a guard


@pytest.mark.parametrize(
    "source",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"ctorch\nload\n(S'x'\ntR.",
        b"ctorch.serialization\nload\n(S'x'\ntR.",
        b"\x80\x04\x8c\x05torch\x8c\x0ehub.load_local\x93.",
        b"\x80\x04\x8c\x05torch\x8c\x11float32.__class__\x93.",
        b"ctorch.distributed.checkpoint.metadata\nos\n.",
        b"ctorch.distributed.checkpoint.planner\noperator\n.",
    ],
    ids=["os", "eval", "torch.load", "serialization", "dotted", "constant", "import", "planner"],
)
def test_whatever_else_an_index_names(tmp_path, source):
    directory = saved(tmp_path / "c")
    (directory / ".metadata").write_bytes(source)
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        loaded(directory)


def test_an_index_that_is_cut_short_is_told_otherwise(tmp_path):
    directory = saved(tmp_path / "c")
    index = directory / ".metadata"
    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="cannot load") as caught:
        loaded(directory)
    assert "could run code" not in str(caught.value)


def test_the_guard_ends_with_the_block(tmp_path, monkeypatch):
    with plain_data_only(tmp_path):
        assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "1"
        assert dcp.filesystem.pickle is not pickle
    assert "TORCH_FORCE_WEIGHTS_ONLY_LOAD" not in os.environ
    assert dcp.filesystem.pickle is pickle
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "y")
    with plain_data_only(tmp_path):
        pass
    assert os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] == "y"


@pytest.fixture(scope="module")
def whole(world1, moe_model, samples, tmp_path_factory) -> Path:
    """A checkpoint of a run."""
    directory = tmp_path_factory.mktemp("whole") / "step_000001"
    world1.run(
        CASES + "save_after",
        model=moe_model,
        samples=samples,
        layout={},
        directory=str(directory),
        steps=0,
    )
    for file in Path(moe_model).glob("*.json"):
        shutil.copyfile(file, directory / file.name)
    return directory


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_a_resume_runs_nothing_of_a_checkpoint(world1, moe_model, whole, tmp_path, file):
    directory = Path(shutil.copytree(whole, tmp_path / whole.name))
    harm = tmp_path / "harm"
    if file == ".metadata":
        (directory / "weights" / file).write_bytes(pickle.dumps(Harm(harm)))
    else:  # of another release: this one looks for it and finds none
        torch.save({"args": Harm(harm)}, directory / "weights" / file)
    found = world1.run(CASES + "load_refusal", model=moe_model, directory=str(directory))
    assert found is not None and "mkdir, which no checkpoint needs" in found
    assert str(directory) in found and not harm.exists()


@pytest.mark.parametrize("part", ["index", "tensors"])
def test_a_conversion_runs_nothing_of_a_checkpoint(world1, whole, moe_model, tmp_path, part):
    directory = Path(shutil.copytree(whole, tmp_path / whole.name))
    (directory / DIGESTS).unlink()  # who means harm leaves no digest that tells of it
    harm = tmp_path / "harm"
    if part == "index":
        (directory / "weights" / ".metadata").write_bytes(pickle.dumps(Harm(harm)))
    else:
        _replace_tensors(directory / "weights", Harm(harm))
    job = {
        "source": str(directory),
        "target": str(tmp_path / "out"),
        "to": "hf",
        "layout": {},
        "shard_bytes": 100_000,
        "probe": False,
    }
    found = world1.run(CASES + "convert", job=job, file_limit=None, free_bytes=None)
    assert found[:2] == ("CheckpointError", 8)
    assert "mkdir, which no checkpoint needs" in found[2]
    assert not harm.exists() and not (tmp_path / "out").exists()


def _replace_tensors(weights: Path, harm: Harm) -> None:
    """Have every place of a checkpoint hold something else."""
    torch.save(harm, weights / "harm.distcp")
    length = (weights / "harm.distcp").stat().st_size
    index = FileSystemReader(weights).read_metadata()
    for key, place in index.storage_data.items():
        changed = {"relative_path": "harm.distcp", "offset": 0, "length": length}
        index.storage_data[key] = type(place)(**changed)
    (weights / ".metadata").write_bytes(pickle.dumps(index))


UNPICKLES = {
    "checkpoints/plain_pickles.py",  # restricted to what an index consists of
    "data/row_formats.py",  # restricted to text
    "rewards/inside.py",  # restricted to plain data
    "rewards/reward_worker.py",  # calls, from its parent process
}


def test_no_other_file_of_the_package_unpickles():
    root = Path(grpo_megatron.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if _unpickles(node):
                found.add(str(path.relative_to(root)))
    assert found == UNPICKLES


def _unpickles(node: ast.AST) -> bool:
    """Whether a piece of code reads a pickle without torch's restriction."""
    if isinstance(node, ast.ClassDef):
        return any(ast.unparse(base) == "pickle.Unpickler" for base in node.bases)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    options = {word.arg: ast.unparse(word.value) for word in node.keywords}
    if name == "torch.load":
        return options.get("weights_only") != "True"
    if name in ("np.load", "numpy.load"):
        return options.get("allow_pickle", "False") != "False"
    return name in ("pickle.load", "pickle.loads", "pickle.Unpickler", "dill.load", "joblib.load")
