"""Children that cannot outlive their supervisor."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import ConfigError, RunLockedError, SetupError
from grpo_megatron.files import clear_directory
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.rundir import RunDir

# starts a grandchild in the same group, prints its pid, then waits
PARENT = (
    "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', "
    "'import time; time.sleep(600)']); print(p.pid, flush=True); time.sleep(600)"
)


def gone(pid: int) -> bool:
    """Ended, or a zombie that nobody reaped."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


def child(tmp_path: Path, code: str, name: str = "child") -> ChildProcess:
    process = ChildProcess(name, [sys.executable, "-c", code], tmp_path / f"{name}.log")
    process.start()
    return process


def wait_for_log(process: ChildProcess) -> str:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        if text := process.log.read_text():
            return text
        time.sleep(0.02)
    raise AssertionError("nothing was logged")


def test_stopping_ends_grandchildren_too(tmp_path):
    process = child(tmp_path, PARENT)
    grandchild = int(wait_for_log(process))
    stop_all([process])
    assert not process.alive and gone(grandchild)


def test_what_ignores_the_first_signal_is_killed(tmp_path):
    process = child(
        tmp_path,
        "import signal, time; signal.signal(signal.SIGTERM, "
        "signal.SIG_IGN); print(1, flush=True); time.sleep(600)",
    )
    wait_for_log(process)
    stop_all([process], grace_s=0.2)
    assert process.exit_code == 128 + signal.SIGKILL


def test_orphans_of_a_dead_child_are_ended(tmp_path):
    process = child(tmp_path, PARENT)
    grandchild = int(wait_for_log(process))
    os.kill(process.process.pid, signal.SIGKILL)
    process.process.wait()
    stop_all([process], grace_s=0.2)
    assert gone(grandchild)


def test_a_death_wakes_the_supervisor(tmp_path):
    process = child(tmp_path, "raise SystemExit(7)")
    process.process.wait()
    assert wait_readable([process], [], timeout_s=60) == []  # returns at once: it is dead
    assert process.exit_code == 7
    stop_all([process])


def test_children_die_with_a_killed_supervisor(tmp_path):
    """Also one that ignores SIGTERM, as a vLLM server may while it starts."""
    child = ["sh", "-c", f"trap '' TERM; touch {tmp_path / 'up'}; while :; do sleep 1; done"]
    code = (
        f"import time; from pathlib import Path; "
        f"from grpo_megatron.launch.processes import ChildProcess; "
        f"c = ChildProcess('c', {child!r}, Path({str(tmp_path / 'c.log')!r})); c.start(); "
        f"print(c.process.pid, flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(supervisor.stdout.readline())
    while not (tmp_path / "up").exists():
        time.sleep(0.05)
    supervisor.kill()
    supervisor.wait()
    assert gone(pid)


def test_a_run_directory_has_one_writer(tmp_path):
    run_dir = RunDir(tmp_path)
    first = run_lock(run_dir)
    first.__enter__()
    with pytest.raises(RunLockedError, match=f"process {os.getpid()}"), run_lock(run_dir):
        pass
    first.__exit__(None, None, None)
    with run_lock(run_dir):
        pass


def test_a_run_that_fails_leaves_nobody_in_its_lock(tmp_path):
    """A name in it would keep others out while the Slurm job that it names lives."""
    run_dir = RunDir(tmp_path)
    with pytest.raises(ZeroDivisionError), run_lock(run_dir):
        assert run_dir.lock.read_text()
        raise ZeroDivisionError
    assert run_dir.lock.read_text() == ""


def test_a_run_that_has_begun_since_is_not_removed(tmp_path, monkeypatch):
    """Two starts under one name, of which both have looked before one of them began."""
    from grpo_megatron.launch import local
    from grpo_megatron.plan.resolve import resolve

    @contextlib.contextmanager
    def after_the_other(run_dir):
        write_resolved(run_dir.config, resolved)
        yield

    monkeypatch.setattr(local, "run_lock", after_the_other)
    resolved = resolve("demo/gspo-moe-cpu", [f"runs_dir={tmp_path}", "name=taken"])
    (tmp_path / "taken").mkdir()
    with pytest.raises(ConfigError, match="exists"):
        local.train(resolved)
    assert (tmp_path / "taken" / "config.json").exists()


def test_an_existing_run_is_not_overwritten(tmp_path):
    from grpo_megatron.launch.local import train
    from grpo_megatron.plan.resolve import resolve

    resolved = resolve("demo/gspo-moe-cpu", [f"runs_dir={tmp_path}", "name=taken"])
    (tmp_path / "taken").mkdir()
    config = tmp_path / "taken" / "config.json"
    write_resolved(config, resolved)
    before = config.read_bytes()
    with pytest.raises(ConfigError, match="exists") as caught:
        train(resolved)
    assert "resume" in caught.value.remedy and "--overwrite" in caught.value.remedy
    assert config.read_bytes() == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.txt", "checkpoints/step_000001"])
def test_a_directory_of_something_else_is_not_replaced(tmp_path, name, overwrite):
    from grpo_megatron.launch.local import train
    from grpo_megatron.plan.resolve import resolve

    resolved = resolve("demo/gspo-moe-cpu", [f"runs_dir={tmp_path}", "name=mydata"])
    mine = tmp_path / "mydata" / name
    mine.parent.mkdir(parents=True)
    mine.write_text("years of work")
    with pytest.raises(ConfigError, match="is no run's directory: it has"):
        train(resolved, overwrite=overwrite)
    assert mine.read_text() == "years of work"


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("text", ['{"model_type": "qwen3"}', "{}", "[]", "", "[" * 200_000])
def test_a_model_is_not_taken_for_a_run(tmp_path, text, overwrite):
    """Both have a config.json."""
    model = RunDir(tmp_path / "model")
    model.root.mkdir()
    model.config.write_text(text)
    (model.root / "model.safetensors").write_text("years of work")
    with pytest.raises(ConfigError, match="is no run's directory: it has") as caught:
        model.refuse_existing(overwrite=overwrite)
    assert "--overwrite" not in caught.value.remedy


def test_a_run_with_a_damaged_configuration_is_one(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.create()
    run_dir.events.touch()
    run_dir.config.write_text('{"format": 1, "conf')
    with pytest.raises(ConfigError, match="exists"):
        run_dir.refuse_existing()
    run_dir.refuse_existing(overwrite=True)


def test_a_link_in_a_directory_that_is_no_runs_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="it has 'link'"):
        RunDir(tmp_path).refuse_existing()


def test_what_links_of_an_earlier_run_point_to_stays(tmp_path):
    """Checkpoints on another disk: the new run gets a folder of its own."""
    run_dir = RunDir(tmp_path / "run")
    run_dir.create()
    run_dir.lock.touch()
    run_dir.checkpoints.rmdir()
    other_disk = tmp_path / "disk"
    (other_disk / "step_000001").mkdir(parents=True)
    run_dir.checkpoints.symlink_to(other_disk)
    run_dir.export.symlink_to(tmp_path / "gone")
    clear_directory(run_dir.root, kept=(run_dir.lock,))
    assert [path.name for path in run_dir.root.iterdir()] == [".lock"]
    assert (other_disk / "step_000001").is_dir()


def test_a_lock_that_is_no_text_is_one(tmp_path):
    run_dir = RunDir(tmp_path)
    run_dir.lock.write_bytes(b"\xff\xfe")
    with run_lock(run_dir):
        assert run_dir.lock.read_text().startswith("process ")


@pytest.mark.parametrize("kind", ["folder", "link"])
def test_what_can_be_no_lock_is_told(tmp_path, kind):
    run_dir = RunDir(tmp_path)
    if kind == "folder":
        run_dir.lock.mkdir()
    else:
        run_dir.lock.symlink_to(tmp_path / "gone" / "lock")
    with pytest.raises(SetupError, match="cannot open the lock") as caught, run_lock(run_dir):
        pass
    assert caught.value.where == str(run_dir.lock)
