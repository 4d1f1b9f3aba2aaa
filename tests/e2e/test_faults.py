"""Faults of what a run stands on: stopped in every phase, a full disk, files that stall."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_megatron.progress import read_progress
from tests import engine_faults
from tests.e2e import runs
from tests.e2e.test_hangs import wait_for
from tests.e2e.test_rejoin import ENDLESS, more_steps, reference, stop

pytestmark = [pytest.mark.engine, pytest.mark.chaos, pytest.mark.timeout(3600)]

SAVING = "checkpoint.interval=2"
NEEDS_ROOT = "mounts a file system of its own, which needs root"


def begin(root: Path, name: str, *settings: str) -> tuple[Path, subprocess.Popen]:
    command = ["train", runs.RECIPE, f"runs_dir={root}", f"name={name}", *ENDLESS, SAVING]
    return root / name, runs.start(*command, *settings)


def wait_for_phase(run: Path, phase: str, process: subprocess.Popen) -> None:
    """The controller's, in the newest attempt."""
    deadline = time.monotonic() + runs.TIMEOUT_S
    while True:
        for file in (run / "progress").glob("*/controller.json"):
            record = read_progress(file)
            if record is not None and record.phase == phase:
                return
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"never in phase {phase}"
        time.sleep(0.005)


def require_same_metrics(run: Path, root: Path) -> None:
    records = runs.timeless(runs.metrics(run))
    assert [record["step"] for record in records] == list(range(len(records)))
    whole = reference(root, len(records), SAVING)
    assert records == whole[: len(records)]


PHASES = ("starting", "rollout", "reward", "train", "publish", "checkpoint")


def test_a_run_that_is_stopped_in_every_phase_is_the_one_that_is_not(tmp_path):
    """By Ctrl-C, as `scancel --signal=INT` does it in a job, and resumed each time."""
    run, process = begin(tmp_path, "stopped")
    for phase in PHASES:
        wait_for_phase(run, phase, process)
        process.send_signal(signal.SIGINT)
        code, output = runs.finish(process)
        assert code == 130, f"{phase}: {output}"
        assert "resume" in output or "stopped before the first step" in output
        assert runs.no_survivors(run), f"{phase}: {runs.survivors(run)}"
        process = runs.start("resume", str(run))
    more_steps(run, 2, process)
    stop(process)
    require_same_metrics(run, tmp_path)


def test_an_engine_without_memory_is_started_again(tmp_path, monkeypatch):
    """Its core dies of the error, and its server with it."""
    marker = tmp_path / "no-memory"
    monkeypatch.setenv("PYTHONPATH", engine_faults.FOLDER, prepend=os.pathsep)
    monkeypatch.setenv("VLLM_PLUGINS", engine_faults.PLUGIN)
    monkeypatch.setenv(engine_faults.MEMORY_VARIABLE, str(marker))
    run, process = begin(tmp_path, "no-engine-memory")
    runs.wait_for_steps(run, 2, process)
    marker.touch()
    wait_for(run, "joined", "rollout-0", 1, process)
    assert not marker.exists()
    more_steps(run, 2, process)
    stop(process)
    assert "OutOfMemoryError" in (run / "logs/latest/rollout-0.log").read_text()
    assert runs.no_survivors(run), runs.survivors(run)
    require_same_metrics(run, tmp_path)


@contextlib.contextmanager
def mounted(tmp_path: Path, size: str) -> Iterator[Path]:
    """A file system of this size, in a file."""
    image = tmp_path / "image"
    folder = tmp_path / "files"
    folder.mkdir()
    subprocess.run(["truncate", "-s", size, image], check=True)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    done = subprocess.run(["mount", "-o", "loop", image, folder], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


@contextlib.contextmanager
def filled(folder: Path) -> Iterator[None]:
    """A disk with no free block while the block runs."""
    filler = folder / "filler"
    with filler.open("wb") as file:
        size = 1 << 26
        end = 0
        while size >= 4096:
            try:
                os.posix_fallocate(file.fileno(), end, size)
                end += size
            except OSError:
                size //= 2
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)
def test_a_disk_that_is_full_in_any_phase_ends_the_run_with_its_name(tmp_path):
    """While a step is written, a line of metrics, a checkpoint. With room again it is resumed, and
    is the run that never lacked any."""
    with mounted(tmp_path, "1G") as folder:
        run, process = begin(folder, "full")
        runs.wait_for_steps(run, 1, process)
        for phase in ("rollout", "train", "checkpoint"):
            wait_for_phase(run, phase, process)
            with filled(folder):
                code, output = runs.finish(process)
            assert code == 3, f"{phase}: {output}"
            assert "No space left on device" in output or "disk is full" in output, output
            assert "remedy" in output
            assert runs.no_survivors(run), f"{phase}: {runs.survivors(run)}"
            process = runs.start("resume", str(run))
            more_steps(run, 1, process)
        stop(process)
        require_same_metrics(run, tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason=NEEDS_ROOT)
def test_files_that_stall_for_half_a_minute_end_nothing(tmp_path):
    """No write of any process of the run goes on meanwhile."""
    with mounted(tmp_path, "1G") as folder:
        run, process = begin(folder, "stalled", "watch.silent_s=15", "watch.replace_after_s=1")
        runs.wait_for_steps(run, 2, process)
        subprocess.run(["fsfreeze", "--freeze", folder], check=True)
        try:
            time.sleep(30)
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", folder], check=True)
        more_steps(run, 3, process)
        output = stop(process)
        for kind in ("hung", "died", "restarted", "engine_dead"):
            assert runs.events(run, kind) == [], output
        assert runs.no_survivors(run), runs.survivors(run)
        require_same_metrics(run, tmp_path)
