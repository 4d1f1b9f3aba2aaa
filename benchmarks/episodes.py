"""What thousands of waiting episodes cost the rollout worker that plays them.

    python benchmarks/episodes.py [--episodes 2000] [--turns 3] [--wait 5] [--served] [--tools]

Plays all episodes of one call side by side, as a run does: the worker's own process with its client
of the engine, its template, its records and its shard, and a process of environments (with
`--served` a server of the run) whose every reply takes `--wait` seconds. With `--tools` the worker
loads the parsers of calls, too. A stand-in answers for the engine, in a process of its own and at
once, with the answers that vLLM sends: no token is computed. So the worker is seen alone, at the
most that it can have to do. Prints seconds, resident memory and processor seconds of worker and
environments, and busy cores: processor seconds by seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import threading
import time
from pathlib import Path

import psutil
from aiohttp import web

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.environments.protocol import Observation, Outcome, Reply, Step
from grpo_megatron.environments.serve import serve
from grpo_megatron.rollout.chunks import Chunk, ChunkProblem, ChunkPrompt, EngineAddress
from grpo_megatron.rollout.episode_domains import episode_domains
from grpo_megatron.rollout.worker_service import WorkerService
from grpo_megatron.types import Problem

WAITS = "episodes:Waits"
TURN_TOKENS = 64
GROUP_SIZE = 8
MIB = 1 << 20


TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}


class Waits:
    """Replies after `seconds`, `turns` times; then the episode is won."""

    def __init__(self, *, seconds: float, turns: int, tools: bool = False):
        self._seconds = seconds
        self._left = turns
        self._tools: tuple[dict, ...] = ()
        if tools:
            self._tools = (TOOL,)

    async def reset(self, problem: Problem, seed: int) -> Observation:
        message = {"role": "user", "content": problem.question}
        return Observation((message,), self._tools, "0", Outcome(0.0))

    async def step(self, reply: Reply) -> Step:
        await asyncio.sleep(self._seconds)
        self._left -= 1
        if self._left == 0:
            return Step((), 1.0, True, "end", outcome=Outcome(1.0))
        return Step(({"role": "user", "content": "Go on."},), 0.0, False, str(self._left))

    async def close(self) -> None:
        """Nothing is held."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--wait", type=float, default=5.0, help="seconds of each reply")
    parser.add_argument("--served", action="store_true", help="environments behind a server")
    parser.add_argument("--tools", action="store_true", help="with parsers of calls")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    with tempfile.TemporaryDirectory(prefix="episodes-") as name:
        directory = Path(name)
        model = directory / "model"
        write_tiny_model(model, load_preset("tiny-qwen3-moe-agent"))
        config = make_config(options, model)
        spawn = multiprocessing.get_context("spawn")
        addresses = spawn.Queue()
        others = [spawn.Process(target=stand_in, args=(addresses,), daemon=True)]
        if options.served:
            others.append(
                spawn.Process(target=serve_environment, args=(config, directory), daemon=True)
            )
        for process in others:
            process.start()
        try:
            asyncio.run(measure(options, config, directory, addresses.get(timeout=60)))
        finally:
            for process in others:
                process.terminate()
                process.join()


async def measure(
    options: argparse.Namespace, config: RunConfig, directory: Path, engine: str
) -> None:
    tokenizer = load_tokenizer(directory / "model")
    endpoints = directory if options.served else None
    async with EnvironmentHost(config.domains, endpoints=endpoints) as host:
        service = WorkerService(
            config,
            stop_token_ids=tokenizer.stop_token_ids,
            decode=tokenizer.decode,
            episodes=episode_domains(config, tokenizer, directory / "model", host.environment),
            environment_metrics=host.take_metrics,
        )
        await service.sample(chunk_of(options, directory / "first", engine, 1))  # imports, proofs
        watch = Watch()
        sampled = await service.sample(
            chunk_of(options, directory / "all", engine, options.episodes // GROUP_SIZE)
        )
        watch.tell(sampled.counts)
        await service.close()


class Watch:
    """Looks at this process and those below it, from now on."""

    def __init__(self) -> None:
        self._own = psutil.Process()
        self._began_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._memory: list[int] = []
        self._environment_cpu_s = self._environments()[0]
        self._ended = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def tell(self, counts: dict[str, float]) -> None:
        self._ended.set()
        seconds = time.perf_counter() - self._began_s
        cpu_s = time.process_time() - self._cpu_s
        environment_cpu_s, environment_bytes = self._environments()
        environment_cpu_s -= self._environment_cpu_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        played = {name: count for name, count in counts.items() if name.startswith("environment/")}
        print(f"{seconds:.1f} s; {json.dumps(played)}")
        mean = statistics.mean(self._memory)
        print(
            f"worker: at most {peak / MIB:.0f} MiB resident, {mean / MIB:.0f} on average; "
            f"{cpu_s:.1f} s of a processor, {cpu_s / seconds:.2f} cores"
        )
        print(
            f"its processes of environments: {environment_bytes / MIB:.0f} MiB resident; "
            f"{environment_cpu_s:.1f} s of a processor, {environment_cpu_s / seconds:.2f} cores"
        )

    def _sample(self) -> None:
        while not self._ended.wait(0.5):
            self._memory.append(self._own.memory_info().rss)

    def _environments(self) -> tuple[float, int]:
        """Processor seconds and resident bytes of the processes below this one that have
        environments."""
        seconds = 0.0
        num_bytes = 0
        for child in self._own.children(recursive=True):
            if any("environment" in word for word in child.cmdline()):
                times = child.cpu_times()
                seconds += times.user + times.system
                num_bytes += child.memory_info().rss
        return seconds, num_bytes


def chunk_of(options: argparse.Namespace, shard: Path, engine: str, num_prompts: int) -> Chunk:
    prompts = []
    for number in range(num_prompts):
        problem = ChunkProblem(f"What is {number} times {number}?", "", {})
        prompts.append(ChunkPrompt(str(number), "d", (3, 4), 0, GROUP_SIZE, problem))
    longest = options.turns * (TURN_TOKENS + 32)
    shard.mkdir()
    path = str(shard / "rollout-0-000.safetensors")
    address = EngineAddress(engine)
    return Chunk(path, 0, prompts, longest, greedy=False, engines=[address], home=0)


def stand_in(addresses: multiprocessing.Queue) -> None:
    """Answers as vLLM does, at once: `TURN_TOKENS` tokens with log-probs, the last one a stop."""

    async def generate(request: web.Request) -> web.Response:
        asked = await request.json()
        stop = asked["sampling_params"]["stop_token_ids"][-1]
        num_tokens = min(TURN_TOKENS, asked["sampling_params"]["max_tokens"])
        tokens = [10 + place % 64 for place in range(num_tokens - 1)] + [stop]
        choice = {
            "index": 0,
            "token_ids": tokens,
            "finish_reason": "stop",
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5} for t in tokens]},
            "weight_versions": [{"version": "0", "start": 0, "end": num_tokens}],
        }
        return web.json_response({"choices": [choice]})

    async def run() -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/inference/v1/generate", generate)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        addresses.put(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.Event().wait()

    asyncio.run(run())


def serve_environment(config: RunConfig, directory: Path) -> None:
    """The domain's server, as a run has it."""
    environment = config.domains[0].environment
    assert environment is not None
    serving = serve(
        environment,
        address="127.0.0.1",
        endpoint=directory / "environment-0.json",
        log_path=Path(os.devnull),
        said=lambda _: None,
    )
    asyncio.run(serving)


def make_config(options: argparse.Namespace, model: Path) -> RunConfig:
    longest = options.turns * (TURN_TOKENS + 32)
    return RunConfig.model_validate(
        {
            "name": "episodes",
            "model": {"path": model},
            "domains": [
                {
                    "name": "d",
                    "source": "file",
                    "path": "rows.jsonl",
                    "template": "chat",
                    "rewards": [{"function": "environment"}],
                    "environment": {
                        "name": WAITS,
                        "arguments": {
                            "seconds": options.wait,
                            "turns": options.turns,
                            "tools": options.tools,
                        },
                        "max_turns": options.turns,
                        "step_s": max(30.0, 4 * options.wait),
                        "servers": int(options.served),
                    },
                }
            ],
            "trainer": {"max_tokens_per_microbatch": 2 * longest + 256},
            "rollout": {
                "dtype": "float32",
                "max_model_len": longest + 128,
                "max_new_tokens": longest,
                "max_num_seqs": 512,
            },
        }
    )


if __name__ == "__main__":
    main()
