"""Rollouts of one step over all replicas, written to one shard per replica.

Replicas draw from one queue of requests, so a slow one takes fewer. Results are ordered by prompt
and sample, whoever sampled them and whenever.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.decode import Decoder
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import complete, finish_or_cancel
from grpo_megatron.types import Completion, Prompt, RolloutGroup


class Shard(Protocol):
    """What `batching.store.ShardWriter` offers."""

    def append(self, group: RolloutGroup) -> int: ...

    def close(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class StepRollouts:
    """All groups of a step, and where they were written.

    Attributes:
        groups: In prompt order.
        places: Per group, (position in `shards`, index of its first sample in that shard).
        shards: What each shard's `close` returned, for shards that have groups.
    """

    groups: list[RolloutGroup]
    places: list[tuple[int, int]]
    shards: list[Any]


@dataclass(frozen=True, slots=True)
class _Request:
    """`n` samples of prompt `prompt`, from sample `first` on."""

    prompt: int
    first: int
    n: int
    seed: int | None


class RolloutWorker:
    """Samples on a pool of replicas.

    Args:
        config: The run.
        pool: Its replicas.
        stop_token_ids: Tokens that end a completion.
        decode: Fills `Completion.text`.
    """

    def __init__(
        self, config: RunConfig, pool: ReplicaPool, *, stop_token_ids: Sequence[int] = (),
        decode: Decoder | None = None,
    ) -> None:
        self.config, self.pool = config, pool
        self._stop_token_ids, self._decode = tuple(stop_token_ids), decode

    async def rollouts(
        self, step: int, prompts: Sequence[Prompt], *, directory: Path | None = None,
        open_shard: Callable[[Path], Shard] | None = None, num_samples: int | None = None,
        max_tokens: int | None = None,
    ) -> StepRollouts:
        """Sample G completions of every prompt.

        Args:
            step: Seeds depend on it in deterministic mode.
            prompts: The batch.
            directory: Where shards `rollout-<replica>.safetensors` go.
            open_shard: `ShardWriter`, or None to write nothing.
            num_samples: G; default: the recipe's.
            max_tokens: Longest completion; default: the recipe's.

        Raises:
            EngineError: No replica is alive, or a request failed for good.
        """
        rollout, routing = self.config.rollout, self.config.routing
        group_size = num_samples or self.config.batch.num_samples_per_prompt
        samples, served_by = await self._sample(
            prompts, self._plan(step, prompts, group_size), group_size,
            max_tokens=max_tokens or rollout.max_new_tokens, temperature=rollout.temperature,
            record_routes=self.config.records_routes, truncation=rollout.truncation,
            require_routes=routing.replay != "r3" or routing.on_missing == "fail",
        )
        groups = [
            RolloutGroup(prompt, tuple(completions), replica)
            for prompt, completions, replica in zip(prompts, samples, served_by, strict=True)
        ]
        if directory is None or open_shard is None:
            return StepRollouts(groups, [], [])
        return await asyncio.to_thread(write_shards, groups, directory, open_shard)

    async def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[Completion]:
        """The most likely completion of every prompt; log-probs are those of temperature 1."""
        requests = [_Request(i, 0, 1, None) for i in range(len(prompts))]
        samples, _ = await self._sample(
            prompts, requests, 1, max_tokens=max_tokens, temperature=0.0,
        )
        return [completions[0] for completions in samples]

    def _plan(self, step: int, prompts: Sequence[Prompt], group_size: int) -> list[_Request]:
        if not self.config.rollout.deterministic:
            return [_Request(i, 0, group_size, None) for i in range(len(prompts))]
        return [
            _Request(i, g, 1, derive_seed(self.config.seed, step, prompt.prompt_id, g))
            for i, prompt in enumerate(prompts) for g in range(group_size)
        ]

    async def _sample(
        self, prompts: Sequence[Prompt], requests: Sequence[_Request], group_size: int, *,
        max_tokens: int, **sampling: Any,
    ) -> tuple[list[list[Completion]], list[int]]:
        samples: list[list[Any]] = [[None] * group_size for _ in prompts]
        served_by, rollout = [0] * len(prompts), self.config.rollout

        async def serve(request: _Request, replica: Replica) -> None:
            prompt, servers = prompts[request.prompt], [replica]

            async def ask(token_ids: Sequence[int], **settings: Any) -> list[Completion]:
                completions, server = await self.pool.call(
                    lambda r: r.client.generate(
                        token_ids, stop_token_ids=self._stop_token_ids, may_abort=True,
                        **sampling, **settings,
                    ),
                    first=servers[-1],
                )
                servers.append(server)  # it has the keys and values of these tokens
                return completions

            samples[request.prompt][request.first : request.first + request.n] = await complete(
                ask, prompt.token_ids, n=request.n, seed=request.seed, decode=self._decode,
                max_tokens=max(1, min(max_tokens, self.config.max_new_tokens_of(prompt.domain),
                                      rollout.max_model_len - len(prompt.token_ids))),
                segment_tokens=rollout.segment_tokens,
            )
            if request.first == 0:
                served_by[request.prompt] = servers[1].index

        await self._drain(deque(requests), serve)
        return samples, served_by

    async def _drain(
        self, queue: deque[_Request], serve: Callable[[_Request, Replica], Awaitable[None]],
    ) -> None:
        """Serve a queue with bounded concurrency per replica; the first error ends it."""
        single = all(request.n == 1 for request in queue)
        rollout = self.config.rollout
        # An engine runs `max_num_seqs` sequences: as many requests of one sample keep it busy.
        width = max(rollout.max_concurrent_requests, rollout.max_num_seqs if single else 0)

        async def take(replica: Replica) -> None:
            while queue and (replica.is_alive or not self.pool.alive):
                await serve(queue.popleft(), replica)

        while queue:
            width_now = min(width, -(-len(queue) // max(1, len(self.pool.alive))))
            self.pool.pick()  # raises when none is alive
            await finish_or_cancel(
                [take(replica) for replica in self.pool.alive for _ in range(width_now)]
            )


def write_shards(
    groups: list[RolloutGroup], directory: Path, open_shard: Callable[[Path], Shard],
) -> StepRollouts:
    """In prompt order within each replica's shard: equal rollouts give equal files."""
    names = sorted({group.replica for group in groups})
    writers = [open_shard(directory / f"rollout-{replica}.safetensors") for replica in names]
    num_samples, places = [0] * len(names), []
    for group in groups:
        shard = names.index(group.replica)
        for part in group.by_context():
            writers[shard].append(part)
        places.append((shard, num_samples[shard]))
        num_samples[shard] += len(group.completions)
    return StepRollouts(groups, places, [writer.close() for writer in writers])
