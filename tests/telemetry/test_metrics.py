"""metrics.jsonl and events.jsonl: torn lines, resumed runs, several writers."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_megatron.errors import DataError
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event, read_events
from grpo_megatron.telemetry.metrics import (
    NONFINITE,
    MetricsWriter,
    read_metrics,
    readable_metrics,
)


@pytest.fixture
def run_dir(tmp_path) -> RunDir:
    return RunDir(tmp_path)


def fill(run_dir: RunDir, steps: range) -> None:
    writer = MetricsWriter(run_dir)
    for step in steps:
        writer.write(step, {"reward/mean": step / 3})
    writer.close()


def steps_of(run_dir: RunDir) -> list[int]:
    return [record["step"] for record in read_metrics(run_dir.metrics)]


def test_normalisers_are_kept_beside_the_file(run_dir):
    path = run_dir.metrics.with_name("metrics_normalisers.json")
    writer = MetricsWriter(run_dir)
    writer.write(0, {"reward/mean": 1, "policy/entropy": 1, "grad/norm": 2, "other": 1})
    writer.write_normalisers({"policy/entropy": "tokens", "grad/norm": "update", "absent": "max"})
    expected = {
        "reward/mean": "samples",
        "policy/entropy": "tokens",
        "grad/norm": "update",
        "other": "step",
    }
    assert json.loads(path.read_text()) == expected
    writer.write(1, {"ratio/max": 3})
    writer.write_normalisers({"ratio/max": "max"})
    assert json.loads(path.read_text()) == {**expected, "ratio/max": "max"}
    writer.close()


def test_a_run_that_goes_on_knows_what_earlier_lines_are_normalised_by(run_dir):
    """Of lines that are kept; names of a step that is taken back go with it."""
    path = run_dir.metrics_normalisers
    writer = MetricsWriter(run_dir)
    writer.write(0, {"policy/entropy": 1, "eval/accuracy": float("nan")})
    writer.write(1, {"policy/entropy": 1, "ratio/max": 3})
    writer.write_normalisers(
        {"policy/entropy": "tokens", "eval/accuracy": "groups", "ratio/max": "max"}
    )
    writer.close()
    writer = MetricsWriter(run_dir)
    writer.truncate_after(0)
    writer.write(1, {"grad/norm": 2})
    writer.write_normalisers({"grad/norm": "update"})
    writer.close()
    assert json.loads(path.read_text()) == {
        "eval/accuracy": "groups",
        "grad/norm": "update",
        "policy/entropy": "tokens",
    }


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_damaged_normalisers_are_made_again(run_dir, content):
    run_dir.metrics_normalisers.write_text(content, encoding="latin-1")
    writer = MetricsWriter(run_dir)
    writer.write(0, {"reward/mean": 1})
    writer.write_normalisers({})
    writer.close()
    assert json.loads(run_dir.metrics_normalisers.read_text()) == {"reward/mean": "samples"}


def test_what_is_written_is_what_is_returned_and_read(run_dir):
    writer = MetricsWriter(run_dir)
    metrics = {
        "reward/mean": 0.1 + 0.2,
        "batch/num_tokens": 7,
        "a/b/c": np.float32(0.1),
        "flag": True,
        "none": None,
        "grad/norm": np.float64(1e-300),
    }
    record = writer.write(0, metrics)
    assert list(record)[:2] == ["step", "time_s"] and record["reward/mean"] == 0.1 + 0.2
    assert read_metrics(run_dir.metrics) == [record]  # on disk before close


def test_values_that_are_not_finite_become_null_and_are_counted(run_dir, caplog):
    writer = MetricsWriter(run_dir)
    for step in range(2):
        record = writer.write(step, {"a": float("nan"), "b": np.float32("inf"), "c": 1.0})
    assert record == read_metrics(run_dir.metrics)[-1]
    assert (record["a"], record["b"], record["c"], record[NONFINITE]) == (None, None, 1.0, 2)
    assert writer.nonfinite == {"a": 2, "b": 2}
    assert [r.message.split(" is ")[0] for r in caplog.records] == ["metric a", "metric b"]
    assert NONFINITE not in writer.write(2, {"a": 1.0})


def test_a_step_is_never_written_twice(run_dir):
    fill(run_dir, range(5))
    writer = MetricsWriter(run_dir)
    for step in (3, 4):
        with pytest.raises(DataError, match=f"step {step} after step 4"):
            writer.write(step, {})
    writer.write(5, {})
    assert steps_of(run_dir) == list(range(6))


@settings(max_examples=40, deadline=None)
@given(number=st.integers(0, 8), kept=st.integers(-1, 9), torn=st.integers(0, 40))
def test_resuming_after_any_kill_gives_every_step_once(tmp_path_factory, number, kept, torn):
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    fill(run_dir, range(number))
    line = json.dumps({"step": number, "time_s": 1.0, "reward/mean": 2.0}).encode()
    with run_dir.metrics.open("ab") as file:
        file.write(line[:torn])  # killed while it wrote the next line
    assert steps_of(run_dir) == list(range(number))
    writer = MetricsWriter(run_dir)
    assert writer.last_step == (number - 1 if number else None)
    writer.truncate_after(kept)
    first = min(number, kept + 1)
    for step in range(first, 12):
        writer.write(step, {})
    writer.close()
    assert steps_of(run_dir) == list(range(12))
    assert [p.name for p in run_dir.root.iterdir()] == ["metrics.jsonl"]


def test_a_damaged_line_in_the_middle_is_named(run_dir):
    fill(run_dir, range(3))
    lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
    run_dir.metrics.write_bytes(b"".join([lines[0], b"{\n", lines[2]]))
    for read in (lambda: read_metrics(run_dir.metrics), lambda: MetricsWriter(run_dir)):
        with pytest.raises(DataError) as caught:
            read()
        assert "metrics.jsonl:2" in str(caught.value)
    with pytest.raises(DataError, match="no metrics there"):
        read_metrics(run_dir.root / "other.jsonl")


@pytest.mark.parametrize("damage", [b"{", b"\xff\xfe", b"\x0c", b"\r", b"\x85", b""])
def test_a_person_sees_what_is_readable_around_a_damaged_line(run_dir, damage):
    """Its number is that of an editor, whatever a bit has become."""
    fill(run_dir, range(5))
    lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
    for number in (1, 3):
        lines[number] = lines[number].replace(b",", damage, 1)
    run_dir.metrics.write_bytes(b"".join(lines))
    steps, problems = readable_metrics(run_dir.metrics)
    assert [record["step"] for record in steps] == [0, 2, 4]
    assert problems == ["line 2 is no metrics record", "line 4 is no metrics record"]
    with pytest.raises(DataError, match=r"metrics\.jsonl:2"):
        read_metrics(run_dir.metrics)


def test_a_person_is_told_of_a_damaged_last_line_but_not_of_one_that_is_being_written(run_dir):
    fill(run_dir, range(2))
    whole = run_dir.metrics.read_text()
    run_dir.metrics.write_text(f"{whole}{whole[:20]}")
    assert len(readable_metrics(run_dir.metrics).steps) == 2
    assert readable_metrics(run_dir.metrics).problems == []
    run_dir.metrics.write_text(f"{whole}{whole[:20]}\n")
    assert readable_metrics(run_dir.metrics).problems == ["line 3 is no metrics record"]


@pytest.mark.parametrize("content", ["", "no step", "{}"])
def test_a_file_without_a_step_is_empty_or_told(run_dir, content):
    assert readable_metrics(run_dir.metrics) == ([], [])
    run_dir.metrics.write_text(content)
    told = ["nothing in metrics.jsonl is a step's record"]
    assert readable_metrics(run_dir.metrics) == ([], told if content else [])


@settings(max_examples=100, deadline=None)
@given(order=st.lists(st.integers(0, 9), max_size=8))
def test_as_few_lines_as_possible_are_left_out_where_steps_do_not_ascend(tmp_path_factory, order):
    file = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in order))
    steps, problems = readable_metrics(file)
    kept = [record["step"] for record in steps]
    longest = 0
    for size in range(len(order) + 1):
        for chosen in itertools.combinations(order, size):
            if list(chosen) == sorted(set(chosen)):
                longest = size
    assert kept == sorted(set(kept)) and len(kept) == longest
    assert len(problems) == len(order) - longest


def test_one_wrong_number_hides_no_line_behind_it(run_dir):
    fill(run_dir, range(5))
    text = run_dir.metrics.read_text().replace('{"step": 1,', '{"step": 900,')
    run_dir.metrics.write_text(text)
    steps, problems = readable_metrics(run_dir.metrics)
    assert [record["step"] for record in steps] == [0, 2, 3, 4]
    assert problems == ["line 2, of step 900, is out of order"]


@pytest.mark.parametrize("order", [[0, 1, 1], [0, 2, 1], [1, 0, 2], [0, 1, 1, 2]])
def test_steps_that_do_not_ascend_are_named(run_dir, order):
    """A line that somebody has copied would count as a step more."""
    fill(run_dir, range(3))
    lines = run_dir.metrics.read_bytes().splitlines(keepends=True)
    run_dir.metrics.write_bytes(b"".join(lines[step] for step in order))
    wrong = [place for place in range(1, len(order)) if order[place] <= order[place - 1]]
    for read in (lambda: read_metrics(run_dir.metrics), lambda: MetricsWriter(run_dir)):
        with pytest.raises(DataError, match=f"of step {order[wrong[0]]}, the one before") as caught:
            read()
        assert f"metrics.jsonl:{wrong[0] + 1}" in str(caught.value)


def test_steps_that_a_machine_has_lost_are_missing(run_dir):
    """Its checkpoint was on the disk before its last lines were."""
    writer = MetricsWriter(run_dir)
    for step in (0, 1, 4, 5):
        writer.write(step, {})
    writer.close()
    assert steps_of(run_dir) == [0, 1, 4, 5]


def test_a_last_line_without_its_end_is_a_step(run_dir):
    fill(run_dir, range(3))
    run_dir.metrics.write_bytes(run_dir.metrics.read_bytes().rstrip(b"\n"))
    assert steps_of(run_dir) == [0, 1, 2]
    writer = MetricsWriter(run_dir)
    assert writer.last_step == 2
    writer.write(3, {})
    writer.close()
    assert steps_of(run_dir) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "line", ["[" * 200_000, '{"step": true}', '{"step": 1.5}', '{"step": -1}', "3"]
)
def test_a_line_that_is_no_record_is_named(run_dir, line):
    fill(run_dir, range(2))
    whole = run_dir.metrics.read_text()
    run_dir.metrics.write_text(f"{line}\n{whole}")
    with pytest.raises(DataError, match="no metrics record"):
        read_metrics(run_dir.metrics)
    run_dir.metrics.write_text(f"{whole}{line}")
    assert steps_of(run_dir) == [0, 1]


def test_an_event_that_is_nested_too_deep_is_left_out(run_dir):
    run_dir.events.write_text("[" * 200_000 + '\n{"kind": "died"}\n')
    assert [event["kind"] for event in read_events(run_dir.events)] == ["died"]


def _append_many(path, name: str) -> None:
    for index in range(100):
        append_event(path, "test", writer=name, index=index, padding="x" * 500)


def test_events_of_several_processes_do_not_mix(run_dir):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_append_many, args=(run_dir.events, n)) for n in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    events = read_events(run_dir.events)
    assert len(events) == 200
    for name in "ab":
        assert [e["index"] for e in events if e["writer"] == name] == list(range(100))


def test_events_survive_a_torn_line(run_dir):
    assert read_events(run_dir.events) == []
    append_event(run_dir.events, "started", time_s=1.5, role="trainer-0", path=run_dir.root)
    with run_dir.events.open("ab") as file:
        file.write(b'12\n{"step": 3}\n{"kind": "di')
    append_event(run_dir.events, "died")
    first, second = read_events(run_dir.events)
    assert first == {
        "time_s": 1.5,
        "kind": "started",
        "role": "trainer-0",
        "path": str(run_dir.root),
    }
    assert second["kind"] == "died"


def test_telemetry_imports_no_torch():
    code = (
        "import sys, pkgutil, importlib, grpo_megatron.telemetry as t\n"
        "for m in pkgutil.iter_modules(t.__path__, t.__name__ + '.'):\n"
        "    importlib.import_module(m.name)\n"
        "sys.exit('torch' in sys.modules or 'wandb' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
