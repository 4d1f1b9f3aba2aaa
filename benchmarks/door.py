"""What the door costs: the same requests through it and straight to the engine.

    python benchmarks/door.py [--pairs 5] [--conversations 64] [--turns 3] [--tokens 128]

Starts one server with the tiny model of the agent demo. A client plays conversations of several
turns through the door, with OpenAI's API as JSON over HTTP; then the ids that the engine was sent,
with the same seeds, go straight to it, conversation by conversation in the same way. Prints the
seconds of both, each on a cold prefix cache, the median of the ratios door / direct, and what a
request costs this process more, the client's part included.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import aiohttp

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.turn_proof import prove
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.conversation_session import ConversationSession
from grpo_megatron.rollout.door import Door
from grpo_megatron.rollout.replica import serve_command
from grpo_megatron.rollout.reply_reader import ReplyReader
from grpo_megatron.rollout.turn_sampler import EpisodeLimits, TurnSampler

TOKEN = secrets.token_hex(16)

Asked = list[tuple[tuple[int, ...], dict]]
"""Requests of one conversation to the engine: ids and settings."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--conversations", type=int, default=64)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="door-") as name:
        directory = Path(name)
        model = directory / "model"
        write_tiny_model(model, load_preset("tiny-qwen3-moe-agent"))
        init_weights(model, 0)
        measure(options, make_config(options, model), directory)


def measure(options: argparse.Namespace, config: RunConfig, directory: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    argv, environment = serve_command(config, str(directory / "model"), 0, port, token=TOKEN)
    with open(directory / "server.log", "w") as log:
        server = subprocess.Popen(
            argv, env={**os.environ, **environment}, stdout=log, stderr=subprocess.STDOUT
        )
    try:
        asyncio.run(compare(options, directory / "model", port, lambda: server.poll() is None))
    finally:
        server.terminate()
        server.wait(30)


async def compare(options: argparse.Namespace, model: Path, port: int, is_alive) -> None:
    sampler = make_sampler(model)
    async with EngineClient(f"http://127.0.0.1:{port}", token=TOKEN) as engine:
        await engine.wait_ready(600, is_alive)
        await engine.set_weight_version(0)
        ratios = []
        costs = []
        for pair in range(-1, options.pairs):  # one pair to warm up
            await engine.reset_prefix_cache()
            start = time.perf_counter()
            start_cpu = time.process_time()
            asked = await through_door(options, engine, sampler)
            door_s = time.perf_counter() - start
            door_cpu_s = time.process_time() - start_cpu
            await engine.reset_prefix_cache()
            start = time.perf_counter()
            start_cpu = time.process_time()
            await asyncio.gather(*(straight(engine, one) for one in asked))
            direct_s = time.perf_counter() - start
            direct_cpu_s = time.process_time() - start_cpu
            ratio = door_s / direct_s
            mark = ""
            if pair < 0:
                mark = " (warm-up)"
            else:
                ratios.append(ratio)
                num_requests = sum(len(one) for one in asked)
                costs.append(1000 * (door_cpu_s - direct_cpu_s) / num_requests)
            print(
                f"pair {pair}: door {door_s:.2f} s, direct {direct_s:.2f} s, "
                f"ratio {ratio:.3f}{mark}",
                flush=True,
            )
        print(
            f"median ratio {statistics.median(ratios):.3f} of {len(ratios)} pairs; the door and "
            f"its client take {statistics.median(costs):.2f} ms of a processor a request"
        )


def make_sampler(model: Path) -> TurnSampler:
    """As of a domain of a run, proved before anything is measured."""
    tokenizer = load_tokenizer(model)
    template = tokenizer.chat_template

    def turn_tokens(tools):
        turns = TurnTokens(tokenizer, template, tools=tools)
        prove(turns)
        return turns

    sampler = TurnSampler(
        turn_tokens=turn_tokens,
        read_reply=ReplyReader("auto", template, model),
        decode=tokenizer.decode,
    )
    sampler.turn_tokens(())
    return sampler


async def through_door(
    options: argparse.Namespace, engine: EngineClient, sampler: TurnSampler
) -> list[Asked]:
    """Play all conversations side by side; returns what the engine was asked."""
    limits = EpisodeLimits(
        max_turns=options.turns,
        turn_tokens=options.tokens,
        episode_tokens=1 << 20,
        max_model_len=1024,
        seconds=600,
    )
    all_asked: list[Asked] = []
    async with Door("127.0.0.1") as door, aiohttp.ClientSession() as client:

        async def play(number: int) -> None:
            asked: Asked = []
            all_asked.append(asked)

            async def ask(token_ids, **settings):
                asked.append((tuple(token_ids), settings))
                return await engine.generate(token_ids, **settings)

            session = ConversationSession(ask, sampler, limits, seed=number)
            with door.serving(session) as opened:
                await converse(client, opened, number, options.turns)
                session.completion(0.0)

        await asyncio.gather(*(play(number) for number in range(options.conversations)))
    return all_asked


async def converse(client: aiohttp.ClientSession, opened, number: int, num_turns: int) -> None:
    """As a client of OpenAI's API does, with as little of its own as can be."""
    headers = {"Authorization": f"Bearer {opened.key}"}
    messages = [{"role": "user", "content": f"What is {number} times {number}?"}]
    for _ in range(num_turns):
        body = {"model": "policy", "messages": messages}
        async with client.post(
            f"{opened.url}/chat/completions", json=body, headers=headers
        ) as response:
            response.raise_for_status()
            answer = await response.json()
        messages.append(answer["choices"][0]["message"])
        messages.append({"role": "user", "content": "Go on."})


async def straight(engine: EngineClient, asked: Asked) -> None:
    for token_ids, settings in asked:
        await engine.generate(token_ids, **settings)


def make_config(options: argparse.Namespace, model: Path) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "door",
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
            "rollout": {
                "dtype": "float32",
                "max_model_len": 1024,
                "max_new_tokens": options.tokens,
                "max_num_seqs": 512,
                "kv_cache_gib": 0.5,
            },
        }
    )


if __name__ == "__main__":
    main()
