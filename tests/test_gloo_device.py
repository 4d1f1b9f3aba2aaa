"""All gloo groups of a process share one thread, also after a fork."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.engine

PROGRAM = Path(__file__).with_name("gloo_threads.py")


def run(case: str, threads: int, **variables: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(PROGRAM), case, str(threads)],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("interfaces, threads", [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_groups_share_a_thread(interfaces, threads):
    variables = {"GLOO_SOCKET_IFNAME": interfaces} if interfaces else {}
    assert run("shared", threads, **variables) == {
        "threads": threads,
        "again": threads,
        "forked": threads,
        "gloo": True,
        "timeout": 1800,
    }


@pytest.mark.parametrize("case", ["as_released", "another_torch"])
def test_as_released_each_group_has_its_own(case):
    """When this fails, torch shares them and `gloo_device` has become obsolete."""
    assert run(case, 5)["threads"] == 5
