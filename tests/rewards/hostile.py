"""Reward functions that misbehave on purpose; the completion says how."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

not_a_function = 3


def obey(completion: str, answer: str, *, prompt: str, metadata: Mapping[str, Any]) -> Any:
    """Do what the completion says, else return it as a number."""
    if completion == "loop":
        while True:
            pass
    elif completion == "sleep":
        time.sleep(1e6)
    elif completion == "exit":
        os._exit(3)
    elif completion == "sys.exit":
        sys.exit(3)
    elif completion == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif completion == "interrupt":
        raise KeyboardInterrupt
    elif completion == "raise":
        raise ValueError(f"no reward for {prompt}")
    elif completion == "print":
        print("printed by a reward" * 1000)
        sys.stdout.write("more")
        os.write(1, b"raw")
        return 1.0
    elif completion == "read":
        return float(len(sys.stdin.read()))
    elif completion == "str":
        return "1.0"
    elif completion == "list":
        return [1.0]
    elif completion in SPECIAL:
        return SPECIAL[completion]
    return float(completion)


SPECIAL = {"None": None, "True": True, "int": 7, "nan": float("nan"), "inf": float("inf"),
           "huge": 10**400}


def length(completion: str, answer: str) -> float:
    """The shortest signature that a reward may have."""
    return len(completion)


def always_raises(completion: str, answer: str, **arguments: Any) -> float:
    raise RuntimeError("broken reward")


def always_loops(completion: str, answer: str) -> float:
    while True:
        pass


def counts_modules(completion: str, answer: str) -> float:
    """How many of the heavy modules this process has imported."""
    return sum(module in sys.modules for module in completion.split())


def scaled(completion: str, answer: str, *, factor: float = 1.0) -> float:
    return factor * float(completion)


def greedy(completion: str) -> float:
    return 0.0


async def coroutine(completion: str, answer: str) -> float:
    return 0.0
