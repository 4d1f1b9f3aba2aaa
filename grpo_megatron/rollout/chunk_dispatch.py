"""In the controller's process: prompts of a call go out in chunks, over all rollout workers.

Chunks of prompts are drawn from one queue, so a slow replica takes fewer; groups come in the order
of the prompts. A worker writes what was sampled; here are records of it. What a worker does with a
chunk is in `chunk_sampling`."""

import itertools
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from grpo_megatron import progress
from grpo_megatron.batching.spool import SpoolDirectory, StoredShard
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.chunks import Chunk, ChunkProblem, ChunkPrompt, EngineAddress
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.prefix_cache import prefix_cache_metrics
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.rollout.worker_client import Worker, WorkerLost, WorkerPool
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.types import Prompt, RolloutGroup, StoredCompletion

SHARD_BYTES = 256 << 20
"""About the largest shard; a prompt is never divided."""
SMALL_SHARD_BYTES = 1 << 20
"""Chunks are not made so small that a slow replica can take fewer, where shards are below this."""
_CHUNKS_PER_REPLICA = 4  # where there are several replicas
_TOKEN_BYTES = 8  # id and log-prob

StoredGroup = RolloutGroup[StoredCompletion]


class _NoEngine(Exception):
    """All engines that a chunk named have died, and others may be asked: it is asked again."""


class ChunkDispatcher:
    """Has rollout workers sample on the replicas of a run, and write below `spool`."""

    def __init__(self, config: RunConfig, engines: ReplicaPool, workers: WorkerPool, spool: Path):
        self.config = config
        self.engines = engines
        self.workers = workers
        self._counts: defaultdict[str, float] = defaultdict(float)
        self._spool = spool
        self._numbers = itertools.count()

    async def rollouts(
        self,
        step: int,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 0,
        max_tokens: int = 0,
        samples: Sequence[range] | None = None,
    ) -> list[StoredGroup]:
        """Sample G completions of every prompt, `num_samples` or the recipe's number, of at most
        `max_tokens` or the recipe's; groups are in prompt order.

        samples: which samples of each prompt, see `ChunkSampler.rollouts`. Raises EngineError: no
        replica or no worker is alive, or a request failed for good; SetupError: a worker cannot
        write."""
        if samples is None:
            size = num_samples or self.config.batch.num_samples_per_prompt
            samples = [range(size)] * len(prompts)
        longest = max_tokens or self.config.rollout.max_new_tokens
        return await self._sample(step, prompts, samples, longest, greedy=False)

    async def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[StoredGroup]:
        """Return the most likely completion of every prompt, at most `max_tokens` long. Raises what
        `rollouts` does."""
        return await self._sample(0, prompts, [range(1)] * len(prompts), max_tokens, greedy=True)

    def take_metrics(self) -> dict[str, float]:
        """Return how episodes have ended since the last call, over all workers (see
        `EnvironmentHost.take_metrics`), and what engines had cached (`prefix_cache_metrics`). What
        a worker had not reported is gone with it."""
        counts = self._counts
        self._counts = defaultdict(float)
        metrics = {}
        for name, count in counts.items():
            if name.startswith("environment/"):
                metrics[name] = count
        return metrics | prefix_cache_metrics(counts)

    def add_counts(self, counts: Mapping[str, float]) -> None:
        """Take what a worker has counted."""
        for name, count in counts.items():
            self._counts[name] += count

    async def _sample(
        self,
        step: int,
        prompts: Sequence[Prompt],
        samples: Sequence[range],
        max_tokens: int,
        *,
        greedy: bool,
    ) -> list[StoredGroup]:
        if not prompts:
            return []
        directory = SpoolDirectory(self._spool / f"{next(self._numbers):06d}")
        call = _DispatchedCall(
            self,
            directory=directory,
            step=step,
            prompts=prompts,
            samples=samples,
            max_tokens=max_tokens,
            greedy=greedy,
        )
        await call.dispatch_all()
        return call.stored_groups()


class _Part(NamedTuple):
    """Prompts [first, end) of a call."""

    first: int
    end: int


class _DispatchedCall:
    """The prompts of one call, while workers are sent its chunks."""

    def __init__(
        self,
        owner: ChunkDispatcher,
        *,
        directory: SpoolDirectory,
        step: int,
        prompts: Sequence[Prompt],
        samples: Sequence[range],
        max_tokens: int,
        greedy: bool,
    ):
        self._config = owner.config
        self._engines = owner.engines
        self._workers = owner.workers
        self._add_counts = owner.add_counts
        self._directory = directory
        self._step = step
        self._prompts = prompts
        self._samples = samples
        self._max_tokens = max_tokens
        self._greedy = greedy
        self._largest_group = max(1, *(len(of_prompt) for of_prompt in samples))
        self._found: list[StoredGroup | None] = [None] * len(prompts)
        self._shard_numbers = itertools.count()
        self._queue: deque[_Part] = deque()

    def stored_groups(self) -> list[StoredGroup]:
        """Return the groups in the order of the prompts; all chunks were sampled."""
        found = [group for group in self._found if group is not None]
        assert len(found) == len(self._prompts)
        return found

    async def dispatch_all(self) -> None:
        """Send the workers chunks until all are sampled. Raises what `rollouts` does."""
        await self._engines.wait_alive()
        size = self._prompts_per_chunk()
        for first in range(0, len(self._prompts), size):
            self._queue.append(_Part(first, min(first + size, len(self._prompts))))
        width = max(self._prompts_at_once() // size, 1)
        while self._queue:
            await self._engines.wait_alive()
            taking = self._engines.taking
            share = -(-len(self._queue) // len(taking))
            senders = []
            for replica in taking:
                for _ in range(min(width, share)):
                    senders.append(self._send_chunks(replica))
            await finish_or_cancel(senders)

    def _prompts_per_chunk(self) -> int:
        token_bytes = _TOKEN_BYTES
        shape = recorded_shape(self._config)
        if shape is not None:
            token_bytes += int(shape.num_bytes(1))
        prompt_bytes = self._largest_group * self._max_tokens * token_bytes
        num_prompts = len(self._prompts)
        num_chunks = -(-num_prompts * prompt_bytes // SHARD_BYTES)
        num_replicas = len(self._engines.taking)
        if num_replicas > 1:
            share_bytes = num_prompts * prompt_bytes // num_replicas
            of_replica = min(max(share_bytes // SMALL_SHARD_BYTES, 1), _CHUNKS_PER_REPLICA)
            num_chunks = max(num_chunks, num_replicas * of_replica)
        return -(-num_prompts // num_chunks)

    def _prompts_at_once(self) -> int:
        """Return how many prompts keep a replica busy: requests are for all samples of a prompt, or
        one a sample."""
        rollout = self._config.rollout
        at_once = rollout.max_concurrent_requests
        if not rollout.deterministic:
            return at_once
        return -(-max(at_once, rollout.max_num_seqs) // self._largest_group)

    async def _send_chunks(self, replica: Replica) -> None:
        """Send a replica's worker one chunk after the other, until there are none or the replica
        died."""
        while self._queue and self._is_taking(replica):
            await self._workers.wait_alive()
            if not self._queue:
                return
            part = self._queue.popleft()
            index, worker = self._workers.beside(replica.index)
            replica.in_flight += 1
            try:
                await self._send(part, replica, worker)
            except WorkerLost as error:
                self._queue.appendleft(part)
                self._workers.lose(index, worker, error)
            except _NoEngine:
                self._queue.appendleft(part)
            finally:
                replica.in_flight -= 1

    def _is_taking(self, replica: Replica) -> bool:
        """Whether a replica takes chunks. Where all have died for good it does: the worker then
        says so."""
        if replica in self._engines.taking:
            return True
        if replica.is_alive:  # it is leaving
            return False
        return not self._engines.alive and not self._engines.can_wait

    async def _send(self, part: _Part, replica: Replica, worker: Worker) -> None:
        """Have a worker sample prompts, and keep their records."""
        prompts = self._prompts[part.first : part.end]
        samples = self._samples[part.first : part.end]
        named = self._engines.alive
        try:
            answer = await worker.sample(self._chunk(prompts, samples, replica))
        except WorkerLost:
            raise
        except EngineError as error:
            for other in self._engines.alive:
                await self._engines.examine(other, error)
            is_left = any(other.is_alive for other in named)
            if not is_left and (self._engines.alive or self._engines.can_wait):
                raise _NoEngine from error
            raise
        progress.advance()
        self._add_counts(answer.counts)
        await self._examine_dead(answer.dead)
        shard = StoredShard(self._directory, answer.report)
        sizes = [len(of_prompt) for of_prompt in samples]
        groups = shard.groups(prompts, sizes, answer.replicas)
        self._found[part.first : part.end] = groups

    def _chunk(
        self, prompts: Sequence[Prompt], samples: Sequence[range], replica: Replica
    ) -> Chunk:
        asked = []
        for prompt, of_prompt in zip(prompts, samples, strict=True):
            problem = None
            if prompt.domain in self._config.domains_with_episodes:
                problem = ChunkProblem(prompt.question, prompt.answer, dict(prompt.metadata))
            asked.append(
                ChunkPrompt(
                    prompt_id=prompt.prompt_id,
                    domain=prompt.domain,
                    token_ids=prompt.token_ids,
                    first=of_prompt.start,
                    end=of_prompt.stop,
                    problem=problem,
                    images=prompt.images,
                )
            )
        # the replica may have been let go meanwhile, and all others with it
        last = max([replica.index, *(one.index for one in self._engines.alive)])
        addresses: list[EngineAddress | None] = [None] * (last + 1)
        for alive in self._engines.alive:
            addresses[alive.index] = EngineAddress(alive.client.base_url, alive.client.token)
        # a name of its own also when a part is asked again: the lost worker may still write
        name = f"rollout-{replica.index}-{next(self._shard_numbers):03d}.safetensors"
        return Chunk(
            shard=str(self._directory.path.absolute() / name),
            step=self._step,
            prompts=asked,
            max_tokens=self._max_tokens,
            greedy=self._greedy,
            engines=addresses,
            home=replica.index,
        )

    async def _examine_dead(self, dead: Sequence[tuple[int, str]]) -> None:
        """Examine the replicas that a worker found dead."""
        for replica in self._engines.alive:
            for index, cause in dead:
                if index == replica.index:
                    await self._engines.examine(replica, EngineError(cause))
