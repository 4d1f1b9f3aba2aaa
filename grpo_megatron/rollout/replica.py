"""One rollout server: `python -m grpo_megatron.rollout.replica RUN_DIR ATTEMPT INDEX [NODES]`.

Chooses a port on the node where it was started, publishes the address, becomes the server. With
tensor parallelism over several nodes it is started once on each of them; the first serves.
"""

import os
import socket
import sys
from pathlib import Path

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.network import Endpoint, bind_gloo, own_address, wait_for_endpoint
from grpo_megatron.rollout.engine import serve_command
from grpo_megatron.rundir import RunDir


def main(run_path: str, attempt: str, index: int, nodes: int = 1) -> None:
    run_dir = RunDir(Path(run_path), attempt)
    config = read_resolved(run_dir.config).config
    host, name = own_address(), f"rollout-{index}"
    bind_gloo(host)
    port = _reserve_port(host)
    argv, env = serve_command(config, str(config.model.path or run_dir.model), index, port, host)
    # Every run publishes the trainer's weights before it samples: reading them here too
    # would only take time, and a made-up model has none yet.
    argv += ["--load-format", "dummy"]
    node = int(os.environ["SLURM_PROCID"]) if nodes > 1 else 0
    if nodes > 1:
        group = run_dir.endpoints / f"{name}-nodes.json"
        if node == 0:
            Endpoint(host, _reserve_port(host)).write(group)
        head = wait_for_endpoint(group, config.rollout.startup_timeout_s, error=EngineError)
        argv += ["--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", head.host,
                 "--master-port", str(head.port), *(["--headless"] if node else [])]
    if node == 0:
        Endpoint(host, port).write(run_dir.endpoints / f"{name}.json")
    os.execve(argv[0], argv, {**os.environ, **env, **_gpus(config, index)})


def _reserve_port(host: str) -> int:
    """A free port, kept for the server: it binds beside this socket, which outlives the exec."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the server sets it too
    holder.bind((host, 0))  # never listens, so it takes no connection
    os.set_inheritable(holder.fileno(), True)
    port = holder.getsockname()[1]
    holder.detach()
    return port


def _gpus(config: RunConfig, index: int) -> dict[str, str]:
    """The replica's own among the node's, after those of trainer ranks on the same node."""
    placement, size = config.placement, config.rollout.tensor_parallel_size
    count = placement.gpus_per_node
    if not count or size >= count:
        return {}
    first = 0
    if placement.mode == "separate" and not placement.rollout_nodes:
        first = config.trainer.num_ranks // placement.trainer_nodes
    first += index % ((count - first) // size) * size
    there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[first:first + size])}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
