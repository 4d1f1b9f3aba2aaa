"""Rollout speed inside a finished run against a raw client alone on the same server settings.

    python benchmarks/rollout_in_run.py runs/demo [--steps 20]

Starts one server on the run's exported weights and lets a raw asyncio client (same endpoint, token
ids, group size, stop tokens, concurrency; it parses the JSON and checks nothing) sample batches of
the run's own prompts. Prints both medians of tokens/s and the ratio. The run's figures end when
samples are durable on disk, and begin when the weights have come: requests went out before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.prompts import load_splits
from grpo_megatron.data.sampler import PromptSampler
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.replica import serve_command
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics
from grpo_megatron.types import Prompt

TOKEN = secrets.token_hex(16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    run_dir = RunDir(options.run)
    config = read_resolved(run_dir.config).config
    records = read_metrics(run_dir.metrics)[-options.steps :]
    inside = statistics.median(r["throughput/rollout_tokens_per_s"] for r in records)
    alone = statistics.median(raw_speeds(config, run_dir, options.steps))
    print(
        f"inside the run {inside:.0f} tokens/s, raw client alone {alone:.0f} tokens/s, "
        f"ratio {inside / alone:.3f}"
    )


def raw_speeds(config: RunConfig, run_dir: RunDir, steps: int) -> list[float]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv, environment = serve_command(config, str(run_dir.export), 0, port, token=TOKEN)
    with tempfile.TemporaryFile() as log:
        server = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
        try:
            return asyncio.run(sample(config, run_dir, port, steps))
        finally:
            server.terminate()
            server.wait(30)


async def sample(config: RunConfig, run_dir: RunDir, port: int, steps: int) -> list[float]:
    tokenizer = load_tokenizer(run_dir.export)
    sampler = PromptSampler(
        load_splits(config, tokenizer).train,
        {d.name: d.weight for d in config.domains},
        config.seed,
    )
    async with EngineClient(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        await client.wait_ready(120)
        speeds = []
        for _ in range(-2, steps):  # two batches to warm up
            await client.reset_prefix_cache()
            batch = sampler.draw(config.batch.num_prompts)
            start = time.perf_counter()
            tokens = await raw_batch(config, port, batch, tokenizer.stop_token_ids)
            speeds.append(tokens / (time.perf_counter() - start))
        return speeds[2:]


async def raw_batch(
    config: RunConfig, port: int, prompts: tuple[Prompt, ...], stop: tuple[int, ...]
) -> int:
    width = asyncio.Semaphore(config.rollout.max_concurrent_requests)
    connector = aiohttp.TCPConnector(limit=0)
    sampling = {
        "n": config.batch.num_samples_per_prompt,
        "logprobs": 0,
        "detokenize": False,
        "max_tokens": config.rollout.max_new_tokens,
        "ignore_eos": True,
        "temperature": config.rollout.temperature,
        "stop_token_ids": list(stop),
    }
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, headers=headers
    ) as session:

        async def one(prompt: Prompt) -> int:
            body = {"token_ids": list(prompt.token_ids), "sampling_params": sampling}
            async with width, session.post("/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                answer = json.loads(await response.read())
            return sum(len(choice["token_ids"]) for choice in answer["choices"])

        return sum(await asyncio.gather(*(one(prompt) for prompt in prompts)))


if __name__ == "__main__":
    main()
