"""An agent program as a command: one process for each episode.

It has a working directory and a session of its own, the problem as JSON on its standard input, and
OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL. What it prints last, if that is a JSON object, has
the outcome as `reward`. Where it ends, or its time does, its process group is killed: all that it
started, but for what has gone into a group or a session of its own."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import urlsplit

from grpo_megatron.config.secret_values import with_secrets
from grpo_megatron.environments.agent_function import ClientSettings
from grpo_megatron.environments.protocol import Unscorable
from grpo_megatron.errors import EpisodeError
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.types import Problem

_KEPT_OUTPUT = 1 << 23
"""Bytes at the end of what a program prints, which its last line must fit into."""
_KEPT_MESSAGES = 1 << 16
"""Bytes at the end of its messages."""
_READ_AT_ONCE = 1 << 16
_SHOWN = 2000
"""Characters of its messages that are told where it fails."""
_PIPE_S = 1.0


def find_program(command: Sequence[str]) -> str:
    """Return the file that a command starts. Raises EpisodeError where there is none. Python is
    that of the run itself, unless a path says otherwise."""
    found = shutil.which(command[0], path=_search_path())
    if found is None:
        raise EpisodeError(
            f"there is no program {command[0]!r}",
            remedy="give its path, or install it where PATH finds it",
        )
    return found


async def run_command(
    command: Sequence[str],
    variables: Mapping[str, str],
    problem: Problem,
    client: ClientSettings,
    seconds: float,
) -> float | None:
    """Run the program for one episode. Returns the outcome that it prints; None: none.

    Unscorable where it cannot be started, ends with another exit code than 0, takes longer, or
    prints a reward that is no finite number, or a last line of more than 8 MiB."""
    directory = tempfile.mkdtemp(prefix="agent-")
    try:
        process = await _started(command, variables, client, directory)
        try:
            async with asyncio.timeout(seconds):
                printed, messages = await _communicate(process, _given(problem, client))
        except TimeoutError as error:
            raise Unscorable(f"the program took longer than {seconds:g} s (episode_s)") from error
        finally:
            await _end(process)
    finally:
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
    if process.returncode != 0:
        raise Unscorable(_end_in_words(process.returncode, messages.kept))
    return _reward(_last_line(printed))


async def _started(
    command: Sequence[str], variables: Mapping[str, str], client: ClientSettings, directory: str
) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            find_program(command),
            *command[1:],
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            cwd=directory,
            env=_variables(variables, client),
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
    except (OSError, ValueError) as error:
        raise Unscorable(f"the program does not start: {error}") from error


async def _communicate(
    process: asyncio.subprocess.Process, given: bytes
) -> tuple["_Tail", "_Tail"]:
    """Return the ends of what the program prints and of its messages, once it has ended; what it
    has started is killed then, and keeps its output open no longer."""
    assert process.stdin is not None and process.stdout is not None
    assert process.stderr is not None
    giving = asyncio.create_task(_write_input(process.stdin, given))
    output = _Tail(process.stdout, _KEPT_OUTPUT)
    messages = _Tail(process.stderr, _KEPT_MESSAGES)
    try:
        await _exited(process)
        _kill_group(process)
        await asyncio.wait([output.reading, messages.reading], timeout=_PIPE_S)
    finally:
        for task in (giving, output.reading, messages.reading):
            task.cancel()
    return output, messages


class _Tail:
    """Reads a stream to its end, or until `reading` is cancelled, and keeps its last bytes, of
    which there are `most`."""

    def __init__(self, stream: asyncio.StreamReader, most: int):
        self._stream = stream
        self._most = most
        self._read_bytes = bytearray()
        self._num_dropped = 0
        self.reading = asyncio.create_task(self._read())

    @property
    def kept(self) -> bytes:
        """The end of what was read."""
        return bytes(self._read_bytes[-self._most :])

    @property
    def is_whole(self) -> bool:
        """Whether nothing was read before what is kept."""
        return self._num_dropped + len(self._read_bytes) <= self._most

    async def _read(self) -> None:
        while chunk := await self._stream.read(_READ_AT_ONCE):
            self._read_bytes += chunk
            surplus = len(self._read_bytes) - self._most
            if surplus > self._most:  # seldom: each time the rest is moved
                del self._read_bytes[:surplus]
                self._num_dropped += surplus


async def _write_input(stdin: asyncio.StreamWriter, given: bytes) -> None:
    """A program need not read its problem."""
    with contextlib.suppress(ConnectionError):
        stdin.write(given)
        await stdin.drain()
    stdin.close()


async def _exited(process: asyncio.subprocess.Process) -> None:
    """Wait for the process alone: `Process.wait` may wait for its pipes, which others hold."""
    pause_s = 0.005
    while process.returncode is None:
        await asyncio.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.1)


async def _end(process: asyncio.subprocess.Process) -> None:
    _kill_group(process)
    await _exited(process)
    # asyncio has no public way to close pipes that somebody else holds open
    process._transport.close()  # type: ignore[attr-defined]


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _search_path() -> str:
    own = os.path.dirname(sys.executable)
    return os.pathsep.join([own, os.environ.get("PATH", os.defpath)])


def _variables(variables: Mapping[str, str], client: ClientSettings) -> dict[str, str]:
    """Return the environment of the program. No proxy stands between it and the door."""
    host = urlsplit(client.base_url).hostname or ""
    unproxied = ",".join(filter(None, [host, os.environ.get("NO_PROXY", "")]))
    return {
        **os.environ,
        "NO_PROXY": unproxied,
        "no_proxy": unproxied,
        "PATH": _search_path(),
        **with_secrets(variables),
        "OPENAI_BASE_URL": client.base_url,
        "OPENAI_API_KEY": client.api_key,
        "OPENAI_MODEL": client.model,
    }


def _given(problem: Problem, client: ClientSettings) -> bytes:
    given = {
        "question": problem.question,
        "answer": problem.answer,
        "metadata": dict(problem.metadata),
        "seed": client.seed,
    }
    try:
        return json.dumps(given).encode() + b"\n"
    except (TypeError, ValueError) as error:
        raise Unscorable(f"the problem is no JSON: {error}") from error


def _last_line(printed: _Tail) -> str:
    """Return the last line that is not blank; "" without one. Unscorable where it is too long."""
    text = printed.kept.decode("utf-8", "replace").rstrip()
    _, line_end, line = text.rpartition("\n")
    if not line_end and not printed.is_whole:
        raise Unscorable(
            f"the last line that the program prints has more than {_KEPT_OUTPUT >> 20} MiB"
        )
    return line


def _reward(line: str) -> float | None:
    """Return the reward in the last line, if that is a JSON object with one."""
    try:
        last = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(last, dict) or last.get("reward") is None:
        return None
    reward = last["reward"]
    if isinstance(reward, bool) or not isinstance(reward, int | float):
        raise Unscorable(f"the program's reward is {type(reward).__name__}, not a number")
    try:
        number = float(reward)
    except OverflowError as error:
        raise Unscorable("the program's reward is no finite number") from error
    if not math.isfinite(number):
        raise Unscorable("the program's reward is no finite number")
    return number


def _end_in_words(exit_code: int | None, messages: bytes) -> str:
    """Say how the program ended, with the end of what it printed."""
    told = f"the program ended with exit code {exit_code}"
    if exit_code is not None and exit_code < 0:
        told = f"the program ended by signal {-exit_code}"
    text = messages.decode("utf-8", "replace").strip()
    if text:
        told += f": {text[-_SHOWN:]}"
    return told
