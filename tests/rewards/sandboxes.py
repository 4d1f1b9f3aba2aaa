"""Which tests need a sandbox, what is outside of it, and how to see that none is left."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from grpo_megatron.rewards import sandbox
from tests.rewards import programs

_REASON = sandbox.why_not()
needs_sandbox = pytest.mark.skipif(_REASON is not None, reason=f"no sandbox here: {_REASON}")


def wait_until_none_is_left(argument: object) -> None:
    """Every sandbox has a first process, whose command line has its limits. The test's own time
    limit ends a failure."""
    while _with_argument(str(argument).encode()):
        time.sleep(0.02)


def _with_argument(argument: bytes) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if argument in path.read_bytes().split(b"\0"):
                found.append(path.parent.name)
        except OSError:  # it has just ended
            continue
    return found


@contextmanager
def world_outside(folder: Path) -> Iterator[dict[str, str]]:
    """What no program may reach, by the word that stands for it in `programs`; in the end nothing
    of it was touched, or an assertion fails. folder: an empty one."""
    path = folder / "canary"
    path.write_text("alive")
    before = os.stat("/dev/null").st_mode, os.stat("/tmp").st_uid
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.TemporaryDirectory() as short,  # a socket's path may have 107 bytes
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as local,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as abstract,
    ):
        name = f"outside-{os.getpid()}"
        local.bind(f"{short}/local")
        abstract.bind(f"\0{name}")
        for listening in (server, local, abstract):
            listening.setblocking(False)
        yield {
            "CANARY": repr(str(path)),
            "PORT": str(server.getsockname()[1]),
            "LOCAL": repr(f"{short}/local"),
            "ABSTRACT": repr(name),
            "OUTSIDE": str(os.getpid()),
        }
        for ask in (server.accept, partial(local.recv, 1), partial(abstract.recv, 1)):
            with pytest.raises(BlockingIOError):
                ask()
    assert path.read_text() == "alive" and os.listdir(folder) == ["canary"]
    assert (os.stat("/dev/null").st_mode, os.stat("/tmp").st_uid) == before


def hostile_program(source: str, words: Mapping[str, str]) -> str:
    """A program of `programs` with what its words stand for."""
    for word, value in words.items():
        source = source.replace(word, value)
    return programs.PRELUDE + source
