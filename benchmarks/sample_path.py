"""The way of a step's samples, with the real workers, controller, reward processes and store.

    python benchmarks/sample_path.py --scale 64                 # tokens of a sample / 64
    python benchmarks/sample_path.py --scale 64 --no-routes

Only the engines are imagined: they answer at once, with arrays; what their JSON costs a worker is
measured apart. The step has all of its samples,
groups and shards; each sample has `--tokens` / `--scale` tokens. Prints memory and busy seconds of
the controller, seconds of the workers for a million tokens, and what pretended trainer ranks take
to read what is theirs. What depends on tokens is multiplied with the scale where it says so."""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from grpo_megatron.batching.packing import plan_microbatches
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.rollout_batch import RolloutBatchBuilder, StepSampler
from grpo_megatron.controller.served_teachers import ServedTeachers
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.network import LOOPBACK, Endpoint, wait_for_endpoint
from grpo_megatron.rewards.pool import RewardPool
from grpo_megatron.rollout import chunk_dispatch, worker_service
from grpo_megatron.rollout.chunks import EngineAddress
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.engine_control import EngineControl
from grpo_megatron.rollout.generate import GenerateRequest
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.worker_client import WorkerClient, WorkerPool
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.rundir import RunDir
from grpo_megatron.types import Completion, Prompt, VersionSpan

PROMPT_TOKENS = 512  # scaled too
TEXT_BYTES_PER_TOKEN = 4
VOCABULARY = 150_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=16_384)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16_384, help="of a completion, unscaled")
    parser.add_argument("--scale", type=int, default=64, help="divides the tokens of a completion")
    parser.add_argument("--layers", type=int, default=94)
    parser.add_argument("--experts-per-token", type=int, default=8)
    parser.add_argument("--num-experts", type=int, default=128)
    parser.add_argument("--no-routes", action="store_true")
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2, help="processes that write")
    parser.add_argument("--rewards", type=int, default=1, help="processes that score")
    parser.add_argument("--ranks", type=int, default=128, help="pretended, 8 pipeline stages")
    parser.add_argument("--read-ranks", type=int, default=8, help="how many of them read")
    parser.add_argument("--directory", type=Path, help="parent of a new one, which is removed")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    route_shapes_of(options)
    if options.worker is not None:
        asyncio.run(serve_worker(options))
        return
    decode_answer(options)
    directory = Path(tempfile.mkdtemp(prefix="sample_path_", dir=options.directory))
    try:
        with started_workers(options, directory) as processes:
            asyncio.run(control(options, directory, processes))
        read_back(options, directory)
    finally:
        shutil.rmtree(directory)


def length_of(options: argparse.Namespace) -> int:
    """Tokens of a completion, scaled."""
    return options.tokens // options.scale


def prompt_length_of(options: argparse.Namespace) -> int:
    """Tokens of a prompt, scaled."""
    return max(PROMPT_TOKENS // options.scale, 2)


def route_shapes_of(options: argparse.Namespace) -> RouteShape | None:
    """The shape of routes, which the real code learns from a model, is that of the options."""
    shape = None
    if not options.no_routes:
        layers = tuple(range(options.layers))
        shape = RouteShape(layers, options.experts_per_token, options.num_experts)
    for module in (worker_service, chunk_dispatch):
        module.recorded_shape = lambda config: shape
    # as many prompts a shard as an unscaled step has
    chunk_dispatch.SHARD_BYTES = chunk_dispatch.SHARD_BYTES // options.scale
    return shape


def recipe(options: argparse.Namespace) -> RunConfig:
    length = length_of(options)
    return RunConfig.model_validate(
        {
            "name": "sample-path",
            "model": {"preset": "tiny-qwen3-moe"},
            "domains": [
                {
                    "name": "made",
                    "source": "reasoning_gym",
                    "dataset": "chain_sum",
                    "rewards": [{"function": "grpo_megatron.rewards.functions:exact_match"}],
                }
            ],
            "batch": {
                "num_prompts": options.samples // options.group,
                "num_samples_per_prompt": options.group,
            },
            "rollout": {
                "num_replicas": options.replicas,
                "max_new_tokens": length,
                "max_model_len": prompt_length_of(options) + length,
                "record_routes": not options.no_routes,
            },
        }
    )


# --- workers: the real service, with engines that answer at once


class InstantEngine(EngineClient):
    """An engine with one answer."""

    def __init__(self, address: str, name: str, answer: Completion):
        super().__init__(address, name)
        self._answer = answer

    async def generate(self, prompt_token_ids, *, n: int = 1, **settings) -> list[Completion]:
        return [self._answer] * n


class InstantWorker(worker_service.WorkerService):
    """A worker whose engines answer at once."""

    answer: Completion

    def make_client(self, address: EngineAddress, name: str) -> EngineClient:
        return InstantEngine(address.url, name, self.answer)


def made_answer(options: argparse.Namespace) -> Completion:
    rng = np.random.default_rng(options.worker)
    length = length_of(options)
    ids = rng.integers(0, VOCABULARY, length).astype(np.int32)
    routes = None
    route_versions = ()
    if not options.no_routes:
        num_rows = prompt_length_of(options) + length - 1
        first = rng.integers(0, options.num_experts, (num_rows, options.layers, 1))
        routes = (first + np.arange(options.experts_per_token)) % options.num_experts
        routes = routes.astype(np.uint8)
        route_versions = (VersionSpan(0, 0, num_rows),)
    return Completion(
        ids,
        rng.uniform(-3, 0, length).astype(np.float32),
        (VersionSpan(0, 0, length),),
        "stop",
        "",
        routes,
        route_versions,
    )


def decode_answer(options: argparse.Namespace) -> None:
    """What it costs a worker to read the JSON of an engine, by the real decoder."""
    num_tokens = 4096
    prompt = [1, 2]
    entries = [{"token_id": 7, "logprob": -1.2345678} for _ in range(num_tokens)]
    choice = {
        "index": 0,
        "token_ids": [7] * num_tokens,
        "logprobs": {"content": entries},
        "finish_reason": "stop",
        "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
    }
    if not options.no_routes:
        shape = (len(prompt) + num_tokens - 1, options.layers, options.experts_per_token)
        file = io.BytesIO()
        np.save(file, np.zeros(shape, np.uint8))
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()
    body = json.dumps({"choices": [choice]}).encode()
    request = GenerateRequest(prompt, num_tokens, record_routes=not options.no_routes)
    started = time.process_time()
    request.decode(body, "the engine")
    seconds = time.process_time() - started
    print(
        f"an engine's JSON: {len(body) / num_tokens:.0f} bytes a token, "
        f"{1e6 * seconds / num_tokens:.1f} s for a million tokens to decode"
    )


async def serve_worker(options: argparse.Namespace) -> None:
    text = "word" * (TEXT_BYTES_PER_TOKEN * length_of(options) // 4)
    service = InstantWorker(recipe(options), decode=lambda ids: text)
    service.answer = made_answer(options)
    endpoint = options.directory / f"worker-{options.worker}.json"
    await worker_service.serve(service, LOOPBACK, endpoint)


@contextlib.contextmanager
def started_workers(options: argparse.Namespace, directory: Path):
    processes = []
    try:
        for index in range(options.workers):
            own = [f"--directory={directory}", f"--worker={index}"]
            command = [sys.executable, __file__, *sys.argv[1:], *own]
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            processes.append(subprocess.Popen(command, env=environment))
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.wait()


# --- the controller: the real sampler of steps


async def control(options: argparse.Namespace, directory: Path, processes) -> None:
    config = recipe(options)
    run_dir = RunDir(directory, "1")
    run_dir.create()
    async with contextlib.AsyncExitStack() as stack:
        found = {}
        for index in range(options.workers):
            endpoint = await asyncio.to_thread(
                wait_for_endpoint, directory / f"worker-{index}.json", 600
            )
            client = WorkerClient(f"worker-{index}", Endpoint(**vars_of(endpoint)))
            found[index] = await stack.enter_async_context(client)
        clients = []
        for index in range(options.replicas):
            client = EngineClient("http://127.0.0.1:9", f"rollout-{index}")
            clients.append(await stack.enter_async_context(client))
        rewards = await stack.enter_async_context(
            RewardPool(config.domains, num_workers=options.rewards)
        )
        rollouts = chunk_dispatch.ChunkDispatcher(
            config, ReplicaPool(clients), WorkerPool(found), run_dir.rollouts
        )
        steps = make_steps(config, run_dir, rollouts, rewards, prompt_length_of(options))
        before_bytes = peak_bytes()
        before_workers = [cpu_seconds(process.pid) for process in processes]
        busy = time.process_time()
        started = time.perf_counter()
        recorded = await steps.sample(0)
        wall = time.perf_counter() - started
        busy = time.process_time() - busy
        spent = sum(cpu_seconds(process.pid) for process in processes) - sum(before_workers)
        tell(options, recorded.directory, wall, busy, spent, before_bytes)


def vars_of(endpoint: Endpoint) -> dict:
    return {"host": endpoint.host, "port": endpoint.port, "token": endpoint.token}


def make_steps(
    config: RunConfig, run_dir: RunDir, rollouts, rewards, prompt_length: int
) -> StepSampler:
    rng = np.random.default_rng(0)
    prompts = []
    for number in range(config.batch.num_prompts):
        ids = tuple(rng.integers(0, VOCABULARY, prompt_length).tolist())
        text = "word" * PROMPT_TOKENS  # of whole size: it passes through the controller
        prompts.append(Prompt(f"made-{number}", "made", text, ids, "42"))
    sampler = PromptSampler({"made": prompts}, {"made": 1.0}, 0, None)
    tokenizer = SimpleNamespace(decode=lambda ids: "", stop_token_ids=(0,))
    batches = RolloutBatchBuilder(
        config,
        sampler=sampler,
        exemplars=None,
        dispatcher=rollouts,
        spool=run_dir.rollouts,
        rewards=rewards,
        tokenizer=tokenizer,
        phases=SimpleNamespace(show_sampling=lambda *_: None),
    )
    return StepSampler(
        config,
        run_dir,
        sampler=sampler,
        exemplars=None,
        batches=batches,
        publisher=SimpleNamespace(version=0, resumed_at=0.0),
        judges=EngineControl([]),
        teachers=ServedTeachers(config),
        tokenizer=tokenizer,
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tell(options, directory: Path, wall, busy, spent, before_bytes) -> None:
    num_bytes = sum(path.stat().st_size for path in directory.iterdir())
    num_shards = len(list(directory.glob("rollout-*.safetensors")))
    tokens = options.samples * length_of(options)
    print(
        f"step: {options.samples} samples of {length_of(options)} tokens "
        f"(1/{options.scale} of {options.tokens}), {num_shards} shards, {num_bytes / 1e9:.2f} GB; "
        f"unscaled about {num_bytes * options.scale / 1e9:.0f} GB"
    )
    print(
        f"controller: peak {peak_bytes() / 2**20:.0f} MiB, {before_bytes / 2**20:.0f} MiB of it "
        f"before the step; busy {busy:.1f} s of {wall:.1f} s"
    )
    manifest = (directory / "manifest.json").stat().st_size
    print(f"  manifest.json {manifest / 1024:.0f} KiB")
    print(
        f"workers: {spent:.1f} processor seconds in {options.workers} processes, "
        f"{1e6 * spent / tokens:.2f} s for a million tokens, "
        f"{num_bytes / spent / 1e6:.0f} MB/s each; "
        f"unscaled on {options.replicas} nodes "
        f"{spent * options.scale / options.replicas:.0f} s each"
    )


# --- the trainer's ranks


def read_back(options: argparse.Namespace, directory: Path) -> None:
    """Some of the ranks, one after the other; each maps what it trains."""
    step = RunDir(directory).step_store(0)
    stages = min(8, options.ranks)
    layers = [part.tolist() for part in np.array_split(np.arange(options.layers), stages)]
    opened = []
    read = []
    num_bytes = 0
    chosen = range(0, options.ranks, max(options.ranks // options.read_ranks, 1))
    for rank in chosen:
        started = time.process_time()
        table = SampleTable(step, verify=rank == 0)
        lengths = table.prompt_lengths + table.completion_lengths
        plan = plan_microbatches(
            SamplePaths.without_sharing(lengths),
            num_ranks=options.ranks // stages,
            max_tokens=4 * int(lengths.max()),
        ).samples
        opened.append(time.process_time() - started)
        started = time.process_time()
        rows = np.concatenate(plan[rank // stages]).tolist()
        num_bytes += read_rows(table, rows, layers[rank % stages])
        read.append(time.process_time() - started)
    print(
        f"{len(chosen)} of {options.ranks} ranks, one after the other: "
        f"processor seconds to open and plan {statistics.median(opened):.2f} each "
        f"(the one that verifies {opened[0]:.2f} s), read {num_bytes / len(chosen) / 1e6:.1f} MB "
        f"in {statistics.median(read):.2f} each; unscaled "
        f"{num_bytes * options.scale / len(chosen) / 1e9:.1f} GB "
        f"in {statistics.median(read) * options.scale:.0f} each"
    )


def read_rows(table: SampleTable, rows: list[int], layers: list[int]) -> int:
    """Bytes of tokens, log-probs and routes that were read."""
    num_bytes = 0
    for row in rows:
        ids, logprobs = table.completion(row)
        num_bytes += len(np.array(ids)) * 4 + len(np.array(logprobs)) * 4
        if table.route_shapes:
            routes, status = table.routes(row, layers, table.route_shapes[0])
            assert not status.any()
            num_bytes += routes.nbytes
    return num_bytes


if __name__ == "__main__":
    main()
