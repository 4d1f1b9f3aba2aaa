"""Hangs of real processes are named with their state; what is only slow never is."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.watch import WatchConfig
from grpo_megatron.launch import look, watcher
from grpo_megatron.launch.look import Look, look_at
from grpo_megatron.launch.role_status import role_lines
from grpo_megatron.launch.watch import (
    SHORTEST_LIMIT_S,
    Hang,
    RoleWatch,
    culprits,
    expected_s,
    phase_limit_s,
    shortest_limit_s,
    without_waiting_controller,
)
from grpo_megatron.launch.watcher import Watcher, describe_hang
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.progress import Progress, ProgressRecord, read_progress
from grpo_megatron.rundir import RunDir

SETTINGS = WatchConfig()
PERIOD_S = 2.5
RECORD = ProgressRecord("trainer-0", 7, "here", 1, 0.0, "Train", "step_000003", False, 0.0)


@pytest.fixture(scope="module")
def config():
    return resolve("demo/gspo-moe-cpu", ["rollout.num_replicas=2", "trainer.num_ranks=2"]).config


# --- when a role is named


class Simulated:
    """A role, its file and who watches it, second by second."""

    def __init__(self, expected: float = 600.0):
        self.now = 0.0
        self.role = Progress(Path("/nowhere"), "trainer-0", clock=lambda: self.now)
        self.watch = RoleWatch("trainer-0", SETTINGS, lambda phase: expected)
        self.beat = 0

    def pass_time(self, seconds: float) -> list[Hang]:
        """Hangs that were seen in these seconds; the role beats."""
        found = []
        end = self.now + seconds
        while self.now < end:
            step = min(PERIOD_S, end - self.now)
            self.now += step
            self.beat += 1
            hang = self.watch.update(replace(self.role.record(), beat=self.beat), step)
            if hang:
                found.append(hang)
        return found


durations = st.lists(
    st.tuples(st.sampled_from(["Train", "SendWeights", "rollout"]), st.floats(0.1, 1000)),
    max_size=12,
)


@given(durations)
def test_what_is_merely_slow_is_never_named(asked):
    """A phase takes at most a minute, the recipe's time-out if it is the first of its kind, or five
    times the longest before."""
    simulated = Simulated(expected=600.0)
    longest: dict[str, float] = {}
    for phase, seconds in asked:
        limit = max(SHORTEST_LIMIT_S, 600.0 if phase not in longest else 5 * longest[phase])
        seconds = min(seconds, limit - 0.01)
        simulated.role.enter(phase)
        assert simulated.pass_time(seconds) == []
        longest[phase] = max(longest.get(phase, 0.0), seconds)


@given(usual_ms=st.integers(100, 100_000))
def test_a_phase_beyond_its_limit_is_named(usual_ms):
    """In milliseconds, to which a record rounds."""
    usual = usual_ms / 1000
    simulated = Simulated()
    simulated.role.enter("Train")
    simulated.pass_time(usual)
    simulated.role.enter("Train", "step_000002")
    limit = max(SHORTEST_LIMIT_S, 5 * usual)
    hangs = simulated.pass_time(limit + 2 * PERIOD_S)
    assert hangs and hangs[0].cause == "stuck" and hangs[0].record.detail == "step_000002"
    assert limit <= hangs[0].seconds <= limit + 2 * PERIOD_S
    simulated.role.advance()
    assert simulated.pass_time(PERIOD_S) == []  # it goes on


@given(st.floats(0, 1e5))
def test_what_waits_for_something_to_do_may_wait(seconds):
    simulated = Simulated()
    simulated.role.enter("waiting", is_waiting=True)
    simulated.now += seconds
    assert simulated.pass_time(PERIOD_S) == []


@given(st.booleans(), st.floats(1, 5))
def test_silence_is_named_within_a_minute_in_any_phase(is_waiting, period):
    watch = RoleWatch("controller", SETTINGS, lambda phase: 1e6)
    record = replace(RECORD, is_waiting=is_waiting)
    assert watch.update(record, period) is None
    passed = 0.0
    hang = None
    while hang is None:
        passed += period
        hang = watch.update(record, period)
    assert hang.cause == "silent" and hang.seconds == passed
    # the last heartbeat, until it was read; and the look at the process
    assert passed + 5 + look.PY_SPY_S + 5 <= 60
    assert watch.update(replace(record, beat=2), period) is None


def test_a_role_that_has_not_spoken_yet_has_the_time_of_a_start():
    watch = RoleWatch("rollout-0", SETTINGS, lambda phase: {"starting": 600.0}[phase])
    assert watch.update(None, 599.0) is None
    assert watch.update(None, 2.0).cause == "silent"


def test_unless_it_is_seen_to_be_stopped():
    watch = RoleWatch("rollout-0", SETTINGS, lambda phase: 600.0)
    assert watch.update(None, 29.0, is_stopped=True) is None
    assert watch.update(None, 2.0, is_stopped=True).cause == "silent"


def test_a_new_process_of_a_role_begins_anew():
    watch = RoleWatch("worker-0", SETTINGS, lambda phase: 600.0)
    watch.update(RECORD, 1.0)
    assert watch.update(RECORD, 40.0).cause == "silent"
    assert watch.update(replace(RECORD, pid=8), 1.0) is None  # the same number of beats


def test_trouble_below_a_role_is_named_when_it_lasts():
    watch = RoleWatch("rollout-0", SETTINGS, lambda phase: 600.0)
    for beat in range(1, 20):
        record = replace(RECORD, beat=beat, trouble="EngineCore (pid 9) is stopped")
        hang = watch.update(record, PERIOD_S)
        assert (hang is not None) == (beat * PERIOD_S >= SETTINGS.silent_s)
    assert hang.cause == "trouble"
    assert watch.update(replace(RECORD, beat=30), PERIOD_S) is None


def test_who_waits_for_a_hung_role_is_not_named():
    def hang(role, cause):
        return Hang(role, cause, 100.0, RECORD)

    stopped = {
        "trainer-0": hang("trainer-0", "stuck"),
        "trainer-1": hang("trainer-1", "silent"),
        "controller": hang("controller", "stuck"),
    }
    assert set(culprits(stopped)) == {"trainer-1"}
    deadlocked = {role: hang(role, "stuck") for role in stopped}
    assert set(culprits(deadlocked)) == {"trainer-0", "trainer-1"}
    alone = {"controller": hang("controller", "stuck")}
    assert culprits(alone) == alone
    assert without_waiting_controller(alone) == {}  # a checkpoint, say, takes its time
    silent = {"controller": hang("controller", "silent")}
    assert without_waiting_controller(silent) == silent


@pytest.mark.parametrize(
    ("role", "phase", "expected"),
    [
        ("trainer-3", "Train", 1800.0),
        ("rollout-0", "starting", 600.0),
        ("rollout-0", "serving", 60.0),
        ("worker-1", "sampling", 1800.0),
        ("controller", "rollout", 1800.0),
    ],
)
def test_the_first_of_a_phase_has_the_time_outs_of_the_recipe(config, role, phase, expected):
    assert expected_s(config, role, phase) == expected


def test_a_reward_may_always_take_its_time_out(config):
    slow = config.model_copy(
        update={"data": config.data.model_copy(update={"reward_timeout_s": 300.0})}
    )
    assert shortest_limit_s(slow, "controller", "reward") == 660.0
    assert shortest_limit_s(slow, "controller", "publish") == 60.0
    record = replace(RECORD, role="controller", phase="reward", longest_s={"reward": 0.1})
    assert phase_limit_s(record, 5.0, 1800.0, 660.0) == 660.0


def a_start_is_awaited(watch: Watcher) -> None:
    """An engine has died and is started again in a few seconds."""
    watch.awaits_start = True


def a_process_begins(watch: Watcher) -> None:
    """An engine imports, and has written nothing yet."""
    watch.begin("rollout-0", None)


@pytest.mark.parametrize("is_there_again", [a_start_is_awaited, a_process_begins])
def test_the_controller_may_wait_for_whoever_works(config, tmp_path, monkeypatch, is_there_again):
    """A checkpoint that is written takes longer than copies of it did."""
    watch, run_dir = watched(config, tmp_path, {"controller": None, "trainer-0": None})
    trainer = Progress(run_dir.role_progress("trainer-0"), "trainer-0")
    controller = Progress(run_dir.role_progress("controller"), "controller")

    def read(path):
        record = read_progress(path)
        if record is not None and record.role == "controller":
            return long_ago(record)
        return record

    monkeypatch.setattr(watcher, "read_progress", read)
    for phase in ("checkpoint", "reward", "checkpoint"):
        controller.enter(phase)
    controller.write()
    trainer.enter("FinishCheckpoint")
    trainer.write()
    watch._look = lambda record, log, probe: Look("S")
    watch.look_once(PERIOD_S)
    assert watch.take_news() == []
    trainer.enter("waiting", is_waiting=True)
    rested_s = 0.0
    while rested_s < 30 - PERIOD_S:  # it may not have read yet that the trainer has ended
        rested_s += PERIOD_S
        trainer.write()
        controller.write()
        watch.look_once(PERIOD_S)
        assert watch.take_news() == []
    watch.look_once(PERIOD_S)
    [news] = watch.take_news()
    assert (news.role, news.cause) == ("controller", "stuck")
    watch.look_once(PERIOD_S)
    assert watch.take_news() == [] and set(watch.overdue()) == {"controller"}
    is_there_again(watch)
    watch.look_once(PERIOD_S)
    [news] = watch.take_news()
    assert (news.kind, news.role) == ("recovered", "controller")
    assert watch.overdue() == {}


def test_limits_by_hand():
    train = replace(RECORD, longest_s={"Train": 40.0})
    assert phase_limit_s(train, 5.0, 1800.0) == 200.0
    assert phase_limit_s(replace(train, longest_s={"Train": 1.0}), 5.0, 1800.0) == 60.0
    assert phase_limit_s(replace(train, longest_s={}), 5.0, 1800.0) == 1800.0


# --- what is seen of a process

ROLE = """
import sys, time
from pathlib import Path
from grpo_megatron import progress

progress.start_progress(Path(sys.argv[1]), sys.argv[2])
print("ready to work", flush=True)

def deadlocked_collective():
    time.sleep(600)

progress.enter("Train", "step_000003")
deadlocked_collective()
"""


@contextlib.contextmanager
def role_process(path: Path, role: str, log: Path):
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", ROLE, str(path), role], stdout=file, stderr=file
        )
    try:
        wait_until(lambda: b"ready" in log.read_bytes())
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_stack_is_written_to_the_log_and_quoted(tmp_path, monkeypatch):
    monkeypatch.setattr(look.shutil, "which", lambda name: None)  # without py-spy
    with role_process(tmp_path / "trainer-0.json", "trainer-0", tmp_path / "log") as process:
        wait_until(lambda: (r := read_progress(tmp_path / "trainer-0.json")) and r.dumps_stacks)
        found = look_at(process.pid, log=tmp_path / "log", dumps_stacks=True)
        assert process.poll() is None  # the signal ends nothing
        assert found.state == "S" and not found.is_stopped
        assert "in deadlocked_collective" in found.stack and "in deadlocked" in (
            tmp_path / "log"
        ).read_text("utf-8")
        threads = found.stack.split("\n\n")
        assert "in deadlocked_collective" in threads[0] and len(threads) == 2  # the main one first
        assert not found.is_held_by_files


def test_py_spy_is_asked_first_where_it_is_installed(tmp_path, monkeypatch):
    """Here a program that writes as it does; it can look at stopped processes too."""
    spy = tmp_path / "py-spy"
    spy.write_text(
        "#!/bin/sh\necho 'Process 7: python -c import x'\necho \"asked $*\"\n"
        "echo 'Thread 7 (idle): \"MainThread\"'\necho '    barrier (torch.py:3)'\n"
    )
    spy.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = look_at(os.getpid())
    assert found.stack == 'Thread 7 (idle): "MainThread"\n    barrier (torch.py:3)'
    spy.write_text("#!/bin/sh\necho not permitted >&2; exit 1\n")
    assert look_at(os.getpid()).stack == ""


def test_a_stopped_process_is_said_to_be_stopped(tmp_path):
    with role_process(tmp_path / "a.json", "a", tmp_path / "log") as process:
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: look.process_state(process.pid) == "T")
        found = look_at(process.pid, log=tmp_path / "log", dumps_stacks=True)
        assert found.is_stopped


@pytest.mark.parametrize("says_so", [False, True])
def test_a_process_without_a_handler_is_not_sent_the_signal(tmp_path, says_so):
    """It would be killed by it; one that said that it has the handler may have lost it since."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        (tmp_path / "log").touch()
        look_at(process.pid, log=tmp_path / "log", dumps_stacks=says_so)
        assert process.poll() is None
    finally:
        process.kill()
        process.wait()


def test_a_heartbeat_inside_of_a_write_is_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setattr(look.shutil, "which", lambda name: None)
    os.mkfifo(tmp_path / "a.json")  # opening it for a write never returns
    with role_process(tmp_path / "a.json", "a", tmp_path / "log") as process:
        found = look_at(process.pid, log=tmp_path / "log", dumps_stacks=True)
        assert found.is_held_by_files and not found.is_stopped
    hang = Hang("a", "silent", 40.0, RECORD)
    news = describe_hang(hang, found, "")
    assert news.cause == "files" and "whether its work goes on is not known" in news.text


def test_no_process_is_seen_where_there_is_none():
    process = subprocess.Popen(["true"])
    process.wait()
    assert look_at(process.pid).state == ""


def test_the_command_prints_what_is_seen(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", look.__name__, str(os.getpid()), "", str(tmp_path / "probe")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert '"state": "S"' in done.stdout and not (tmp_path / "probe").exists()


@pytest.mark.parametrize(
    ("found", "cause", "words"),
    [
        (None, "silent", "could not be asked"),
        (Look("T"), "stopped", "is stopped"),
        (Look(""), "silent", "no such process"),
        (Look("D", num_in_device=1), "files", "waits for the file system"),
        (Look("S", write_s=20.0), "files", "waits for the file system"),
        (Look("R"), "silent", "its heartbeat does not run"),
    ],
)
def test_why_a_role_is_silent(found, cause, words):
    news = describe_hang(Hang("trainer-0", "silent", 33.0, RECORD), found, "step 3 of 8")
    assert news.cause == cause and words in news.text
    assert "trainer-0, in Train step_000003, has given no sign of life for 33 s" in news.text
    assert "; its last line: step 3 of 8" in news.text


# --- the watcher


def watched(config, tmp_path, roles, **settings) -> tuple[Watcher, RunDir]:
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    config = config.model_copy(update={"watch": WatchConfig(**settings)})

    def look_here(record, log, probe):
        return look_at(record.pid, log=log, dumps_stacks=record.dumps_stacks, probe=probe)

    return Watcher(config, run_dir, roles, look_here), run_dir


def test_a_stopped_role_is_named_once_and_once_more_when_it_goes_on(config, tmp_path):
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    file = run_dir.role_progress("trainer-0")
    with role_process(file, "trainer-0", run_dir.logs / "trainer-0.log") as process:
        watch, _ = watched(config, tmp_path, {"trainer-0": process.pid}, silent_s=15)
        wait_until(lambda: (r := read_progress(file)) and r.phase == "Train")
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: look.process_state(process.pid) == "T")
        for _ in range(8):
            watch.look_once(PERIOD_S)
        [news] = watch.take_news()
        assert (news.kind, news.role, news.cause) == ("hung", "trainer-0", "stopped")
        assert (news.phase, news.detail) == ("Train", "step_000003")
        assert "its last line: ready to work" in news.text
        assert list(watch.overdue()) == ["trainer-0"]
        assert any("stopped" in line and "trainer-0" in line for line in role_lines(run_dir))
        watch.look_once(PERIOD_S)
        assert watch.take_news() == []
        beat = read_progress(file).beat
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: read_progress(file).beat > beat)
        watch.look_once(PERIOD_S)
        [news] = watch.take_news()
        assert (news.kind, news.role) == ("recovered", "trainer-0")
        assert watch.overdue() == {}


def test_a_role_that_reads_libraries_is_not_named(config, tmp_path):
    """Its heartbeat does not run meanwhile; it is named if it is stopped, or takes too long."""
    watch, run_dir = watched(config, tmp_path, {"rollout-0": None})
    Progress(run_dir.role_progress("rollout-0"), "rollout-0").write()
    states = ["R", "D"]
    watch._look = lambda record, log, probe: Look(states[0])
    for _ in range(80):
        watch.look_once(PERIOD_S)
        watch._looks_again_s.clear()
    assert watch.take_news() == []
    states.insert(0, "T")
    watch.look_once(PERIOD_S)
    [news] = watch.take_news()
    assert (news.cause, news.phase) == ("stopped", "starting")


def test_a_start_that_takes_too_long_is_named(config, tmp_path):
    watch, run_dir = watched(config, tmp_path, {"rollout-0": None})
    Progress(run_dir.role_progress("rollout-0"), "rollout-0").write()
    watch._look = lambda record, log, probe: Look("R")
    for _ in range(2 + int(config.rollout.startup_timeout_s / PERIOD_S)):
        watch.look_once(PERIOD_S)
        watch._looks_again_s.clear()
    [news] = watch.take_news()
    assert news.cause == "silent" and news.seconds >= config.rollout.startup_timeout_s


def test_a_deadlocked_role_is_told_from_a_stopped_one_with_its_stack(config, tmp_path, monkeypatch):
    monkeypatch.setattr(look.shutil, "which", lambda name: None)
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    file = run_dir.role_progress("trainer-0")
    with role_process(file, "trainer-0", run_dir.logs / "trainer-0.log") as process:
        watch, _ = watched(config, tmp_path, {"trainer-0": process.pid})
        wait_until(lambda: (r := read_progress(file)) and r.phase == "Train")
        monkeypatch.setattr(watcher, "read_progress", lambda path: long_ago(read_progress(path)))
        watch.look_once(PERIOD_S)
        [news] = watch.take_news()
    assert news.cause == "stuck"
    assert "trainer-0, in Train step_000003, runs, but has made no progress for 4000 s" in news.text
    assert "in deadlocked_collective" in news.text
    assert "in deadlocked_collective" in Path(news.stack).read_text("utf-8")


def long_ago(record: ProgressRecord) -> ProgressRecord:
    return replace(record, idle_s=4000.0)


def test_files_that_stall_name_no_role(config, tmp_path, monkeypatch):
    """A round of reading takes a minute: nothing is said about roles, once about the files."""
    watch, run_dir = watched(config, tmp_path, {"controller": None})
    Progress(run_dir.role_progress("controller"), "controller").write()
    monkeypatch.setattr(watcher, "_STALLED_S", -1.0)  # every round is too slow
    for _ in range(40):
        watch.look_once(60.0)
    [news] = watch.take_news()
    assert news.kind == "files" and str(tmp_path) in news.text
    monkeypatch.undo()
    watch.look_once(PERIOD_S)
    [news] = watch.take_news()
    assert news.kind == "files" and "answers again" in news.text


def test_a_watcher_that_was_stopped_itself_blames_nobody(config, tmp_path, monkeypatch):
    watch, run_dir = watched(config, tmp_path, {"controller": None})
    Progress(run_dir.role_progress("controller"), "controller").write()
    passed = []
    monkeypatch.setattr(watch, "look_once", passed.append)
    times = iter([0.0, 3600.0, 3601.0])
    waits = iter([False, False, True])
    monkeypatch.setattr(watcher.time, "monotonic", lambda: next(times))
    monkeypatch.setattr(watch._closed, "wait", lambda seconds: next(waits))
    watch._watch()
    assert passed == [2 * watcher.PERIOD_S, 1.0]


@pytest.mark.parametrize("is_begun_again", [False, True])
def test_nothing_is_told_of_a_process_that_ended_while_it_was_looked_at(
    config, tmp_path, is_begun_again
):
    """Neither as hung, nor under the name of the process that was started in its place."""
    watch, run_dir = watched(config, tmp_path, {"rollout-0": None})
    Progress(run_dir.role_progress("rollout-0"), "rollout-0").write()

    def ends_meanwhile(record, log, probe):
        watch.forget("rollout-0")
        if is_begun_again:
            watch.begin("rollout-0", None)
        return Look("")

    watch._look = ends_meanwhile
    rounds_to_silence = 1 + int(config.watch.silent_s / PERIOD_S)
    for _ in range(rounds_to_silence):
        watch.look_once(PERIOD_S)
    assert watch._named  # the look did take place
    assert watch.take_news() == []
    assert watch.overdue() == {} and watch.cause_of("rollout-0") == ""
    for _ in range(rounds_to_silence):
        watch.look_once(PERIOD_S)
    assert watch.take_news() == []  # it does not go on either


def test_many_that_hang_at_once_are_all_named(config, tmp_path):
    roles = {f"trainer-{rank}": None for rank in range(20)}
    run_dir = RunDir(tmp_path, "1")
    run_dir.create()
    for role in roles:
        Progress(run_dir.role_progress(role), role).write()
    watch, _ = watched(config, tmp_path, roles)
    looked = []

    def count(record, log, probe):
        looked.append(record.role)
        return Look("T")

    watch._look = count
    for _ in range(20):
        watch.look_once(PERIOD_S)
    assert {news.role for news in watch.take_news()} == set(roles)
    assert len(looked) == 8


def wait_until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
