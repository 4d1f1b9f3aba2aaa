"""What to start for a run on one machine."""

from __future__ import annotations

import os
import socket
import sys

from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.processes import ChildProcess
from grpo_megatron.rollout.engine import serve_command
from grpo_megatron.rundir import RunDir

HOST = "127.0.0.1"


def trainer_ranks(config: RunConfig, run_dir: RunDir) -> list[ChildProcess]:
    """One process per rank, with the variables that torchrun would set."""
    layout = config.trainer
    threads = layout.num_threads or max((os.cpu_count() or 1) // layout.num_ranks, 1)
    return [
        ChildProcess(
            f"trainer-{rank}",
            [sys.executable, "-m", "grpo_megatron.trainer.main", str(run_dir.root)],
            run_dir.logs / f"trainer-{rank}.log",
            {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(layout.num_ranks),
             "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1",
             # hundreds of lines about absent CUDA packages would bury the last words of a rank
             "PYTHONWARNINGS": "ignore"})
        for rank in range(layout.num_ranks)]


def controller(run_dir: RunDir, engine_urls: list[str]) -> ChildProcess:
    """Its standard output carries display messages, see `controller.display`."""
    return ChildProcess(
        "controller",
        [sys.executable, "-m", "grpo_megatron.controller.main", str(run_dir.root), *engine_urls],
        run_dir.logs / "controller.log", {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        pipe_stdout=True)


def rollout_replicas(config: RunConfig, run_dir: RunDir) -> tuple[list[ChildProcess], list[str]]:
    """The servers and their addresses."""
    model_path = config.model.path or run_dir.model
    children, urls = [], []
    for replica, port in enumerate(free_ports(config.rollout.num_replicas)):
        argv, env = serve_command(config, str(model_path), replica, port, host=HOST)
        # Every run publishes the trainer's weights before it samples: reading them here too
        # would only take time, and a made-up model has none yet.
        argv += ["--load-format", "dummy"]
        children.append(ChildProcess(f"rollout-{replica}", argv,
                                     run_dir.logs / f"rollout-{replica}.log", env))
        urls.append(f"http://{HOST}:{port}")
    return children, urls


def free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until all are chosen, so they differ."""
    sockets = [socket.create_server((HOST, 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports
