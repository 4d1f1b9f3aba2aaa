"""In a rollout worker's process: the prompts of a chunk are sampled on engines, into its memory.

Replicas draw requests from one queue, so a slow one takes fewer; results are in order of the
prompts. `worker_service` receives the chunks and writes the results down; `chunk_dispatch` sends
them."""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from grpo_megatron.config.run import RunConfig
from grpo_megatron.rollout.engine_images import EngineImage, EngineImages
from grpo_megatron.rollout.episodes import EpisodeSeeds
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rollout.segments import Ask, complete
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.types import Completion, Prompt, RolloutGroup

_EPISODES_AT_ONCE = 2048
"""Of a replica: most of them wait for their environments."""


class PlaysEpisodes(Protocol):
    """Has the prompts of one domain answered in turns with its environment."""

    async def play(
        self, ask: Ask, prompt: Prompt, seeds: EpisodeSeeds, max_tokens: int
    ) -> Completion:
        """Play an episode of at most `max_tokens` behind its prompt."""
        ...


class _Request(NamedTuple):
    """`n` samples of prompt `prompt`, whose group has them from place `first` on."""

    prompt: int
    first: int
    n: int
    seed: int | None


class ChunkSampler:
    """Has the engines of a pool sample prompts, and holds the answers in memory.

    `decode`, token ids to text, is for `Completion.text`; `episodes`, by domain, for prompts that
    an environment replies to; `images` for prompts that have some."""

    def __init__(
        self,
        config: RunConfig,
        pool: ReplicaPool,
        *,
        stop_token_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        episodes: Mapping[str, PlaysEpisodes] | None = None,
        images: EngineImages | None = None,
    ):
        self._images = images
        self.config = config
        self.pool = pool
        self.episodes = episodes or {}
        self._stop_token_ids = tuple(stop_token_ids)
        self._decode = decode

    async def rollouts(
        self,
        step: int,
        prompts: Sequence[Prompt],
        *,
        num_samples: int = 0,
        max_tokens: int = 0,
        samples: Sequence[range] | None = None,
    ) -> list[RolloutGroup[Completion]]:
        """Sample G completions of every prompt, `num_samples` or the recipe's number, of at most
        `max_tokens` or the recipe's; groups are in prompt order.

        samples: of every prompt, the numbers of those to sample, where a step samples it more than
        once or prompts differ in size. In deterministic mode seeds depend on `step` and on these
        numbers. Raises EngineError: no replica is alive, or a request failed for good."""
        rollout = self.config.rollout
        routing = self.config.routing
        if samples is None:
            size = num_samples or self.config.batch.num_samples_per_prompt
            samples = [range(size)] * len(prompts)
        requests = []
        for number, (prompt, of_prompt) in enumerate(zip(prompts, samples, strict=True)):
            if not rollout.deterministic and prompt.domain not in self.episodes:
                requests.append(_Request(number, 0, len(of_prompt), None))
                continue
            for place, sample in enumerate(of_prompt):
                seed = None
                if rollout.deterministic:
                    seed = derive_seed(self.config.seed, step, prompt.prompt_id, sample)
                requests.append(_Request(number, place, 1, seed))
        return await self._sample(
            step,
            prompts,
            requests,
            [len(of_prompt) for of_prompt in samples],
            max_tokens or rollout.max_new_tokens,
            temperature=rollout.temperature,
            truncation=rollout.truncation,
            record_routes=self.config.records_routes,
            require_routes=routing.replay != "r3" or routing.on_missing == "fail",
        )

    async def greedy(
        self, prompts: Sequence[Prompt], max_tokens: int
    ) -> list[RolloutGroup[Completion]]:
        """Return the most likely completion of every prompt, at most `max_tokens` long; log-probs
        are those of temperature 1. EngineError as by `rollouts`."""
        requests = [_Request(i, 0, 1, None) for i in range(len(prompts))]
        sizes = [1] * len(prompts)
        return await self._sample(0, prompts, requests, sizes, max_tokens, temperature=0.0)

    async def _sample(
        self,
        step: int,
        prompts: Sequence[Prompt],
        requests: Sequence[_Request],
        group_sizes: Sequence[int],
        max_tokens: int,
        **sampling: Any,
    ) -> list[RolloutGroup[Completion]]:
        sampling |= {"stop_token_ids": self._stop_token_ids, "may_abort": True}
        call = _SampledCall(
            self,
            step=step,
            prompts=prompts,
            group_sizes=group_sizes,
            max_tokens=max_tokens,
            sampling=sampling,
        )
        await call.answer_all(requests)
        return call.groups()

    def images_of(self, prompt: Prompt) -> tuple[EngineImage, ...]:
        """Return what engines need of a prompt's images. Raises DataError where one cannot be
        read."""
        if not prompt.images:
            return ()
        assert self._images is not None  # of a model that sees
        return self._images.of(prompt.images)

    def text_of(self, completion: Completion) -> str:
        """Decode a completion's tokens, special ones as `decode` does."""
        return self._decode(completion.token_ids.tolist())


class _SampledCall:
    """The samples of one call, while replicas answer its requests."""

    def __init__(
        self,
        sampler: ChunkSampler,
        *,
        step: int,
        prompts: Sequence[Prompt],
        group_sizes: Sequence[int],
        max_tokens: int,
        sampling: Mapping[str, Any],
    ):
        self._sampler = sampler
        self._config = sampler.config
        self._pool = sampler.pool
        self._step = step
        self._prompts = prompts
        self._max_tokens = max_tokens
        self._sampling = sampling
        self._samples: list[list[Any]] = []
        for group_size in group_sizes:
            self._samples.append([None] * group_size)
        self._served_by = [0] * len(prompts)
        self._queue: deque[_Request] = deque()

    def groups(self) -> list[RolloutGroup[Completion]]:
        """Return the groups, in the order of the prompts; all requests were answered."""
        found = []
        for number, prompt in enumerate(self._prompts):
            samples = tuple(self._samples[number])
            found.append(RolloutGroup(prompt, samples, self._served_by[number]))
        return found

    async def answer_all(self, requests: Sequence[_Request]) -> None:
        """Have the live replicas answer the requests, until there are none.

        Raises EngineError: no replica is alive, or a request failed for good."""
        self._queue.extend(requests)
        width = self._config.rollout.max_concurrent_requests
        if all(request.n == 1 for request in requests):
            # An engine runs `max_num_seqs` sequences: as many requests of one sample keep it busy.
            width = max(width, self._config.rollout.max_num_seqs)
        askers_of_replica = width
        if any(prompt.domain in self._sampler.episodes for prompt in self._prompts):
            askers_of_replica = max(width, _EPISODES_AT_ONCE)
        while self._queue:
            self._pool.pick()  # raises when none is alive
            serving = self._pool.serving
            self._asking = asyncio.Semaphore(width * len(serving))
            share = -(-len(self._queue) // len(serving))
            askers = []
            for replica in serving:
                for _ in range(min(askers_of_replica, share)):
                    askers.append(self._answer_requests(replica))
            await finish_or_cancel(askers)

    async def _answer_requests(self, replica: Replica) -> None:
        """Have a replica answer one request after the other, until there are none or it died."""
        while self._queue and (replica.is_alive or not self._pool.alive):
            await self._answer(self._queue.popleft(), replica)

    async def _answer(self, request: _Request, replica: Replica) -> None:
        prompt = self._prompts[request.prompt]
        images = await asyncio.to_thread(self._sampler.images_of, prompt)
        adapter = self._config.engine_adapter_of(prompt.domain)
        servers = [replica]

        async def ask(token_ids: Sequence[int], **settings: Any) -> list[Completion]:
            settings["is_continuation"] = len(servers) > 1
            if images:
                settings["images"] = images
            async with self._asking:
                completions, server = await self._pool.call(
                    lambda r: r.client.generate(
                        token_ids, adapter=adapter, **self._sampling, **settings
                    ),
                    first=servers[-1],
                )
            servers.append(server)  # it has the keys and values of these tokens
            return completions

        if prompt.domain in self._sampler.episodes:
            found = [await self._play(ask, prompt, request.seed)]
        else:
            found = await self._complete(ask, prompt, request)
        samples = self._samples[request.prompt]
        for sample, completion in enumerate(found, start=request.first):
            samples[sample] = completion
        if request.first == 0:
            self._served_by[request.prompt] = servers[1].index

    async def _complete(self, ask: Ask, prompt: Prompt, request: _Request) -> list[Completion]:
        completions = await complete(
            ask,
            prompt.token_ids,
            n=request.n,
            max_tokens=self._longest(prompt),
            seed=request.seed,
            segment_tokens=self._config.rollout.segment_tokens,
        )
        found = []
        for completion in completions:
            found.append(replace(completion, text=self._sampler.text_of(completion)))
        return found

    async def _play(self, ask: Ask, prompt: Prompt, seed: int | None) -> Completion:
        environment_seed = derive_seed(
            self._config.seed, self._step, prompt.prompt_id, "environment"
        )
        budget = self._config.max_new_tokens_of(prompt.domain)
        return await self._sampler.episodes[prompt.domain].play(
            ask, prompt, EpisodeSeeds(environment_seed, seed), min(self._max_tokens, budget)
        )

    def _longest(self, prompt: Prompt) -> int:
        """Return tokens that a completion of `prompt` may have."""
        room = self._config.rollout.max_model_len - len(prompt.token_ids)
        budget = self._config.max_new_tokens_of(prompt.domain)
        return max(1, min(self._max_tokens, budget, room))
