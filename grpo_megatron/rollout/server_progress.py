"""A rollout server says what it is doing: whether it answers, and whether its processes run.

vLLM's HTTP process has one thread more that asks the server itself for its health; its heartbeat
looks at the processes that it started (engine cores, workers)."""

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from grpo_megatron import progress

PATH_VARIABLE = "GRPO_MEGATRON_PROGRESS"
"""Where the server reports; set by `rollout.replica`."""
_LOOK_S = 10.0
_START_LOOK_S = 1.0
_ANSWER_S = 30.0


def report(path: Path, host: str, port: int) -> None:
    """Report this process, whose server will answer at `host`:`port`; port 0: it has none."""
    progress.start_progress(path, path.stem, examine=describe_stopped)
    if port:
        threading.Thread(target=_ask, args=(host, port), name="health", daemon=True).start()
    else:
        progress.enter(progress.SERVING, is_waiting=True)


def _ask(host: str, port: int) -> None:
    """Ask for health until the process ends."""
    is_serving = False
    while True:
        if is_healthy(host, port):
            if not is_serving:
                progress.enter(progress.SERVING)
            is_serving = True
            progress.advance()
        if is_serving:
            time.sleep(_LOOK_S)
        else:
            time.sleep(_START_LOOK_S)


def is_healthy(host: str, port: int) -> bool:
    """Whether a server answers `/health` with 200, within 30 seconds."""
    connection = http.client.HTTPConnection(host, port, timeout=_ANSWER_S)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    return False


def describe_stopped() -> str:
    """Name the processes below this one that are stopped (SIGSTOP, a debugger); empty: none."""
    told = []
    for pid in _descendants("self"):
        with contextlib.suppress(OSError, IndexError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if rest.split()[0] in "Tt":
                told.append(f"{name.partition('(')[2]} (pid {pid}) is stopped")
    return ", ".join(told)


def _descendants(pid: str) -> Iterator[str]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield child
                yield from _descendants(child)
