"""What a person sees while a run goes: one live screen, or one plain line a step."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from grpo_megatron import assets

ROWS = assets.tables(__file__, "screen.toml")
_TREND_STEPS, _BAR_CELLS, _SAMPLE_CHARS = 24, 40, 160
_BLOCKS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {"rollout": "cyan", "reward": "magenta", "train": "green", "publish": "yellow"}


class Screen:
    """One line a step and one a message, for logs and pipes; what a live screen draws is kept."""

    def __init__(
        self,
        run_name: str,
        num_steps: int,
        console: Console,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.run_name, self.num_steps = run_name, num_steps
        self.console, self.clock = console, clock
        self.steps_done = 0
        self.samples: dict[str, Mapping[str, Any]] = {}  # the first best and the first worst
        self.history: dict[str, deque[float | None]] = {}  # by label
        self.latest: dict[str, float | None] = {}  # of the last step alone, by label
        self.current_phase: str | None = None
        self.started_s = self._phase_started_s = clock()
        self._ended_phases: dict[str, float] = {}
        self.lock = threading.Lock()  # another thread may render while a step comes in

    def phase(self, name: str) -> None:
        """End the running phase; a phase after a complete step begins the next step."""
        with self.lock:
            self._ended_phases = self.phase_seconds() if self.current_phase else {}
            self.current_phase, self._phase_started_s = name, self.clock()

    def phase_seconds(self) -> dict[str, float]:
        """Seconds by phase of the current step, the running phase included."""
        seconds = dict(self._ended_phases)
        if self.current_phase is not None:
            passed = self.clock() - self._phase_started_s
            seconds[self.current_phase] = seconds.get(self.current_phase, 0.0) + passed
        return seconds

    def step(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """A step is complete: its record in metrics.jsonl, samples as in samples/step_*.jsonl."""
        with self.lock:
            self._ended_phases, self.current_phase = self.phase_seconds(), None
            self.steps_done = int(metrics["step"]) + 1  # steps count from 0
            self.samples = {sample["rank"]: sample for sample in reversed(samples)}
            self.latest = {
                label: metrics[name]
                for label, row in ROWS.items()
                if (name := next((n for n in row["names"] if n in metrics), None))
            }
            for label, value in self.latest.items():
                self.history.setdefault(label, deque(maxlen=_TREND_STEPS)).append(value)
        self._show_step()

    def _show_step(self) -> None:
        """In one line: `step 7/300  reward 0.51  entropy 0.2 …`; 7 steps are done."""
        shown = [
            f"{label.replace(' ', '_')} {format_value(value)}"
            for label, value in self.latest.items()
            if ROWS[label].get("plain")
        ]
        self.message("  ".join([f"step {self.steps_done}/{self.num_steps}", *shown]))

    def message(self, text: str) -> None:
        print(text, file=self.console.file, flush=True)

    def close(self) -> None:
        """Leave the terminal as it was (idempotent)."""


class LiveScreen(Screen):
    """Phases, metrics, samples, redrawn in place; what is printed meanwhile appears above."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self._live = Live(
            get_renderable=lambda: render(self),
            console=self.console,
            refresh_per_second=4,
            vertical_overflow="crop",
        )
        self._live.start()

    def _show_step(self) -> None:
        self._live.refresh()

    def message(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()


def make_screen(run_name: str, num_steps: int, console: Console | None = None) -> Screen:
    console = console or Console()
    live = console.is_terminal and not console.is_dumb_terminal
    return (LiveScreen if live else Screen)(run_name, num_steps, console)


def render(screen: Screen) -> RenderableType:
    with screen.lock:
        return Group(
            _header(screen),
            _phase_bar(screen),
            _metrics_table(screen),
            *(_sample(*sample) for sample in sorted(screen.samples.items())),
        )


def format_value(value: float | None) -> str:
    """At most four digits that matter; "–" for None."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if isinstance(value, int) or 1000 <= abs(value) < 1e7 else f"{value:.4g}"


def sparkline(values: Sequence[float | None]) -> str:
    """One block character a value, from the lowest to the highest; a dot for None."""
    known = [value / 2 for value in values if value is not None]  # halves: no span overflows
    low, span = min(known, default=0.0), max(known, default=0.0) - min(known, default=0.0)

    def block(value: float) -> str:
        return _BLOCKS[min(7, int((value / 2 - low) / span * 8))] if span > 0 else _BLOCKS[3]

    return "".join("·" if value is None else block(value) for value in values)


def _header(screen: Screen) -> Text:
    minutes, seconds = divmod(int(screen.clock() - screen.started_s), 60)
    return Text.assemble(
        (screen.run_name, "bold"),
        f"  step {screen.steps_done}/{screen.num_steps}  {minutes}:{seconds:02d}",
        no_wrap=True,
        overflow="ellipsis",
    )


def _phase_bar(screen: Screen) -> Text:
    seconds = screen.phase_seconds()
    total = sum(seconds.values()) or 1.0
    bar, labels = Text(), Text()
    for name, passed in seconds.items():
        style = _PHASE_STYLES.get(name, "blue")
        bar.append("━" * round(_BAR_CELLS * passed / total), style)
        running = name == screen.current_phase
        labels.append(
            f"  {'▸' if running else ''}{name} {passed:.1f}s", f"bold {style}" if running else style
        )
    return Text.assemble(bar, labels, no_wrap=True, overflow="ellipsis")


def _metrics_table(screen: Screen) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for label in ROWS:
        if values := screen.history.get(label):
            table.add_row(label, format_value(values[-1]), sparkline(values))
    return table


def _sample(name: str, sample: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{name} {format_value(sample.get('reward'))}  ", "bold"),
        (_one_line(sample.get("prompt", "")), "dim"),
        " → ",
        _one_line(sample.get("completion", "")),
        overflow="fold",
    )


def _one_line(text: str) -> str:
    """One line without control characters (samples must not steer the terminal), both ends kept."""
    shown = "".join(c if c.isprintable() else "⏎" if c == "\n" else "�" for c in str(text))
    if len(shown) <= _SAMPLE_CHARS:
        return shown
    half = _SAMPLE_CHARS // 2
    return f"{shown[:half]} … {shown[-half:]}"
