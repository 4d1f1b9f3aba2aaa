"""An environment that misbehaves on purpose; the question, or the turn, says how."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from pathlib import Path

from grpo_megatron.environments.protocol import (
    Observation,
    Outcome,
    Step,
    ToolCall,
    Unscorable,
)
from grpo_megatron.environments.registry import traits

SAID = ({"role": "user", "content": "Go on."},)
NAN = float("nan")
POURING = str(Path(__file__).with_name("pouring.py"))


def write_to_the_host(data: bytes) -> None:
    """Into the socket, between the answers of the process."""
    link = int(sys.argv[1])
    os.set_blocking(link, True)
    view = memoryview(data)
    while view:
        view = view[os.write(link, view) :]


class Obedient:
    """Does what it is told, else echoes the turn."""

    def __init__(self, *, greeting: str = "Go on."):
        self._greeting = greeting
        self._close = ""

    async def reset(self, problem, seed):
        self._close = problem.metadata.get("close", "")
        await obey(problem.question)
        said = {"role": "user", "content": f"{self._greeting} {problem.question} {seed}"}
        return Observation((said,), (), f"{problem.question} {seed}", Outcome(0.25))

    async def step(self, reply):
        told = await obey(reply.text)
        if isinstance(told, Step):
            return told
        return Step(({"role": "user", "content": told},), state=told[:9])

    async def close(self):
        await obey(self._close)


@traits(network=True)
class Networked(Obedient):
    pass


class TooLateToImport(Obedient):
    """Its process ends before its first episode."""

    def __init__(self):
        os._exit(7)


class OwnEnd(BaseException):
    """What no `except Exception` catches."""


class WithoutText(Exception):
    def __str__(self):
        return self.missing


class TextOfNone(Exception):
    def __str__(self):
        return None


class WithoutReason(Unscorable):
    def __init__(self):
        pass


async def await_cancelled():
    """The usual end of a background task, without the `suppress` around it."""
    ticker = asyncio.create_task(asyncio.sleep(1e6))
    ticker.cancel()
    await ticker


RAISED = {
    "cancelled": asyncio.CancelledError(),
    "own_end": OwnEnd("halt"),
    "group": BaseExceptionGroup("several", [KeyboardInterrupt()]),
    "without_text": WithoutText(),
    "text_of_none": TextOfNone(),
    "without_reason": WithoutReason(),
    "404": Unscorable(404),
    "none": Unscorable(None),
}


async def obey(text):
    """Do what the text says; returns what a step should say or be."""
    word, _, rest = text.partition(" ")
    if word == "raise":
        raise ValueError(rest)
    if word in RAISED:
        raise RAISED[word]
    if word == "await_cancelled":
        await await_cancelled()
    if word == "cancel_itself":
        asyncio.current_task().cancel()
        await asyncio.sleep(1e6)
    if word == "unscorable":
        raise Unscorable(rest)
    if word == "exit":
        os._exit(3)
    if word == "sys.exit":
        sys.exit(3)
    if word == "loop":
        while True:
            pass
    if word == "block":
        time.sleep(1e6)
    if word == "nap":
        await asyncio.sleep(float(rest))
    if word == "sleep":
        await asyncio.sleep(1e6)
    if word == "stubborn":
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue
    if word == "memory":
        return str(len(bytearray(1 << 40)))
    if word == "files":
        return str(len([open("/dev/null") for _ in range(10_000)]))
    if word == "garbage":
        write_to_the_host(b"this is no JSON\n")
    if word == "strange":
        write_to_the_host(b'{"type":"Stepped","request":"one"}\n')
    if word == "bytes":
        write_to_the_host(b'{"type":"Failed","request":0,"reason":"\xff\xfe"}\n')
    if word == "flood":
        write_to_the_host(b"x" * (10 << 20))
    if word == "print":
        print("printed " * 1000)
        os.write(1, b"\xff\xfe raw")
        os.write(2, b"raw")
    if word == "pour":
        await asyncio.create_subprocess_exec(sys.executable, POURING)
        await asyncio.sleep(1e6)
    if word == "long":
        return "a" * (10 << 20)
    if word == "surrogate":
        return "\ud800"
    if word == "huge_state":
        return Step(SAID, state="a" * (10 << 20))
    if word == "vast":
        return Step(SAID, state="a" * (1 << 28))
    if word == "nothing":
        return Step()
    if word == "nan":
        return Step(SAID, NAN, outcome=Outcome(NAN, {"seen": NAN, "moves": 2.0}))
    if word == "object":
        return Step(({"role": "user", "content": "x", "extra": object()},))
    if word == "endless":
        extra = []
        extra.append(extra)
        return Step(({"role": "user", "content": "x", "extra": extra},))
    if word == "spoilt":
        return Step(spoilt=True)
    if word == "done":
        return Step(done=True, reward=0.5, state="end", outcome=Outcome(float(rest), {"n": 1.0}))
    if word == "connect":
        with socket.create_connection(("127.0.0.1", int(rest)), timeout=5):
            return "connected"
    if word == "pid":
        return str(os.getpid())
    return text


CALLS = (ToolCall("tool", {"a": 1, "b": [1, None]}, "call-1"),)
