"""Our side of `versus_trl.py`: a real vLLM server and real trainer ranks under the real RL loop.

Processes are those that `grpo-megatron train` starts; only the controller runs here, so that its
steps can be asked for one by one.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from pathlib import Path

from versus_trl_workload import Case

from grpo_megatron.config.loader import write_resolved
from grpo_megatron.config.presets import load_preset
from grpo_megatron.controller import display
from grpo_megatron.controller.display import Phases
from grpo_megatron.controller.evaluation import Evaluator
from grpo_megatron.controller.resources import Resources, open_resources
from grpo_megatron.controller.run import make_rl_loop
from grpo_megatron.controller.trainer_link import RunState
from grpo_megatron.data.tiny_model import init_weights, write_tiny_model
from grpo_megatron.launch.processes import stop_all
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rollout.chunk_dispatch import ChunkDispatcher
from grpo_megatron.rollout.chunks import EngineAddress
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.worker_client import WorkerPool
from grpo_megatron.rollout.worker_service import WorkerService
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import MetricsWriter
from grpo_megatron.telemetry.mirrors import make_mirrors
from grpo_megatron.types import Completion

display._PIPE = open(os.devnull, "w")  # noqa: SIM115  (no supervisor reads it here)

RECIPE = """
name = "ours"
num_steps = 1000000
runs_dir = "{directory}"
model.preset = "tiny-qwen3-moe"
data = {{ num_validation = 0, num_heldout = 0 }}
objective = {{ preset = "grpo", monitor_share = 0 }}
batch = {{ num_prompts = {case.num_prompts}, num_samples_per_prompt = {case.num_samples} }}
optimizer.lr = 1e-6
checkpoint.interval = 0

[trainer]
num_ranks = 2
distributed_optimizer = false
precision = "float32"
max_tokens_per_microbatch = 16384

[[domains]]
name = "addition"
source = "file"
path = "{directory}/problems.jsonl"
rewards = [{{ function = "versus_trl_workload:share_of_digits" }}]

[rollout]
dtype = "float32"
max_new_tokens = {case.longest}
max_model_len = {max_model_len}
max_num_seqs = 128
num_replicas = 2  # one for each core
"""


class ForcedLengthClient(EngineClient):
    """Asks for a given number of tokens per sample. TRL's side forces the same lengths."""

    lengths: dict[tuple[int, ...], list[int]]  # by prompt

    async def generate(
        self, prompt_token_ids, *, max_tokens: int, n: int = 1, **kwargs
    ) -> list[Completion]:
        lengths = self.lengths.get(tuple(prompt_token_ids), [])
        if len(lengths) != n or len(set(lengths)) == 1:  # a check, or nothing to tell apart
            return await super().generate(prompt_token_ids, max_tokens=max_tokens, n=n, **kwargs)
        parts = [
            EngineClient.generate(self, prompt_token_ids, max_tokens=length, n=1, **kwargs)
            for length in lengths
        ]
        return [completion for part in await asyncio.gather(*parts) for completion in part]


class ForcedLengthWorker(WorkerService):
    """A worker of this process whose clients ask for the drawn lengths, and give no stop token."""

    lengths: dict[tuple[int, ...], list[int]]  # by prompt

    def make_client(self, address: EngineAddress, name: str) -> EngineClient:
        client = ForcedLengthClient(address.url, name, token=address.token)
        client.lengths = self.lengths
        return client


class OurSide:
    """Use as an async context manager; `run` makes steps."""

    def __init__(self, case: Case, directory: Path, overrides: list[str]):
        self.case = case
        recipe = directory / "ours.toml"
        longest = -(-(case.longest + 16) // 32) * 32
        recipe.write_text(RECIPE.format(case=case, directory=directory, max_model_len=longest))
        self.resolved = resolve(recipe, overrides)
        self.config, self.run_dir = self.resolved.config, RunDir(self.resolved.run_path)

    def make_model(self) -> Path:
        """The model that both sides train."""
        self.run_dir.create()
        write_resolved(self.run_dir.config, self.resolved)
        write_tiny_model(self.run_dir.model, load_preset(self.config.model.preset))
        init_weights(self.run_dir.model, self.config.seed)
        return self.run_dir.model

    async def __aenter__(self) -> OurSide:
        self._stack = stack = AsyncExitStack()
        self.run_dir = self.run_dir.begin()
        roles = LocalProcesses(self.config, self.run_dir)
        self.children = children = [
            *roles.replicas(),
            *roles.workers(),
            *roles.trainers(),
        ]
        stack.callback(stop_all, children)
        for child in children:
            child.start()
        resources = await stack.enter_async_context(open_resources(self.config, self.run_dir))
        self._force_lengths(resources)
        await resources.publisher.publish(0)
        metrics = stack.enter_context(closing(MetricsWriter(self.run_dir)))
        mirrors = stack.enter_context(
            closing(make_mirrors(self.config.telemetry, self.run_dir, self.config.name, {}))
        )
        self.loop = make_rl_loop(
            self.config,
            self.run_dir,
            RunState(0, 0, {}, 0.0, 0.0),
            resources,
            evaluator=Evaluator(
                self.config,
                dispatcher=resources.dispatcher,
                rewards=resources.rewards,
                judges=resources.judges,
            ),
            metrics=metrics,
            mirrors=mirrors,
            phases=Phases(),
            stopping=asyncio.Event(),
        )
        return self

    async def __aexit__(self, *error) -> None:
        await self._stack.aclose()

    def _force_lengths(self, resources: Resources) -> None:
        """Workers whose clients ask for the drawn lengths."""
        self.lengths: dict[tuple[int, ...], list[int]] = {}
        engines = resources.publisher.engines
        workers = {}
        for replica in engines.replicas:
            worker = ForcedLengthWorker(self.config, decode=resources.tokenizer.decode)
            worker.lengths = self.lengths
            self._stack.push_async_callback(worker.close)
            workers[replica.index] = worker
        resources.dispatcher = ChunkDispatcher(
            self.config, engines, WorkerPool(workers), self.run_dir.rollouts
        )

    async def run(self, num_steps: int, *, ahead: bool = False) -> dict:
        """Seconds of every step, and seconds by phase over all of them. `ahead`: the next step's
        rollout runs while one trains (`max_staleness` 1). The engines are idle at the end."""
        loop = self.loop
        seconds = []
        before = loop.phase_seconds.copy()
        loop.ahead = ahead
        loop.steps.ahead = ahead
        for left in reversed(range(num_steps)):
            self._set_lengths()  # the benchmark's own work
            started = time.perf_counter()
            await loop.take_step(more=left > 0)
            seconds.append(time.perf_counter() - started)
        phases = {name: spent - before[name] for name, spent in loop.phase_seconds.items()}
        return {"seconds": seconds, "phases": phases}

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Our processes get no processor: the threads of gloo wake up often, also when idle."""
        for child in self.children:
            child.signal_group(signal.SIGSTOP)
        try:
            yield
        finally:
            for child in self.children:
                child.signal_group(signal.SIGCONT)

    def _set_lengths(self) -> None:
        """Of the prompts of this step and of the next, which may be asked for within this one."""
        loop, size = self.loop, self.case.num_samples
        sampler = loop.steps.sampler
        before = sampler.state_dict()
        for step in range(loop.state.step + (loop.asked is not None), loop.state.step + 2):
            lengths = self.case.lengths(step)
            for place, prompt in enumerate(sampler.draw(self.case.num_prompts)):
                self.lengths[prompt.token_ids] = lengths[place * size : (place + 1) * size]
        sampler.load_state_dict(before)
