"""What the controller tells the supervisor (`controller.display`), read and shown."""

import contextlib
import json
import os
from collections.abc import Callable
from typing import Any

from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.telemetry.screen import Screen


class ControllerMessages:
    """Reads messages of the controller, one JSON object a line, and shows them on `screen`.

    on_left: called with the number of an engine that the controller has let go.

    Attributes:
        failure: The last error that it told, without its exit code; None: none.
        result: The last result that it told; empty: none."""

    def __init__(self, screen: Screen, on_left: Callable[[int], None]):
        self.failure: GrpoMegatronError | None = None
        self.result = ""
        self._screen = screen
        self._on_left = on_left
        self._unfinished_line = b""

    def forget(self) -> None:
        """Begin with another controller."""
        self.failure = None
        self.result = ""
        self._unfinished_line = b""

    def read(self, fd: int) -> None:
        """Take what there is to read, without waiting for more."""
        data = self._unfinished_line
        with contextlib.suppress(BlockingIOError):
            block = os.read(fd, 1 << 16)
            while block:
                data += block
                block = os.read(fd, 1 << 16)
        *lines, self._unfinished_line = data.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # some library printed
            self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        match message:
            case {"kind": "phase", "name": name}:
                self._screen.phase(name)
            case {"kind": "step", "metrics": metrics, **rest}:
                self._screen.step(metrics, rest.get("samples", ()))
            case {"kind": "message", "text": text}:
                self._screen.message(text)
            case {"kind": "failure", "text": text, "where": where, "remedy": remedy}:
                self.failure = GrpoMegatronError(text, where=where, remedy=remedy)
            case {"kind": "result", "text": text}:
                self.result = text
            case {"kind": "left", "engine": int(index)}:
                self._on_left(index)
