"""One rollout server: `python -m grpo_megatron.rollout.replica RUN_DIR ATTEMPT INDEX [NODES]`.

Chooses a port on the node where it was started, publishes the address, becomes the server. With
tensor parallelism over several nodes it is started once on each of them; the first serves."""

import json
import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_megatron import assets, progress
from grpo_megatron.config.engine_places import place_of_engine
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RolloutConfig, RunConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.network import (
    LOOPBACK,
    Endpoint,
    bind_gloo,
    own_address,
    reserve_port,
    wait_for_endpoint,
)
from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.plan.fp8_weights import published_weights
from grpo_megatron.plan.hf_config import engine_overrides
from grpo_megatron.plan.lora import engine_layers, max_lora_rank
from grpo_megatron.plan.memory import engine_cache_bytes
from grpo_megatron.plan.model_facts import facts_from_hf, read_config
from grpo_megatron.rollout.gpu_memory import gpu_bytes
from grpo_megatron.rollout.plugin import adapter_slot, engine_token
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.server_progress import PATH_VARIABLE
from grpo_megatron.rundir import RunDir, engine_name

PLUGIN = "grpo_megatron"
"""Our entry point in the group `vllm.general_plugins`."""
_CACHE_ARGUMENT = "--kv-cache-memory-bytes"


def main(run_path: str, attempt: str, index: int, nodes: int = 1) -> None:
    """Publish the address of replica `index` and become its server, on `nodes` nodes."""
    run_dir = RunDir(Path(run_path), attempt)
    name = engine_name(index)
    node = 0
    if nodes > 1:
        node = int(os.environ["SLURM_PROCID"])
    role = name
    if node > 0:
        role += f"-node-{node}"
    role_progress = run_dir.role_progress(role)
    progress.start_progress(role_progress, role)  # until the server does so
    config = read_resolved(run_dir.config).config
    host = own_address()
    bind_gloo(host)
    port = _inherited_port(host)
    token = secrets.token_hex(16)
    model = str(config.model.path or run_dir.model)
    argv, env = serve_command(config, model, index, port, host, token=token)
    # The trainer publishes its weights before anything is sampled; a made-up model has none yet.
    argv += ["--load-format", "dummy"]
    if nodes > 1:
        group = run_dir.endpoints / f"{name}-nodes.json"
        if node == 0:
            Endpoint(host, _inherited_port(host)).write(group)
        head = wait_for_endpoint(group, config.rollout.startup_timeout_s, error=EngineError)
        argv += multi_node_arguments(config.rollout, nodes, node, head)
    if node == 0:
        Endpoint(host, port, token).write(run_dir.endpoints / f"{name}.json")
    env[PATH_VARIABLE] = str(role_progress.absolute())
    os.execve(argv[0], argv, {**os.environ, **env, **gpu_variables(config, index)})


def multi_node_arguments(
    rollout: RolloutConfig, nodes: int, node: int, head: Endpoint
) -> list[str]:
    """Arguments of a server's part on its `node`, from 0, of `nodes`, which meet at `head`.

    The part on node 0 answers requests; the others are further workers, of one engine that is wider
    than a node or of data-parallel engines that each fit into one."""
    if rollout.data_parallel_size > 1:
        return _data_parallel_arguments(rollout.data_parallel_size // nodes, node, head)
    arguments = [
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(node),
        "--master-addr",
        head.host,
        "--master-port",
        str(head.port),
    ]
    if node > 0:
        arguments.append("--headless")
    return arguments


def _data_parallel_arguments(of_node: int, node: int, head: Endpoint) -> list[str]:
    """Return the arguments of one part of a server, which has `of_node` of its engines."""
    arguments = [
        "--data-parallel-size-local",
        str(of_node),
        "--data-parallel-address",
        head.host,
        "--data-parallel-rpc-port",
        str(head.port),
    ]
    if node > 0:
        arguments += ["--data-parallel-start-rank", str(node * of_node), "--headless"]
    return arguments


def _inherited_port(host: str) -> int:
    """Return a free port, kept for the server by a socket that outlives the exec."""
    holder = reserve_port(host)
    os.set_inheritable(holder.fileno(), True)
    port = int(holder.getsockname()[1])
    holder.detach()
    return port


def gpu_variables(config: RunConfig, index: int) -> dict[str, str]:
    """Return what tells replica `index` which of the node's GPUs are its own; empty where all
    are."""
    count = config.placement.gpus_per_node
    gpus = place_of_engine(config, index).gpus
    if len(gpus) == count:
        return {}
    there = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return {"CUDA_VISIBLE_DEVICES": ",".join(there[gpus.start : gpus.stop])}


def serve_command(
    config: RunConfig,
    model_path: str,
    replica: int,
    port: int,
    host: str = LOOPBACK,
    *,
    token: str,
) -> tuple[list[str], dict[str, str]]:
    """Return what to start for one replica: `argv`, and variables to add to the environment, from
    `engine.toml`. Unseeded requests of each replica have random numbers of their own.

    token: what every request to the server must carry, see `plugin.engine_token`."""
    rollout = config.rollout
    values = {
        "seed": derive_seed(config.seed, "engine", replica),
        "num_threads": num_threads(config),
        "max_logprobs": rollout.truncation.get("logprobs", 1),
        "middleware": engine_token.MIDDLEWARE,
    }
    is_colocated = config.placement.mode == "colocated" and not is_cpu_engine()
    conditions = {
        "samples": True,
        "routes": config.records_routes,
        "gpu_colocated": is_colocated,
    }
    if is_colocated and rollout.engine_argument(_CACHE_ARGUMENT) is None:
        cache = engine_cache_bytes(config, gpu_bytes())
        values["shared_cache_bytes"] = cache
        conditions["gpu_shared"] = cache > 0
    if config.lora is not None and config.engine_adapters:
        values["num_adapters"] = len(config.engine_adapters)
        values["max_lora_rank"] = max_lora_rank(config.lora.rank)
        conditions["adapters"] = True
    words, environment = _from_tables(rollout, model_path, (host, port), values, conditions)
    environment[engine_token.VARIABLE] = token
    if config.lora is not None and config.engine_adapters:
        words += _with_adapters(config)
        words += _with_slots(config.lora, Path(model_path))
    argv = [sys.executable, "-m", "grpo_megatron.rollout.serve", *words]
    return [*argv, *rollout.engine_arguments], environment


def _with_adapters(config: RunConfig) -> list[str]:
    """Say which adapters a server has, by name and by what it is told in place of a path."""
    domains = config.adapter_domains or ("",)
    words = ["--lora-modules"]
    for name, domain in zip(config.engine_adapters, domains, strict=True):
        # not NAME=PATH, which vLLM does not take of a name with a comma
        words.append(json.dumps({"name": name, "path": adapter_slot.path_of(domain)}))
    return words


def _with_slots(lora: LoraConfig, model: Path) -> list[str]:
    """Say which of vLLM's layers have slots for adapters: those with a target among them."""
    facts = facts_from_hf(_hf_config(model))
    return ["--lora-target-modules", *engine_layers(lora, facts)]


def scoring_command(
    rollout: RolloutConfig, model_path: str, port: int, max_logprobs: int
) -> tuple[list[str], dict[str, str]]:
    """Return what to start for a server on loopback that scores text, as a teacher behind a `url`
    is asked: vLLM's own server with a tokenizer. Returns `argv` and variables, as `serve_command`.

    rollout: type, longest text and cache of the server."""
    values = {"seed": 0, "num_threads": 1, "max_logprobs": max_logprobs}
    words, environment = _from_tables(rollout, model_path, (LOOPBACK, port), values, {})
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words], environment


def _from_tables(
    rollout: RolloutConfig,
    model_path: str,
    address: tuple[str, int],
    values: Mapping[str, object],
    conditions: Mapping[str, bool],
) -> tuple[list[str], dict[str, str]]:
    """Arguments and variables of the tables of `engine.toml` whose condition holds.

    conditions: of tables that not every server asks for; the others follow from `rollout`, the
    model and the machine."""
    host, port = address
    on_cpu = is_cpu_engine()
    hf = _hf_config(Path(model_path))
    sees = "vision_config" in hf
    samples = conditions.get("samples", False)
    loopback = host in (LOOPBACK, "::1", "localhost")
    filled_in = {
        **rollout.model_dump(),
        "model": model_path,
        "host": host,
        "port": port,
        "kv_cache_bytes": int(rollout.kv_cache_gib * (1 << 30)),
        "plugins": ",".join(_plugins()),
        **values,
    }
    conditions = {
        "always": True,
        **conditions,
        "reads_text_only": samples and not sees,
        "sees": sees,
        "cpu_sees": sees and on_cpu,
        "cpu": on_cpu,
        "data_parallel": rollout.data_parallel_size > 1,
        "expert_parallel": rollout.expert_parallel,
        "cpu_one_worker": on_cpu and rollout.tensor_parallel_size == 1,
        "cpu_latent": on_cpu and hf.get("kv_lora_rank") is not None,
        "cpu_deterministic": on_cpu and rollout.deterministic,
        "gpu_deterministic": rollout.deterministic and not on_cpu,
        "loopback": loopback,
        "cpu_loopback": on_cpu and loopback,
    }
    tables = assets.tables(__file__, "engine.toml")
    words: list[str] = []
    environment: dict[str, str] = {}
    for name, holds in conditions.items():
        if not holds:
            continue
        variables = dict(tables[name])
        words += [word.format(**filled_in) for word in variables.pop("arguments", ())]
        for key, text in variables.items():
            environment[key] = text.format(**filled_in)
    if hf:
        overrides = engine_overrides(hf)
        if samples:
            overrides |= published_weights(rollout, hf)
        if overrides:
            words += ["--hf-overrides", json.dumps(overrides)]
    return words, environment


def _plugins() -> list[str]:
    """vLLM's general plugins: ours, and those that `VLLM_PLUGINS` names."""
    named = os.environ.get("VLLM_PLUGINS", "").split(",")
    others = [name for name in named if name and name != PLUGIN]
    return [PLUGIN, *others]


def _hf_config(model: Path) -> dict[str, Any]:
    """config.json of a checkpoint directory; empty where there is none: vLLM says so better."""
    if not (model / "config.json").exists():
        return {}
    return read_config(model)


def num_threads(config: RunConfig) -> int:
    """OpenMP threads of each worker process on a CPU; one core is left to each HTTP process."""
    rollout = config.rollout
    cores = len(os.sched_getaffinity(0)) // rollout.num_replicas - 1
    return rollout.num_threads or max(1, cores // rollout.num_workers)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
