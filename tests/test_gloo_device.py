"""All gloo groups of a process share one thread, also after a fork."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120)]

PROGRAM = """
import json, os, pathlib, sys
import torch
import torch.distributed as dist
from grpo_megatron import gloo_device

def threads():
    names = [p.read_text().strip() for p in pathlib.Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")

def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.new_group([0]) for _ in range(4)]
    for number, made in enumerate(groups):
        tensor = torch.full((3,), float(number))
        dist.all_reduce(tensor, group=made)
        assert tensor.tolist() == [number] * 3
    return threads()

found = {}
if sys.argv[1] == "as released":
    found["threads"] = group()
elif sys.argv[1] == "another torch":
    torch.__version__ = "2.99.0"
    gloo_device.apply()
    found["threads"] = group()
else:
    gloo_device.apply()
    gloo_device.apply()
    found["threads"] = group()
    found["gloo"] = isinstance(dist.group.WORLD._get_backend(torch.device("cpu")),
                               dist.ProcessGroupGloo)
    found["timeout"] = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout.seconds
    dist.destroy_process_group()
    found["again"] = group()
    dist.destroy_process_group()
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        os.write(write, str(group()).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found["forked"] = int(os.read(read, 9))
print(json.dumps(found), flush=True)
os._exit(0)  # what is left of torch's threads may abort a normal exit
"""


def run(case: str, **variables: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, case],
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", **variables},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("interfaces, threads", [("", 1), ("lo", 1), ("lo,lo", 2)])
def test_groups_share_a_thread(interfaces, threads):
    variables = {"GLOO_SOCKET_IFNAME": interfaces} if interfaces else {}
    assert run("shared", **variables) == {
        "threads": threads,
        "again": threads,
        "forked": threads,
        "gloo": True,
        "timeout": 1800,
    }


@pytest.mark.parametrize("case", ["as released", "another torch"])
def test_as_released_each_group_has_its_own(case):
    """When this fails, torch shares them and `gloo_device` has become obsolete."""
    assert run(case)["threads"] == 5
