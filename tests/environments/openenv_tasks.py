"""Tasks for a server of OpenEnv's protocol, without that library: what `openenv_server` serves."""

from __future__ import annotations

import os
import random
import time
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

Told = tuple[dict[str, Any], float | None, bool]
"""Fields of an observation, reward, done."""


class GuessAction(BaseModel):
    """A guess, or what makes the server fail."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = {}
    message: str = Field(min_length=1)


class Guess:
    """A number to guess, by texts."""

    action = GuessAction
    fields = {"text": str}

    def __init__(self) -> None:
        self._number = 0

    def reset(self, seed: int = 0, largest: int = 9) -> Told:
        self._number = random.Random(seed).randint(1, largest)
        return {"text": f"A number from 1 to {largest}."}, None, False

    def step(self, action: GuessAction) -> Told:
        if action.message == "crash":
            raise RuntimeError("out of order")
        if action.message == "hang":
            time.sleep(60)
        if action.message == "leave":
            os._exit(1)
        if action.message == str(self._number):
            return {"text": "right"}, 1.0, True
        return {"text": "wrong"}, -0.25, False


class Unseeded(Guess):
    """Begins with another text each time."""

    def reset(self, seed: int = 0, largest: int = 9) -> Told:
        _, reward, done = super().reset(seed, largest)
        return {"text": f"Ticket {time.monotonic_ns()}."}, reward, done


class PaintAction(BaseModel):
    """Paint a field of the board."""

    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, Any] = {}
    row: int = Field(ge=1, le=3)
    column: int = Field(ge=1, le=3)
    colour: str = "red"


class Paint:
    """A board to paint, by actions of several fields: done with three of them."""

    action = PaintAction
    fields = {"board": list, "moves": int}

    def __init__(self) -> None:
        self._board: list[str] = []

    def _told(self) -> dict[str, Any]:
        return {"board": list(self._board), "moves": len(self._board)}

    def reset(self, seed: int = 0) -> Told:
        return self._told(), None, False

    def step(self, action: PaintAction) -> Told:
        self._board.append(f"{action.colour} {action.row} {action.column}")
        return self._told(), 0.5, len(self._board) == 3


def add(a: int, b: int) -> str:
    """Add two whole numbers."""
    return str(a + b)


def fail(text: str) -> str:
    """Fail with a text."""
    raise ValueError(text)


TOOLS = (add, fail)
BY_NAME = {"guess": Guess, "unseeded": Unseeded, "paint": Paint}
