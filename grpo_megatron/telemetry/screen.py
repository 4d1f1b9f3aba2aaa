"""What a person sees while a run goes: one live screen, or one plain line a step."""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the screen: the first of the metrics `names` that a step has."""

    label: str
    names: tuple[str, ...]
    is_plain: bool = False  # also in the line that a step gets where there is no terminal
    tells_zero: bool = True  # False: it is shown once there is something to tell


ROWS = (
    Row("reward", ("reward/mean",), is_plain=True),
    Row("unscorable", ("reward/unscorable",), is_plain=True, tells_zero=False),
    Row(
        "accuracy",
        ("evaluation/accuracy", "reward/accuracy", "preference/accuracy"),
        is_plain=True,
    ),
    Row("preference loss", ("preference/loss",), is_plain=True),
    Row("margin", ("preference/margin",), is_plain=True),
    Row("nll", ("loss/nll",), is_plain=True),
    Row("kl teacher", ("distillation/kl",), is_plain=True),
    Row("groups without signal", ("group/all_equal_fraction",)),
    Row("entropy", ("policy/entropy",), is_plain=True),
    Row("kl engine-trainer", ("mismatch/k3",), is_plain=True),
    Row("clipped", ("clip/high_fraction", "clip/fraction")),
    Row("grad norm", ("grad/norm",), is_plain=True),
    Row("length", ("response/length_mean",)),
    Row("truncated", ("response/truncated_fraction",)),
    Row("prefix cache hits", ("prefix_cache/hit_fraction",)),
    Row("tokens/s", ("throughput/rollout_tokens_per_s",), is_plain=True),
    Row("seconds", ("time/step_s",), is_plain=True),
)
_TREND_STEPS = 24
_BAR_CELLS = 40
_SAMPLE_CHARS = 160
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
        self.run_name = run_name
        self.num_steps = num_steps
        self.console = console
        self.clock = clock
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
            if self.current_phase is None:
                self._ended_phases = {}
            else:
                self._ended_phases = self.phase_seconds()
            self.current_phase = name
            self._phase_started_s = self.clock()

    def phase_seconds(self) -> dict[str, float]:
        """Return seconds by phase of the current step, the running phase included."""
        seconds = dict(self._ended_phases)
        if self.current_phase is not None:
            passed = self.clock() - self._phase_started_s
            seconds[self.current_phase] = seconds.get(self.current_phase, 0.0) + passed
        return seconds

    def step(self, metrics: Mapping[str, Any], samples: Sequence[Mapping[str, Any]] = ()) -> None:
        """A step is complete: its record in metrics.jsonl, samples as in samples/step_*.jsonl."""
        with self.lock:
            self._ended_phases = self.phase_seconds()
            self.current_phase = None
            self.steps_done = int(metrics["step"]) + 1  # steps count from 0
            self.samples = {sample["rank"]: sample for sample in reversed(samples)}
            self.latest = {}
            for row in ROWS:
                for name in row.names:
                    if name in metrics:
                        self.latest[row.label] = metrics[name]
                        break
            for label, value in self.latest.items():
                self.history.setdefault(label, deque(maxlen=_TREND_STEPS)).append(value)
        self._show_step()

    def _show_step(self) -> None:
        """Show the step in one line: `step 7/300 reward 0.51 entropy 0.2 …`; 7 steps are done."""
        shown = [f"step {self.steps_done}/{self.num_steps}"]
        for row in ROWS:
            if not row.is_plain or row.label not in self.latest:
                continue
            value = self.latest[row.label]
            if value or row.tells_zero:
                label = row.label.replace(" ", "_")
                shown.append(f"{label} {format_value(value)}")
        self.message("  ".join(shown))

    def message(self, text: str) -> None:
        """Show one line of text, at once."""
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
        """Show text above what is redrawn."""
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stop redrawing; the last picture stays."""
        self._live.stop()


def make_screen(run_name: str, num_steps: int, console: Console | None = None) -> Screen:
    """Return a live screen where the console is a terminal that can redraw, else plain lines."""
    console = console or Console()
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveScreen(run_name, num_steps, console)
    return Screen(run_name, num_steps, console)


def render(screen: Screen) -> RenderableType:
    """Return everything that a live screen shows now."""
    with screen.lock:
        return Group(
            _header(screen),
            _phase_bar(screen),
            _metrics_table(screen),
            *(_sample(*sample) for sample in sorted(screen.samples.items())),
        )


def format_value(value: float | None) -> str:
    """Write a value with at most four significant digits; "–" for None."""
    if value is None:
        return "–"
    if isinstance(value, int) or 1000 <= abs(value) < 1e7:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def sparkline(values: Sequence[float | None]) -> str:
    """Return one block character a value, from the lowest to the highest; a dot for None."""
    known = [value / 2 for value in values if value is not None]  # halves: no span overflows
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low
    blocks = []
    for value in values:
        if value is None:
            blocks.append("·")
        elif span > 0:
            share = (value / 2 - low) / span
            blocks.append(_BLOCKS[min(7, int(share * 8))])
        else:
            blocks.append(_BLOCKS[3])
    return "".join(blocks)


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
    bar = Text()
    labels = Text()
    for name, passed in seconds.items():
        style = _PHASE_STYLES.get(name, "blue")
        bar.append("━" * round(_BAR_CELLS * passed / total), style)
        if name == screen.current_phase:
            labels.append(f"  ▸{name} {passed:.1f}s", f"bold {style}")
        else:
            labels.append(f"  {name} {passed:.1f}s", style)
    return Text.assemble(bar, labels, no_wrap=True, overflow="ellipsis")


def _metrics_table(screen: Screen) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify, no_wrap=True)
    for row in ROWS:
        values = screen.history.get(row.label)
        if values and (row.tells_zero or any(values)):
            table.add_row(row.label, format_value(values[-1]), sparkline(values))
    return table


def _sample(name: str, sample: Mapping[str, Any]) -> Text:
    return Text.assemble(
        (f"{name} {format_value(sample.get('reward'))}  ", "bold"),
        (_one_line(sample.get("prompt", "")), "dim"),
        " → ",
        _one_line(sample.get("completion", "")),
        overflow="fold",
    )


def _printable(character: str) -> str:
    if character.isprintable():
        return character
    if character == "\n":
        return "⏎"
    return "\ufffd"


def _one_line(text: str) -> str:
    """Return one line without control characters (samples must not steer the terminal), both ends
    kept."""
    shown = "".join(_printable(character) for character in str(text))
    if len(shown) <= _SAMPLE_CHARS:
        return shown
    half = _SAMPLE_CHARS // 2
    return f"{shown[:half]} … {shown[-half:]}"
