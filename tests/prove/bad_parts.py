"""Parts that go wrong, each in its own way; they run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from grpo_megatron.errors import EngineError
from grpo_megatron.prove.evidence import EVIDENCE_FILE
from grpo_megatron.prove.part import Job


def good(job: Job) -> None:
    job.recorder.check("it works", True, "as it should")
    job.recorder.figure("speed", 12.3456, "tokens/s", "more than 10")


def wrong(job: Job) -> None:
    job.recorder.check("one thing", True)
    job.recorder.check("another thing", False, "7 and not 8")


def raises(job: Job) -> None:
    job.recorder.figure("before", 1)
    raise RuntimeError("CUDA error: out of memory. Tried to allocate 2.00 GiB: CUDA out of memory")


def raises_ours(job: Job) -> None:
    raise EngineError("rollout-0 ended with exit code 1\n    rollout-0| last words", remedy="x")


def hangs(job: Job) -> None:
    """With a child of its own, which must not stay behind."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (job.folder / "child.pid").write_text(str(child.pid))
    job.recorder.check("it began", True)
    print("waiting for a rank that never comes", flush=True)
    time.sleep(600)


def killed(job: Job) -> None:
    job.recorder.figure("before", 2)
    os.kill(os.getpid(), signal.SIGKILL)


def prints_garbage(job: Job) -> None:
    os.write(1, bytes(range(256)) * 20 + b"\n\x1b[31mred\x1b[0m \xff\xfe\n")
    os.write(2, "<script>alert(1)</script> 漢字\n".encode())
    job.recorder.check("<b>markup</b> in a check", False, "<script>alert(2)</script>")


def writes_garbage(job: Job) -> None:
    (job.folder / EVIDENCE_FILE).write_bytes(b"\x00\xff not JSON {")
    os._exit(0)


def ends_silently(job: Job) -> None:
    os._exit(0)
