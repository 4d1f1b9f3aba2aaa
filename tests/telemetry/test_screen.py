"""The screen, rendered to a recorded console."""

from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from grpo_megatron.telemetry.screen import (
    LiveScreen,
    Screen,
    format_value,
    make_screen,
    render,
    sparkline,
)

METRICS = {
    "reward/mean": 0.5,
    "evaluation/accuracy": 0.25,
    "policy/entropy": 0.3,
    "mismatch/k3": 2e-3,
    "grad/norm": 0.8,
    "group/all_equal_fraction": 0.95,
    "throughput/rollout_tokens_per_s": 12345.6,
    "time/step_s": 1.5,
    "other/metric": 1,
}
BEST = {"rank": "best", "prompt": "37 + 48 =", "completion": "85", "reward": 1.0}
WORST = {
    "rank": "worst",
    "prompt": "[red]12 + 9 =",
    "reward": 0.0,
    "completion": "x\x1b[31m\n" + "9" * 600 + "!",
}


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal() -> Console:
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=100,
        height=40,
        legacy_windows=False,
        color_system=None,
        _environ={"TERM": "xterm"},
    )


def plain() -> tuple[Screen, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    return Screen("demo", 300, Console(file=file), clock), clock, file


def drawn(screen: Screen) -> str:
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(render(screen))
    return console.export_text()


def test_phases_metrics_and_samples_are_drawn():
    screen, clock, _ = plain()
    for name, seconds in (("rollout", 2.0), ("reward", 0.5), ("train", 1.5)):
        screen.phase(name)
        clock.now += seconds
    text = drawn(screen)
    assert "demo  step 0/300  0:04" in text
    assert "rollout 2.0s  reward 0.5s  ▸train 1.5s" in text and "━" * 40 in text
    screen.step({"step": 6, **METRICS}, [BEST, WORST])
    text = drawn(screen)
    assert "step 7/300" in text and "▸" not in text
    lines = {line.split("  ")[0]: line for line in text.splitlines()}
    assert "▄" in lines["reward"] and "12,346" in lines["tokens/s"]
    assert {"kl engine-trainer", "groups without signal"} <= lines.keys()
    assert "best 1  37 + 48 = → 85" in text
    assert "worst 0  [red]12 + 9 = → x�[31m⏎999" in text.replace("\n", "") and "9!" in text
    assert len(text) < 2500
    screen.phase("rollout")
    clock.now += 0.25
    assert screen.phase_seconds() == {"rollout": 0.25}


def test_a_phase_may_repeat_in_a_step():
    clock = Clock()
    screen = LiveScreen("demo", 3, terminal(), clock)
    for _ in range(2):
        for name, seconds in (("rollout", 1.5), ("train", 2.5)):
            screen.phase(name)
            clock.now += seconds
    assert screen.phase_seconds() == {"rollout": 3.0, "train": 5.0}
    screen.close()


def test_printed_lines_stay_whole_above_the_live_screen(monkeypatch):
    console = terminal()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    own = sys.stderr
    screen = LiveScreen("demo", 3, console)
    try:
        screen.step({"step": 0, **METRICS}, [BEST, WORST])
        print("a printed line")
        print("a warning", file=sys.stderr)
        screen.message("a [bold]message[/bold]")
        screen.step({"step": 1, **METRICS}, [BEST, WORST])
    finally:
        screen.close()
        screen.close()
    told = console.file.getvalue().splitlines()
    for line in ("a warning", "a printed line", "a [bold]message[/bold]"):
        assert sum(found.endswith(line) for found in told) == 1
    assert sys.stderr is own and own.getvalue() == ""
    assert sys.stdout is not None and "step 2/3" in console.file.getvalue()


def test_without_a_terminal_there_is_one_plain_line_a_step():
    file = io.StringIO()
    screen = make_screen("demo", 300, console=Console(file=file))
    assert not isinstance(screen, LiveScreen)
    screen.phase("rollout")
    screen.message("note")
    screen.step({"step": 6, **METRICS}, [BEST, WORST])
    screen.step({"step": 7, "reward/mean": None})
    screen.close()
    assert file.getvalue().splitlines() == [
        "note",
        "step 7/300  reward 0.5  accuracy 0.25  entropy 0.3  kl_engine-trainer 0.002  "
        "grad_norm 0.8  tokens/s 12,346  seconds 1.5",
        "step 8/300  reward –",
    ]


def test_only_metrics_of_the_step_are_in_its_line():
    screen, _, file = plain()
    screen.step({"step": 0, "reward/mean": 1.0, "evaluation/accuracy": 0.5})
    screen.step({"step": 1, "reward/mean": 2.0})
    assert file.getvalue().splitlines()[1] == "step 2/300  reward 2"


def test_samples_that_could_not_be_scored_are_told_where_there_are_any():
    screen, _, file = plain()
    for step, count in enumerate([0.0, 46.0, 0.0]):
        screen.step({"step": step, "reward/mean": 1.0, "reward/unscorable": count})
        assert ("unscorable" in drawn(screen)) == (step > 0)
    assert file.getvalue().splitlines() == [
        "step 1/300  reward 1",
        "step 2/300  reward 1  unscorable 46",
        "step 3/300  reward 1",
    ]
    [row] = [line for line in drawn(screen).splitlines() if line.startswith("unscorable")]
    assert row.split() == ["unscorable", "0", "▁█▁"]


def test_a_terminal_gets_the_live_screen():
    screen = make_screen("demo", 3, console=terminal())
    assert isinstance(screen, LiveScreen)
    screen.close()


@given(st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False)))
def test_sparklines_take_any_values(values):
    line = sparkline(values)
    assert len(line) == len(values) and set(line) <= set("▁▂▃▄▅▆▇█·")
    assert [c == "·" for c in line] == [value is None for value in values]


def test_sparklines_and_numbers():
    assert sparkline([0, 1, None, 3.5, 7]) == "▁▂·▅█" and sparkline([2, 2]) == "▄▄"
    shown = [format_value(v) for v in (None, 3, 0.123456, 12345.6, 1e-7, 1e9, -2.0)]
    assert shown == ["–", "3", "0.1235", "12,346", "1e-07", "1e+09", "-2"]


@pytest.mark.parametrize(
    ("metric", "shown"),
    [
        ("loss/nll", "nll 2.908"),
        ("distillation/kl", "kl_teacher 2.908"),
        ("preference/loss", "preference_loss 2.908"),
    ],
)
def test_a_line_has_the_loss_of_runs_without_rewards_to_learn_from(metric, shown):
    screen, _, file = plain()
    screen.step({"step": 0, metric: 2.9081})
    assert file.getvalue().splitlines() == [f"step 1/300  {shown}"]
