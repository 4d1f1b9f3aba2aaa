"""What `grpo-megatron engines` asks of a running run's supervisor, and what engines there are.

    request-1f0c.json   {"action": "remove", "engine": 1}         by the command
    answer-1f0c.json    {"text": "…"} or {"error": {…}}           by the supervisor, within a second

Both lie in `endpoints/ATTEMPT/`, which every node of a job sees."""

import contextlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import msgspec

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.errors import (
    ConfigError,
    EngineError,
    GrpoMegatronError,
    describe_error,
    raise_described,
)
from grpo_megatron.files import write_atomically
from grpo_megatron.launch.look import process_state
from grpo_megatron.launch.slurm import active_job, is_active, lock_owner
from grpo_megatron.progress import SERVING, read_progress
from grpo_megatron.rollout.members import read_members, read_unjoined
from grpo_megatron.rundir import RunDir, engine_name

ANSWER_S = 60.0
"""How long a supervisor may take to answer."""
_LOOK_S = 0.2
_CHECK_S = 2.0
"""How often it is seen to whether the run has ended: of a job, Slurm is asked."""

Action = Literal["add", "remove"]


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One more engine, or one less: that of number `engine`."""

    action: Action
    engine: int | None = None


# --- the command's side


def running(path: Path) -> RunDir:
    """Return the run directory as the attempt that runs sees it. Raises ConfigError where the lock
    says that the run is not running."""
    run_dir = RunDir(path)
    owner = lock_owner(run_dir)
    attempt = ""
    with contextlib.suppress(OSError):
        attempt = os.readlink(path / "logs" / "latest")
    current = RunDir(path, attempt)
    if not _is_there(owner) or not attempt or not current.endpoints.is_dir():
        remedy = f"{run_dir.command('resume')} rollout.num_replicas=…"
        job = active_job(run_dir)
        if job is not None:
            remedy = f"wait until its job {job} runs: {run_dir.command('status')}"
        raise ConfigError("the run is not running", where=str(path), remedy=remedy)
    return current


def _is_there(owner: str) -> bool:
    """Whether who holds a run's lock may be there still; see `run_lock`."""
    job = re.search(r"Slurm job (\d+)", owner)
    if job:
        return is_active(job[1])
    process = re.match(r"process (\d+) on (\S+)", owner)
    if not process:
        return False
    if process[2] != socket.gethostname():
        return True  # it answers, or it does not
    return process_state(int(process[1])) not in ("", "Z")


def ask(run_dir: RunDir, request: EngineRequest, timeout_s: float = ANSWER_S) -> str:
    """Have the supervisor of a running run do what `request` says; returns its answer. Raises what
    it refuses with; ConfigError where the run has ended meanwhile; EngineError where it does not
    answer."""
    name = secrets.token_hex(4)
    asked = run_dir.endpoints / f"request-{name}.json"
    answered = run_dir.endpoints / f"answer-{name}.json"
    write_atomically(asked, json.dumps(asdict(request)))
    deadline = time.monotonic() + timeout_s
    next_check = time.monotonic() + _CHECK_S
    while not _is_in(answered):
        now = time.monotonic()
        if now > next_check:
            next_check = now + _CHECK_S
            is_same_attempt = running(run_dir.root).attempt == run_dir.attempt
            if not is_same_attempt:
                raise ConfigError(
                    "the run has begun again meanwhile",
                    where=str(run_dir.root),
                    remedy="ask once more",
                )
        if now > deadline:
            asked.unlink(missing_ok=True)
            raise EngineError(
                f"the run's supervisor did not answer within {timeout_s:.0f} s",
                where=str(run_dir.root),
                remedy="is it alive? grpo-megatron status",
            )
        time.sleep(_LOOK_S)
    answer = json.loads(answered.read_text())
    answered.unlink(missing_ok=True)
    if "error" in answer:
        raise_described(answer["error"], EngineError)
    return str(answer["text"])


def _is_in(file: Path) -> bool:
    """Whether a folder has a file, by its list: other nodes may keep what they looked up."""
    try:
        return file.name in os.listdir(file.parent)
    except FileNotFoundError:  # a new attempt has removed the folder
        return False


def engine_lines(run_dir: RunDir) -> Iterator[str]:
    """Yield a line for each engine of a running run: its name, state and process."""
    config = read_resolved(run_dir.config).config
    members = read_members(run_dir, config)
    unjoined = read_unjoined(run_dir)
    for index, membership in members.items():
        name = engine_name(index)
        record = read_progress(run_dir.role_progress(name))
        place = ""
        state = "starts"
        if record is not None:
            place = f"process {record.pid} on {record.host}"
        if record is not None and record.phase == SERVING:
            state = "serves"
            if name in unjoined:
                state = "waits for the present weights"
        if membership == "leaving":
            state = "leaves after its requests"
        yield f"{name:<12} {state:<30} {place}".rstrip()


# --- the supervisor's side


def take_requests(run_dir: RunDir) -> dict[str, EngineRequest | ConfigError]:
    """Take what was asked since the last look, by the request's name; what is no request becomes
    the error to answer it with."""
    found: dict[str, EngineRequest | ConfigError] = {}
    files: list[Path] = []
    with contextlib.suppress(OSError):  # a file system that stalls: the next look finds them
        files = sorted(run_dir.endpoints.glob("request-*.json"))
    for file in files:
        with contextlib.suppress(OSError):
            content = file.read_bytes()
            file.unlink()
            found[file.stem.removeprefix("request-")] = _read_request(content, file)
    return found


def _read_request(content: bytes, file: Path) -> EngineRequest | ConfigError:
    problem = "it names no engine"
    try:
        request = msgspec.json.decode(content, type=EngineRequest)
        if request.action == "add" or request.engine is not None:
            return request
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        problem = str(error)
    return ConfigError(
        f"no request for engines: {problem}",
        where=str(file),
        remedy="ask by `grpo-megatron engines`",
    )


def answer(run_dir: RunDir, name: str, told: str | GrpoMegatronError) -> None:
    """Answer a request with a text, or with why it is refused."""
    message: dict[str, object] = {"text": told}
    if isinstance(told, GrpoMegatronError):
        message = {"error": describe_error(told, EngineError)}
    write_atomically(run_dir.endpoints / f"answer-{name}.json", json.dumps(message))
