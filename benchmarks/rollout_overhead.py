"""How much of a raw HTTP client's speed our rollouts reach, samples durable on disk included.

    python benchmarks/rollout_overhead.py [--pairs 5] [--deterministic] [--in-process]

Starts one server with a tiny random Qwen3-MoE, then alternates a raw asyncio client (posts the
same token ids, sampling parameters and concurrency to the same endpoint, parses the JSON and keeps
it) with `ChunkSampler.rollouts` writing a shard; each starts on a cold prefix cache. Prints the
tokens/s of every run and the median of the pairwise ratios. `--in-process` adds, for information,
vLLM's own speed without HTTP.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp

from grpo_megatron.batching.store import write_shard
from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.chunk_sampling import ChunkSampler
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.pool import ReplicaPool
from grpo_megatron.rollout.replica import serve_command
from grpo_megatron.rollout.segments import derive_seed
from grpo_megatron.types import Prompt, RolloutGroup

TOKEN = secrets.token_hex(16)
VOCABULARY = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--routes", action="store_true")
    parser.add_argument("--in-process", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rollout-overhead-") as name:
        directory = Path(name)
        make_model(directory / "model")
        config = make_config(options, directory / "model")
        if options.in_process:
            environment = {**os.environ, **serve_command(config, "", 0, 0, token=TOKEN)[1]}
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    _IN_PROCESS,
                    str(directory / "model"),
                    *map(str, (options.prompts, options.samples, options.tokens)),
                ],
                env=environment,
                check=True,
            )
        measure(options, config, directory)


def measure(options: argparse.Namespace, config: RunConfig, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv, environment = serve_command(config, str(directory / "model"), 0, port, token=TOKEN)
    with open(directory / "server.log", "w") as log:
        server = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        asyncio.run(compare(options, config, directory, port, lambda: server.poll() is None))
    finally:
        server.terminate()
        server.wait(30)


async def compare(options, config, directory, port, is_alive) -> None:
    generator = random.Random(0)
    prompts = [
        Prompt(f"p{i}", "d", "", tuple(generator.randrange(VOCABULARY) for _ in range(32)), "")
        for i in range(options.prompts)
    ]
    total = options.prompts * options.samples * options.tokens
    async with EngineClient(f"http://127.0.0.1:{port}", token=TOKEN) as client:
        await client.wait_ready(120, is_alive)
        await client.set_weight_version(0)
        worker = ChunkSampler(config, ReplicaPool([client]))
        ratios = []
        for pair in range(-1, options.pairs):  # one pair to warm up
            speeds = {}
            for which in ("raw", "ours") if pair % 2 else ("ours", "raw"):
                await client.reset_prefix_cache()
                start = time.perf_counter()
                if which == "raw":
                    await raw(config, port, prompts, options)
                else:
                    groups = await worker.rollouts(0, prompts)
                    await asyncio.to_thread(write, groups, directory)
                speeds[which] = total / (time.perf_counter() - start)
            ratio = speeds["ours"] / speeds["raw"]
            print(
                f"pair {pair}: raw {speeds['raw']:.0f}, ours {speeds['ours']:.0f} tokens/s, "
                f"ratio {ratio:.3f}{' (warm-up)' if pair < 0 else ''}",
                flush=True,
            )
            ratios += [ratio] if pair >= 0 else []
        print(f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} pairs")


def write(groups: list[RolloutGroup], directory: Path) -> None:
    """As a step of the sample store: durable when this returns."""
    write_shard(directory / "rollout-0.safetensors", groups)


async def raw(config: RunConfig, port: int, prompts: list[Prompt], options) -> list:
    """What one would write in ten lines, and no check at all."""
    single = options.deterministic
    width = asyncio.Semaphore(
        max(config.rollout.max_concurrent_requests, config.rollout.max_num_seqs if single else 0)
    )
    jobs = [(p, g) for p in prompts for g in (range(options.samples) if single else [None])]
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(
        f"http://127.0.0.1:{port}", connector=connector, headers=headers
    ) as session:

        async def one(prompt: Prompt, sample: int | None):
            sampling = {
                "n": 1 if single else options.samples,
                "max_tokens": options.tokens,
                "temperature": 1.0,
                "logprobs": 0,
                "detokenize": False,
                "ignore_eos": True,
            }
            if single:
                sampling["seed"] = derive_seed(config.seed, 0, prompt.prompt_id, sample)
            body = {"token_ids": list(prompt.token_ids), "sampling_params": sampling}
            async with width, session.post("/inference/v1/generate", json=body) as response:
                response.raise_for_status()
                return json.loads(await response.read())

        return await asyncio.gather(*(one(*job) for job in jobs))


def make_config(options: argparse.Namespace, model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "rollout-overhead",
            "model": {"path": model},
            "domains": [
                {
                    "name": "d",
                    "source": "reasoning_gym",
                    "dataset": "chain_sum",
                    "template": "{question}",
                    "rewards": [{"function": "grpo_megatron.rewards.functions:exact_match"}],
                }
            ],
            "batch": {"num_prompts": options.prompts, "num_samples_per_prompt": options.samples},
            "rollout": {
                "dtype": "float32",
                "max_model_len": 512,
                "max_new_tokens": options.tokens,
                "max_num_seqs": 512,
                "kv_cache_gib": 0.5,
                "record_routes": options.routes,
                "deterministic": options.deterministic,
            },
        }
    )


def make_model(path: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            num_hidden_layers=4,
            intermediate_size=256,
            moe_intermediate_size=64,
            num_experts=8,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            max_position_embeddings=2048,
            initializer_range=0.08,
            bos_token_id=None,
            eos_token_id=2,
            pad_token_id=0,
        )
    ).save_pretrained(path)


_IN_PROCESS = """
import os, sys, time
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from grpo_megatron.rollout.plugin import register
register()
from vllm import LLM, SamplingParams
model, prompts, samples, tokens = sys.argv[1], *map(int, sys.argv[2:])
llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=512,
          block_size=32, kv_cache_memory_bytes=1 << 29, skip_tokenizer_init=True)
inputs = [{"prompt_token_ids": [(7 * i + j) % 500 for j in range(32)]} for i in range(prompts)]
params = SamplingParams(n=samples, max_tokens=tokens, ignore_eos=True, logprobs=0,
                        detokenize=False)
for _ in range(2):
    llm.reset_prefix_cache()
    start = time.perf_counter()
    llm.generate(inputs, params, use_tqdm=False)
    speed = prompts * samples * tokens / (time.perf_counter() - start)
print(f"in process: {speed:.0f} tokens/s", flush=True)
"""

if __name__ == "__main__":
    main()
