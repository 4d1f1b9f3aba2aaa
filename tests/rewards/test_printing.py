"""What processes print: a pipe into a log, with a limit."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from grpo_megatron.orphans import start_worker
from grpo_megatron.rewards.printing import Printing, open_log

MIB = 1 << 20
POUR = "import os\nwhile True: os.write(1, bytes(1 << 20))"


class Started:
    """A program that prints into a log; `floods` has what it was told about floods."""

    def __init__(self, log, program):
        read_end, write_end = os.pipe()
        self.process = subprocess.Popen([sys.executable, "-c", program], stdout=write_end)
        os.close(write_end)
        self.floods = []
        output = os.fdopen(read_end, "rb", buffering=0)
        self.printing = Printing(output, open_log(log), "it", self.flooded)

    async def flooded(self, printed):
        self.process.kill()
        self.floods.append(printed)
        await self.printing.end()  # as hosts do, which end the process

    async def ended(self):
        await asyncio.to_thread(self.process.wait)
        await self.printing.end()


def printed_by(log, program, work=Started.ended):
    """Run a program and `work` beside it; return what was said about floods."""

    async def run():
        started = Started(log, program)
        try:
            await work(started)
        finally:
            started.process.kill()
            await started.ended()
        return started.floods

    return asyncio.run(run())


def test_all_is_kept_of_what_is_no_flood(tmp_path):
    log = tmp_path / "log"
    log.write_text("before\n")
    assert printed_by(log, "print('x' * (1 << 20)); print('end')") == []
    assert log.read_text() == "before\n" + "x" * MIB + "\nend\n"


def test_a_burst_is_cut_and_the_log_says_so(tmp_path):
    log = tmp_path / "log"
    assert printed_by(log, "print('x' * (10 << 20))") == []
    text = log.read_text()
    assert text.endswith("\nit: 8.0 MiB of what it printed left out\n")
    assert len(text) == pytest.approx(2 * MIB, rel=0.05)


def test_it_is_heard_again_after_a_burst(tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setattr("grpo_megatron.rewards.printing.MOST_A_SECOND", 100 * MIB)
    program = "import time; print('x' * (60 << 20), flush=True); time.sleep(1); print('end')"
    assert printed_by(log, program) == []
    assert log.read_text().endswith(" MiB of what it printed left out\nend\n")


def test_one_that_prints_without_end_is_told_of_once(tmp_path):
    log = tmp_path / "log"
    [flood] = printed_by(log, POUR)
    assert flood.startswith("printed more than it may: 64 MiB at once")
    assert log.stat().st_size < 3 * MIB
    assert log.read_bytes().endswith(b"it printed without end and is killed\n")


def test_it_waits_for_a_reader_that_is_busy(tmp_path):
    """However long nobody looks, it does not fill the disk."""

    async def work(started):
        await asyncio.sleep(0)
        time.sleep(1)  # the loop is busy
        assert not started.floods and started.process.poll() is None
        assert log.stat().st_size <= MIB

    log = tmp_path / "log"
    printed_by(log, POUR, work)


def test_lines_of_others_stay(tmp_path):
    log = tmp_path / "log"

    async def work(started):
        while not started.floods:
            with log.open("a") as other:
                other.write("of another\n")
            await asyncio.sleep(0.01)
            written.append("of another")

    written = []
    printed_by(log, POUR, work)
    assert log.read_bytes().count(b"of another\n") == len(written) > 0


def test_who_holds_the_pipe_is_not_waited_for(tmp_path):
    log = tmp_path / "log"
    program = (
        "import subprocess, sys; "
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], "
        "start_new_session=True, stdin=subprocess.DEVNULL); "
        "print(other.pid)"
    )
    printed_by(log, program)
    os.kill(int(log.read_text()), signal.SIGKILL)  # ProcessLookupError: it was waited for


def test_a_process_that_cannot_be_started_leaves_no_ends_open(monkeypatch):
    async def run():
        before = os.listdir("/proc/self/fd")
        monkeypatch.setattr(sys, "executable", "/no/python")
        with pytest.raises(FileNotFoundError):
            await start_worker("grpo_megatron.rewards.reward_worker")
        return before, os.listdir("/proc/self/fd")

    before, after = asyncio.run(run())
    assert after == before


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_stops_nobody(tmp_path):
    assert printed_by(Path("/dev/full"), "print('x' * (1 << 20)); print('end')") == []
