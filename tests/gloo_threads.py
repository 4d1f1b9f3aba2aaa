"""Started by `test_gloo_device`: makes gloo groups and prints how many threads serve them.

    gloo_threads.py CASE THREADS     CASE: shared | as_released | another_torch

THREADS is how many are waited for: a thread gives itself its name when it first runs."""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_megatron import gloo_device

_LONGEST_WAIT_S = 60.0
_SETTLE_S = 0.2  # for threads too many


def num_threads(wanted: int) -> int:
    """Threads of gloo in this process, once there are `wanted` or have not come for a minute."""
    deadline = time.monotonic() + _LONGEST_WAIT_S
    while _num_named() < wanted and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(_SETTLE_S)
    return _num_named()


def _num_named() -> int:
    names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
    return names.count("gloo_tcp_loop")


def use_groups() -> None:
    """Make five groups, and reduce in four of them."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    groups = [dist.new_group([0]) for _ in range(4)]
    for number, group in enumerate(groups):
        tensor = torch.full((3,), float(number))
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [number] * 3


def count_shared(wanted: int) -> dict[str, object]:
    """In new groups, in groups made after those were destroyed, and in a forked process."""
    gloo_device.apply()
    gloo_device.apply()
    use_groups()
    found: dict[str, object] = {"threads": num_threads(wanted)}
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    found["gloo"] = isinstance(backend, dist.ProcessGroupGloo)
    found["timeout"] = backend.options._timeout.seconds
    dist.destroy_process_group()
    use_groups()
    found["again"] = num_threads(wanted)
    dist.destroy_process_group()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        use_groups()
        os.write(write, str(num_threads(wanted)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    found["forked"] = int(os.read(read, 9))
    return found


def main(case: str, wanted: int) -> None:
    """Print what was found as JSON."""
    if case == "shared":
        found = count_shared(wanted)
    else:
        if case == "another_torch":
            torch.__version__ = "2.99.0"
            gloo_device.apply()
        use_groups()
        found = {"threads": num_threads(wanted)}
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
    os._exit(0)  # what is left of torch's threads may abort a normal exit
