"""What a person sees while a run goes: one live screen, or one plain line a step."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from rich.console import Console, RenderableType
from rich.live import Live

from grpo_megatron.telemetry.layout import ScreenState, plain_line, render

_REFRESHES_PER_S = 4


def make_screen(run_name: str, num_steps: int, *, console: Console | None = None) -> Screen:
    """A live screen where standard output is a terminal, else plain lines."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(run_name, num_steps, console)
    return Screen(run_name, num_steps, console.file)


class Screen:
    """One line a step and one a message, for logs and pipes."""

    def __init__(self, run_name: str, num_steps: int, file: IO[str]):
        self._state = ScreenState(run_name, num_steps, time.monotonic)
        self._file = file

    def phase(self, name: str) -> None:
        """Phase `name` of the current step begins, and the phase before it ends."""

    def step(self, metrics: Mapping[str, Any], best: Mapping[str, Any] | None = None,
             worst: Mapping[str, Any] | None = None) -> None:
        """A step is complete: its record in metrics.jsonl, samples as in samples/step_*.jsonl."""
        self._state.step(metrics, best, worst)
        self.message(plain_line(self._state))

    def message(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=self._file, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was (idempotent)."""


class LiveScreen(Screen):
    """Phases, chosen metrics, best and worst sample, redrawn in place; what the process prints
    meanwhile appears above the screen."""

    def __init__(self, run_name: str, num_steps: int, console: Console,
                 clock: Callable[[], float] = time.monotonic):
        self._state = ScreenState(run_name, num_steps, clock)
        self._lock = threading.Lock()  # the refresh thread renders while a step comes in
        self._live = Live(get_renderable=self._render, console=console,
                          refresh_per_second=_REFRESHES_PER_S, vertical_overflow="crop")
        self._live.start()

    def phase(self, name: str) -> None:
        with self._lock:
            self._state.begin_phase(name)

    def step(self, metrics: Mapping[str, Any], best: Mapping[str, Any] | None = None,
             worst: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            self._state.step(metrics, best, worst)
        self._live.refresh()

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        with self._lock:
            return render(self._state)
