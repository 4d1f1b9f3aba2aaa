"""What a checkpoint's digests say of its files, without ranks."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from grpo_megatron.errors import CheckpointError, SetupError


@pytest.fixture
def worker(monkeypatch):
    """The module of conversions, whose only rank is this process."""
    from grpo_megatron.trainer import conversion_worker

    found = conversion_worker.distributed
    monkeypatch.setattr(found.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(found.dist, "get_world_size", lambda: 1)
    monkeypatch.setattr(found, "all_gathered", lambda value: [value])
    monkeypatch.setattr(conversion_worker, "_say_once", lambda **said: None)
    return conversion_worker


@pytest.fixture
def distributed(worker):
    return worker.distributed


@pytest.fixture
def checkpoint(distributed, tmp_path):
    digests = {}
    for name in ("weights/a", "critic/b"):
        file = tmp_path / "step" / name
        file.parent.mkdir(parents=True)
        file.write_text(name)
        digests[name] = distributed._digest(file)
    (tmp_path / "step" / distributed.DIGESTS).write_text(json.dumps(digests))
    return tmp_path / "step"


def refuse(number):
    def call(*arguments):
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EROFS])
def test_a_checkpoint_in_an_image_that_can_only_be_read_is_whole(
    distributed, checkpoint, monkeypatch, number
):
    """Such as squashfs, which has nothing to write out."""
    monkeypatch.setattr(os, "fsync", refuse(number))
    monkeypatch.setattr(os, "posix_fadvise", refuse(number))
    assert distributed.corrupt_files(checkpoint) == []


def test_a_file_that_cannot_be_written_out_is_none(distributed, checkpoint, monkeypatch):
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    assert distributed.corrupt_files(checkpoint) == ["critic/b", "weights/a"]


def test_a_file_without_a_digest_is_none_while_it_cannot_be_read(
    distributed, checkpoint, monkeypatch
):
    digests = json.loads((checkpoint / distributed.DIGESTS).read_text())
    (checkpoint / distributed.DIGESTS).write_text(json.dumps({**digests, "weights/a": None}))
    assert distributed.corrupt_files(checkpoint) == ["weights/a"]
    (checkpoint / "weights/a").unlink()
    assert distributed.corrupt_files(checkpoint) == ["weights/a"]


def test_no_checkpoint_has_a_file_that_could_not_be_written_out(distributed, tmp_path, monkeypatch):
    """A full disk may be told as late as that."""
    working = tmp_path / "step.tmp"
    working.mkdir()
    (working / "complete.json").write_text("{}")
    monkeypatch.setattr(distributed.dist, "barrier", lambda: None)
    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse(errno.ENOSPC))
        with pytest.raises(SetupError, match="could not be written") as error:
            distributed._finish_directory(working, tmp_path / "step", {})
    assert error.value.where == str(working / "complete.json")
    assert not (tmp_path / "step").exists()


def test_a_copy_without_its_critic_is_converted(worker, checkpoint):
    shutil.rmtree(checkpoint / "critic")
    worker._refuse_damaged(checkpoint)


@pytest.mark.parametrize("name", ["weights/a", "critic/b"])
def test_a_copy_with_another_file_is_not(worker, checkpoint, name):
    (checkpoint / name).write_text("another")
    with pytest.raises(CheckpointError, match="1 files are not as they were written"):
        worker._refuse_damaged(checkpoint)
