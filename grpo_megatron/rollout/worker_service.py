"""A rollout worker: `python -m grpo_megatron.rollout.worker_service RUN_DIR ATTEMPT INDEX`.

It runs beside replica INDEX, has prompts answered by engines, and writes tokens, log-probs, routes
and texts to the run directory. The controller, which asks over HTTP, is told where they are."""

import asyncio
import logging
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from aiohttp import web

from grpo_megatron import progress
from grpo_megatron.batching.spool import spool_groups
from grpo_megatron.config.loader import read_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.environments.host import EnvironmentHost
from grpo_megatron.errors import EngineError, GrpoMegatronError, describe_error
from grpo_megatron.network import Endpoint, carries_token, own_address
from grpo_megatron.rollout.chunk_sampling import ChunkSampler, PlaysEpisodes
from grpo_megatron.rollout.chunks import Chunk, ChunkPrompt, EngineAddress, SampledChunk
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.door import Door
from grpo_megatron.rollout.engine_images import EngineImages, engine_images
from grpo_megatron.rollout.episode_domains import (
    agent_domains,
    domain_metrics,
    episode_domains,
)
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.routing.shape import recorded_shape
from grpo_megatron.rundir import RunDir, engine_name
from grpo_megatron.types import Prompt

logger = logging.getLogger(__name__)

_LARGEST_REQUEST = 1 << 30
_END_S = 5.0


class WorkerService:
    """Samples chunks on the engines that each of them names; `close` it when done.

    environment_metrics: takes what its environments have counted since the last call; images: of
    prompts, where the model sees any."""

    def __init__(
        self,
        config: RunConfig,
        *,
        stop_token_ids: Sequence[int] = (),
        decode: Callable[[Sequence[int]], str] = lambda ids: "",
        episodes: Mapping[str, PlaysEpisodes] | None = None,
        environment_metrics: Callable[[], dict[str, float]] = dict,
        images: EngineImages | None = None,
    ):
        self._config = config
        self._environment_metrics = environment_metrics
        self._episodes = episodes
        self._images = images
        self._stop_token_ids = stop_token_ids
        self._decode = decode
        self._route_shape = recorded_shape(config)
        self._clients: dict[tuple[int, EngineAddress], EngineClient] = {}
        self._num_chunks = 0  # that are being sampled

    async def sample(self, chunk: Chunk) -> SampledChunk:
        """Sample a chunk and write its shard.

        Raises EngineError: no engine is alive, or a request failed for good; SetupError: the shard
        cannot be written."""
        self._num_chunks += 1
        if self._num_chunks == 1:
            progress.enter("sampling", _subject(chunk))
        try:
            return await self._sample(chunk)
        finally:
            self._num_chunks -= 1
            if self._num_chunks == 0:
                progress.enter("waiting", is_waiting=True)

    async def _sample(self, chunk: Chunk) -> SampledChunk:
        dead: list[tuple[int, str]] = []

        def on_death(replica: Replica) -> None:
            dead.append((replica.index, str(replica.cause_of_death)))

        engines = ReplicaPool(
            self._engines(chunk.engines),
            max_attempts=self._config.rollout.max_attempts,
            on_death=on_death,
            home=chunk.home,
        )
        sampler = ChunkSampler(
            self._config,
            engines,
            stop_token_ids=self._stop_token_ids,
            decode=self._decode,
            episodes=self._episodes,
            images=self._images,
        )
        prompts = []
        samples = []
        for asked in chunk.prompts:
            prompts.append(_prompt_of(asked))
            samples.append(range(asked.first, asked.end))
        shape = None
        if chunk.greedy:
            groups = await sampler.greedy(prompts, chunk.max_tokens)
        else:
            shape = self._route_shape
            groups = await sampler.rollouts(
                chunk.step, prompts, max_tokens=chunk.max_tokens, samples=samples
            )
        report = await asyncio.to_thread(spool_groups, Path(chunk.shard), groups, shape)
        replicas = [group.replica for group in groups]
        return SampledChunk(report, replicas, dead, self._take_counts())

    def _take_counts(self) -> dict[str, float]:
        """Return what was counted since the last call."""
        counts = self._environment_metrics()
        for client in self._clients.values():
            for name, count in client.prefix_cache.take().items():
                counts[name] = counts.get(name, 0.0) + count
        return counts

    async def close(self) -> None:
        """Close the connections to all engines."""
        for client in self._clients.values():
            await client.close()

    def make_client(self, address: EngineAddress, name: str) -> EngineClient:
        """Return a client of the engine at `address`."""
        limit_s = self._config.rollout.request_timeout_s
        return EngineClient(address.url, name, limit_s, token=address.token)

    def _engines(self, addresses: Sequence[EngineAddress | None]) -> list[EngineClient | None]:
        """Clients by replica, which are kept from chunk to chunk."""
        clients: list[EngineClient | None] = []
        for index, address in enumerate(addresses):
            if address is None:
                clients.append(None)
                continue
            client = self._clients.get((index, address))
            if client is None:
                client = self.make_client(address, engine_name(index))
                self._clients[index, address] = client
            clients.append(client)
        return clients


def _prompt_of(asked: ChunkPrompt) -> Prompt:
    problem = asked.problem
    if problem is None:
        return Prompt(
            prompt_id=asked.prompt_id,
            domain=asked.domain,
            text="",
            token_ids=asked.token_ids,
            answer="",
            images=asked.images,
        )
    return Prompt(
        prompt_id=asked.prompt_id,
        domain=asked.domain,
        text="",
        token_ids=asked.token_ids,
        answer=problem.answer,
        metadata=problem.metadata,
        question=problem.question,
    )


def _subject(chunk: Chunk) -> str:
    """Describe a chunk, for `status` and logs."""
    first = ""
    if chunk.prompts:
        first = f", from prompt {chunk.prompts[0].prompt_id} on"
    return f"step {chunk.step} on {engine_name(chunk.home)}{first}"


def application(service: WorkerService, token: str) -> web.Application:
    """Return the HTTP side of a worker: `POST /sample` with the token. An error is answered with
    status 500 and its description."""

    async def sample(request: web.Request) -> web.Response:
        if not carries_token(request.headers.get("Authorization", ""), token):
            return web.Response(status=401)
        try:
            chunk = msgspec.json.decode(await request.read(), type=Chunk)
            answer: object = await service.sample(chunk)
            status = 200
        except Exception as error:
            if not isinstance(error, GrpoMegatronError):
                logger.exception("a chunk failed")
            answer = describe_error(error, EngineError)
            status = 500
        return web.Response(status=status, body=msgspec.json.encode(answer))

    app = web.Application(client_max_size=_LARGEST_REQUEST)
    app.router.add_post("/sample", sample)
    return app


async def serve(service: WorkerService, host: str, endpoint: Path) -> None:
    """Listen at a free port of `host`, publish the address, and serve until cancelled."""
    token = secrets.token_hex(16)
    # a controller that gives up closes its connection, and engines stop sampling for it
    runner = web.AppRunner(
        application(service, token), handler_cancellation=True, shutdown_timeout=_END_S
    )
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    Endpoint(host, runner.addresses[0][1], token).write(endpoint)
    progress.enter("waiting", is_waiting=True)
    await asyncio.Event().wait()


def main(run_path: str, attempt: str, index: int) -> None:
    """Serve as worker `index` until the supervisor ends this process."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    run_dir = RunDir(Path(run_path), attempt)
    name = f"worker-{index}"
    progress.start_progress(run_dir.role_progress(name), name)
    config = read_resolved(run_dir.config).config
    model = config.model.path or run_dir.model
    tokenizer = load_tokenizer(model)
    endpoint = run_dir.endpoints / f"{name}.json"

    async def work() -> None:
        log = run_dir.logs / f"environments-{index}.log"
        address = own_address()
        environments = EnvironmentHost(config.domains, log_path=log, endpoints=run_dir.endpoints)
        async with environments as host, Door(address) as door:
            played = episode_domains(config, tokenizer, model, host.environment)
            driven = agent_domains(
                config, tokenizer, model, host.environment, door, run_dir.logs / f"{name}.log"
            )

            def take_metrics() -> dict[str, float]:
                return domain_metrics(host.take_metrics(), played, driven)

            service = WorkerService(
                config,
                stop_token_ids=tokenizer.stop_token_ids,
                decode=tokenizer.decode,
                episodes={**played, **driven},
                environment_metrics=take_metrics,
                images=engine_images(run_dir, model),
            )
            await serve(service, address, endpoint)

    asyncio.run(work())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
