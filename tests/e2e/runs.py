"""Start the real command as a user does, and look at what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from grpo_megatron.files import write_atomically

HERE = Path(__file__).parent
FOLDER = str(HERE)
COMMAND = [sys.executable, "-m", "grpo_megatron.cli.main"]
RECIPE = str(HERE / "recipe.toml")
SECRETS = {
    "HF_TOKEN": "hf_SecretOfHuggingFace0123456789ab",
    "WANDB_API_KEY": "5ec7e700" * 5,
    "OPENAI_API_KEY": "sk-SecretOfOpenAI0123456789abcdef",
    "VLLM_API_KEY": "SecretOfVllm0123456789abcdef",
    "AWS_SECRET_ACCESS_KEY": "SecretOfAws0123456789abcdefghijklmnopqr",
    "REWARD_KEY": "SecretOfReward0123456789abcdef",
}
"""In the environment of every run here."""
TIMEOUT_S = 1500  # of what hangs, as in pyproject.toml
# not a function of the samples alone
TIMED = (
    "time",
    "idle",
    "throughput",
    "trainer/peak",
    "canary/seconds",
    "staleness/predicted",
    "staleness/unforeseen",
)


def command(
    *arguments: str, timeout_s: float = TIMEOUT_S, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    """Run to the end."""
    return subprocess.run(
        [*COMMAND, *arguments],
        env=_environment() | (environment or {}),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def start(
    *arguments: str, environment: dict[str, str] | None = None, output: int | IO = subprocess.PIPE
) -> subprocess.Popen:
    """Run in the background, in a process group of its own."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env=_environment() | (environment or {}),
        text=True,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, **SECRETS}


HELD = (f"data.reward_timeout_s={TIMEOUT_S}",)
"""Settings of a run that is held."""


def hold(run: Path, num_steps: int) -> dict[str, str]:
    """Have a run wait after so many recorded steps, so that what a test does to it cannot come too
    late; returns the environment that such a run needs. It may be held elsewhere later."""
    file = _hold_file(run)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, str(num_steps))
    return {"HOLD_FILE": str(file), "HOLD_METRICS": str(run / "metrics.jsonl")}


def release(run: Path) -> None:
    """Let a run that is held go on to its end."""
    _hold_file(run).unlink()


def _hold_file(run: Path) -> Path:
    return run.with_name(f"{run.name}.hold")


def metrics(run: Path) -> list[dict]:
    return _records(run / "metrics.jsonl")


def _records(path: Path) -> list[dict]:
    """What the whole lines of a file say: the last one may be just being written."""
    if not path.exists():
        return []
    *lines, _ = path.read_text().split("\n")
    return [json.loads(line) for line in lines]


def timeless(records: list[dict]) -> list[dict]:
    return [{k: v for k, v in r.items() if not k.startswith(TIMED)} for r in records]


def events(run: Path, kind: str) -> list[dict]:
    return [event for event in _records(run / "events.jsonl") if event["kind"] == kind]


def wait_for_steps(run: Path, count: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(metrics(run)) < count:
        assert process.poll() is None, process.stdout.read()
        assert time.monotonic() < deadline, f"no {count} steps in {run}"
        time.sleep(0.1)


@contextlib.contextmanager
def command_lines() -> Iterator[set[bytes]]:
    """What the list of processes shows while the block runs."""
    seen: set[bytes] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                with contextlib.suppress(OSError):
                    seen.add(path.read_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def tokens(run: Path) -> set[str]:
    """What the servers of a run ask for."""
    files = (run / "endpoints").rglob("*.json")
    return {json.loads(file.read_text()).get("token") for file in files} - {None, ""}


def shown_secrets(run: Path) -> dict[str, list[str]]:
    """By file of a run that others may read, or that has no tokens to hold: the secrets in it."""
    secrets = {*SECRETS.values(), *tokens(run)}
    found = {}
    for file in run.rglob("*"):
        if not file.is_file() or file.is_symlink():
            continue
        is_private = file.is_relative_to(run / "endpoints") and not file.stat().st_mode & 0o077
        content = file.read_bytes()
        inside = [secret for secret in secrets if secret.encode() in content and not is_private]
        if inside:
            found[str(file.relative_to(run))] = inside
    return found


def role_pid(run: Path, role: str) -> int:
    return [event["pid"] for event in events(run, "started") if event["role"] == role][-1]


def finish(process: subprocess.Popen) -> tuple[int, str]:
    output, _ = process.communicate(timeout=TIMEOUT_S)
    return process.returncode, output


def survivors(run: Path) -> list[str]:
    """Command lines of processes that still belong to a run, by their group or arguments."""
    begun = events(run, "started") + events(run, "restarted")
    return command_lines_of(run, {event["pid"] for event in begun})


def command_lines_of(run: Path, groups: Collection[int] = ()) -> list[str]:
    """Of processes that are in one of the process groups, or name the run."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            group = int((path / "stat").read_text().rsplit(")", 1)[1].split()[2])
            line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except (OSError, IndexError):
            continue
        if line and (group in groups or str(run) in line):
            found.append(line)
    return found


def no_survivors(run: Path) -> bool:
    """Give ended processes a moment to be reaped, then look."""
    deadline = time.monotonic() + 60
    while survivors(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not survivors(run)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
