"""Rollouts of one step over all replicas.

Replicas draw from one queue, so a slow one takes fewer; results are in order of the prompts."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import complete, finish_or_cancel
from grpo_megatron.types import Completion, Prompt, RolloutGroup


class _Request(NamedTuple):
    """`n` samples of prompt `prompt`, from sample `first` on."""

    prompt: int
    first: int
    n: int
    seed: int | None


class RolloutWorker:
    """Samples on a pool of replicas. `decode`, token ids to text, is for `Completion.text`."""

    def __init__(
        self,
        config: RunConfig,
        pool: ReplicaPool,
        *,
        stop_token_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
    ):
        self.config = config
        self.pool = pool
        self._stop_token_ids = tuple(stop_token_ids)
        self._decode = decode

    async def rollouts(
        self, step: int, prompts: Sequence[Prompt], *, num_samples: int = 0, max_tokens: int = 0
    ) -> list[RolloutGroup]:
        """Sample G completions of every prompt, `num_samples` or the recipe's number, of at most
        `max_tokens` or the recipe's; groups are in prompt order. In deterministic mode seeds depend
        on `step`. Raises EngineError: no replica is alive, or a request failed for good."""
        rollout = self.config.rollout
        routing = self.config.routing
        size = num_samples or self.config.batch.num_samples_per_prompt
        requests = [_Request(i, 0, size, None) for i in range(len(prompts))]
        if rollout.deterministic:
            requests = [
                _Request(i, g, 1, derive_seed(self.config.seed, step, p.prompt_id, g))
                for i, p in enumerate(prompts)
                for g in range(size)
            ]
        return await self._sample(
            prompts,
            requests,
            size,
            max_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature,
            truncation=rollout.truncation,
            record_routes=self.config.records_routes,
            require_routes=routing.replay != "r3" or routing.on_missing == "fail",
        )

    async def greedy(self, prompts: Sequence[Prompt], max_tokens: int) -> list[RolloutGroup]:
        """The most likely completion of every prompt; log-probs are those of temperature 1."""
        requests = [_Request(i, 0, 1, None) for i in range(len(prompts))]
        return await self._sample(prompts, requests, 1, max_tokens, temperature=0.0)

    async def _sample(
        self,
        prompts: Sequence[Prompt],
        requests: Sequence[_Request],
        group_size: int,
        max_tokens: int,
        **sampling: Any,
    ) -> list[RolloutGroup]:
        samples: list[list[Any]] = [[None] * group_size for _ in prompts]
        served_by = [0] * len(prompts)
        rollout = self.config.rollout
        sampling |= {"stop_token_ids": self._stop_token_ids, "may_abort": True}

        async def serve(request: _Request, replica: Replica) -> None:
            prompt = prompts[request.prompt]
            servers = [replica]

            async def ask(token_ids: Sequence[int], **settings: Any) -> list[Completion]:
                completions, server = await self.pool.call(
                    lambda r: r.client.generate(token_ids, **sampling, **settings),
                    first=servers[-1],
                )
                servers.append(server)  # it has the keys and values of these tokens
                return completions

            longest = min(
                max_tokens,
                self.config.max_new_tokens_of(prompt.domain),
                rollout.max_model_len - len(prompt.token_ids),
            )
            found = await complete(
                ask,
                prompt.token_ids,
                n=request.n,
                max_tokens=max(1, longest),
                seed=request.seed,
                segment_tokens=rollout.segment_tokens,
            )
            samples[request.prompt][request.first : request.first + request.n] = [
                replace(c, text=self._decode(c.token_ids.tolist())) for c in found
            ]
            if request.first == 0:
                served_by[request.prompt] = servers[1].index

        queue = deque(requests)
        # An engine runs `max_num_seqs` sequences: as many requests of one sample keep it busy.
        width = max(
            rollout.max_concurrent_requests,
            rollout.max_num_seqs if all(request.n == 1 for request in queue) else 0,
        )

        async def take(replica: Replica) -> None:
            while queue and (replica.is_alive or not self.pool.alive):
                await serve(queue.popleft(), replica)

        while queue:
            self.pool.pick()  # raises when none is alive
            alive = self.pool.alive
            await finish_or_cancel(
                [
                    take(replica)
                    for replica in alive
                    for _ in range(min(width, -(-len(queue) // len(alive))))
                ]
            )
        return [
            RolloutGroup(prompt, tuple(completions), replica)
            for prompt, completions, replica in zip(prompts, samples, served_by, strict=True)
        ]
