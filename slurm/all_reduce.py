"""Bandwidth of an all-reduce over all tasks of a Slurm step; started by doctor.sbatch.

    srun … python slurm/all_reduce.py DIRECTORY [MIB]

Bus bandwidth as nccl-tests define it: 2 (n - 1) / n of the bytes, by the time.
"""

import os
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_megatron.network import Endpoint, bind_gloo, own_address, wait_for_endpoint

rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
path = Path(sys.argv[1], f"all-reduce-{os.environ['SLURM_JOB_ID']}.json")
on_gpu = torch.cuda.is_available()
mib = int(sys.argv[2]) if len(sys.argv) > 2 else 1024 if on_gpu else 16
limit = timedelta(seconds=120)

address = own_address()
bind_gloo(address)
if rank == 0:
    listener = socket.create_server((address, 0), backlog=world)
    Endpoint(address, port := listener.getsockname()[1]).write(path)
    store = dist.TCPStore(
        address,
        port,
        world,
        is_master=True,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
else:
    found = wait_for_endpoint(path, limit.total_seconds())
    store = dist.TCPStore(
        found.host, found.port, world, is_master=False, timeout=limit, wait_for_workers=False
    )
if on_gpu:
    torch.cuda.set_device(int(os.environ["SLURM_LOCALID"]))
dist.init_process_group(
    "nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=world, timeout=limit
)
tensor = torch.ones(mib << 18, device="cuda" if on_gpu else "cpu")
times = []
for _ in range(6):
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(tensor)
    if on_gpu:
        torch.cuda.synchronize()
    times.append(time.perf_counter() - started)
assert tensor[0] == float(world) ** 6, "the sum is wrong"
if rank == 0:
    path.unlink()
    moved = 2 * (world - 1) / world * tensor.numel() * 4
    print(
        f"all-reduce of {mib} MiB over {world} tasks: {moved / min(times) / 1e9:.2f} GB/s "
        f"bus bandwidth ({'nccl' if on_gpu else 'gloo'})",
        flush=True,
    )
dist.destroy_process_group()
