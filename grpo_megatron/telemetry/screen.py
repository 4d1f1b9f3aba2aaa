"""What a person sees while a run goes: one live screen, or one plain line a step."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_megatron.telemetry.verdicts import ROWS, judge

_REFRESHES_PER_S = 4
_HISTORY_STEPS = 500
_TREND_STEPS = 24
_BAR_CELLS = 40
_BLOCKS = "▁▂▃▄▅▆▇█"
_SAMPLE_CHARS = 160
_PHASE_STYLES = {"rollout": "cyan", "reward": "magenta", "train": "green", "publish": "yellow"}
_LEVEL_STYLES = {"ok": "green", "watch": "yellow", "bad": "bold red"}
Samples = Sequence[Mapping[str, Any]]


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

    def step(self, metrics: Mapping[str, Any], samples: Samples = ()) -> None:
        """A step is complete: its record in metrics.jsonl, samples as in samples/step_*.jsonl."""
        self._state.step(metrics, samples)
        self.message(plain_line(self._state))

    def message(self, text: str) -> None:
        """Show a line that stays."""
        print(text, file=self._file, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was (idempotent)."""


class LiveScreen(Screen):
    """Phases, metrics, samples, redrawn in place; what is printed meanwhile appears above."""

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

    def step(self, metrics: Mapping[str, Any], samples: Samples = ()) -> None:
        with self._lock:
            self._state.step(metrics, samples)
        self._live.refresh()

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def _render(self) -> RenderableType:
        with self._lock:
            return render(self._state)


class ScreenState:
    """Values so far, the phases of the current step (by `clock`, in s), the last step's samples."""

    def __init__(self, run_name: str, num_steps: int, clock: Callable[[], float]):
        self.run_name, self.num_steps, self.clock = run_name, num_steps, clock
        self.steps_done = 0
        self.samples: dict[str, Mapping[str, Any]] = {}  # the first best and the first worst
        self.history: dict[str, deque[float | None]] = {}  # by label
        self.latest: dict[str, float | None] = {}  # of the last step alone, by label
        self.current_phase: str | None = None
        self.started_s = self._phase_started_s = clock()
        self._ended_phases: dict[str, float] = {}

    def begin_phase(self, name: str) -> None:
        """End the running phase; a phase after a complete step begins the next step."""
        self._ended_phases = self.phase_seconds() if self.current_phase else {}
        self.current_phase, self._phase_started_s = name, self.clock()

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase of the current step, the running phase included."""
        seconds = dict(self._ended_phases)
        if self.current_phase is not None:
            passed = self.clock() - self._phase_started_s
            seconds[self.current_phase] = seconds.get(self.current_phase, 0.0) + passed
        return seconds

    def step(self, metrics: Mapping[str, Any], samples: Samples = ()) -> None:
        """Take the record of a complete step."""
        self._ended_phases, self.current_phase = self.phase_seconds(), None
        self.steps_done = int(metrics["step"]) + 1  # steps count from 0
        self.samples = {sample["rank"]: sample for sample in reversed(samples)}
        self.latest = {row.label: metrics[name] for row in ROWS
                       if (name := next((n for n in row.names if n in metrics), None))}
        for label, value in self.latest.items():
            self.history.setdefault(label, deque(maxlen=_HISTORY_STEPS)).append(value)


def plain_line(state: ScreenState) -> str:
    """The last step in one line: `step 7/300  reward 0.51  entropy 0.2 …`; 7 steps are done."""
    shown = [f"{row.label.replace(' ', '_')} {format_value(state.latest[row.label])}"
             for row in ROWS if row.plain and row.label in state.latest]
    return "  ".join([f"step {state.steps_done}/{state.num_steps}", *shown])


def render(state: ScreenState) -> RenderableType:
    return Group(_header(state), _phase_bar(state), _metrics_table(state),
                 *(_sample(*sample) for sample in sorted(state.samples.items())))


def format_value(value: float | None) -> str:
    """At most four digits that matter; "–" for None."""
    if value is None:
        return "–"
    whole = isinstance(value, int) or 1000 <= abs(value) < 1e7
    return f"{value:,.0f}" if whole else f"{value:.4g}"


def sparkline(values: Sequence[float | None]) -> str:
    """One block character a value, from the lowest to the highest; a dot for None."""
    known = [value / 2 for value in values if value is not None]  # halves: no span overflows
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)

    def block(value: float) -> str:
        return _BLOCKS[min(7, int((value / 2 - low) / span * 8))] if span > 0 else _BLOCKS[3]

    return "".join("·" if value is None else block(value) for value in values)


def _header(state: ScreenState) -> Text:
    minutes, seconds = divmod(int(state.clock() - state.started_s), 60)
    return Text.assemble((state.run_name, "bold"), f"  step {state.steps_done}/{state.num_steps}"
                         f"  {minutes}:{seconds:02d}", no_wrap=True, overflow="ellipsis")


def _phase_bar(state: ScreenState) -> Text:
    seconds = state.phase_seconds()
    total = sum(seconds.values()) or 1.0
    bar, labels = Text(), Text()
    for name, passed in seconds.items():
        style = _PHASE_STYLES.get(name, "blue")
        bar.append("━" * round(_BAR_CELLS * passed / total), style)
        running = name == state.current_phase
        labels.append(f"  {'▸' if running else ''}{name} {passed:.1f}s",
                      f"bold {style}" if running else style)
    return Text.assemble(bar, labels, no_wrap=True, overflow="ellipsis")


def _metrics_table(state: ScreenState) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for justify in ("left", "right", "left", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for row in ROWS:
        if values := list(state.history.get(row.label, ())):
            level, reason = judge(row, values)
            table.add_row(row.label, format_value(values[-1]), sparkline(values[-_TREND_STEPS:]),
                          Text.assemble((level, _LEVEL_STYLES[level]), f" {reason}"))
    return table


def _sample(name: str, sample: Mapping[str, Any]) -> Text:
    return Text.assemble((f"{name} {format_value(sample.get('reward'))}  ", "bold"),
                         (_one_line(sample.get("prompt", "")), "dim"), " → ",
                         _one_line(sample.get("completion", "")), overflow="fold")


def _one_line(text: str) -> str:
    """Without line breaks and control characters (a sample must not steer the terminal); long
    texts keep both ends, since answers come last."""
    shown = "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in str(text))
    if len(shown) <= _SAMPLE_CHARS:
        return shown
    half = _SAMPLE_CHARS // 2
    return f"{shown[:half]} … {shown[-half:]}"
