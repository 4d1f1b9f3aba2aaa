"""A new weight version, from the trainer into every live engine, and whether both compute alike."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.config.run import RunConfig
from grpo_megatron.controller.recorder import record_completions
from grpo_megatron.controller.trainer_link import TrainerLink
from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient, EngineUnreachable
from grpo_megatron.rollout.engine_control import EngineControl, require_equal_weights
from grpo_megatron.rollout.engine_images import EngineImage, EngineImages
from grpo_megatron.rollout.pool import Replica, ReplicaPool
from grpo_megatron.rollout.seeds import derive_seed
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer.requests import (
    CompareLogprobs,
    DescribeWeights,
    ExportModel,
    JoinTransfer,
    OpenTransfer,
    SendWeights,
)
from grpo_megatron.types import Completion, Prompt
from grpo_megatron.weights.carrier_names import LinkKind
from grpo_megatron.weights.tensor_entry import TensorEntry

LOGPROB_CHECK_TOKENS = 16
LOGPROB_CHECK_SECONDS = "canary/seconds"
"""The metric that says how long a log-prob check took; the others of a check are differences."""
# Recipes and metrics call the log-prob check `canary` (`publish.canary`, `canary/abs_max`); names
# that files and seeds are made from keep the word too.
_CANARY = "canary"


class Publisher:
    """Brings the trainer's weights into the engines of a run, and pauses those engines before.

    images: of the prompts of log-prob checks, where the model sees any.

    An engine that dies meanwhile is left behind; EngineError where none is left, and none may
    return. One that was started again gets the present weights alone (`join`).

    Attributes:
        version: Of the weights that the engines have; -1 before the first publish.
        unchecked: Engines that joined since the last log-prob check.
        paused_s: Seconds in which the last publish kept engines from decoding.
        resumed_at: When the engines got the weights of `version` (`time.perf_counter`).
        sent_fraction: Bytes that the last publish sent, of those of the whole weights; what an
            engine that joined was sent is no part of it."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        trainer: TrainerLink,
        engines: ReplicaPool,
        images: EngineImages | None = None,
    ):
        self._images = images
        self.config = config
        self.run_dir = run_dir
        self.trainer = trainer
        self.engines = engines
        self.version = -1
        self.paused_s = 0.0
        self.resumed_at = 0.0
        self.sent_fraction = 1.0
        self._num_bytes = 1  # of the weights
        self._num_last_sent_bytes = 0  # by a publish or to an engine that joined
        self._with_base: set[EngineClient] = set()  # that have the weights without adapters
        self._seconds = 0.0  # that the last publish took
        self._control = EngineControl([])
        self.unchecked: set[int] = set()
        self._is_settled = False  # the trainer's weights are those of `version`
        self._num_waiting = 0  # engines that are to join once that is so
        self._changing = asyncio.Condition()
        """Held while the trainer's weights change, or are on their way to engines."""

    async def publish(self, version: int) -> None:
        """Bring `version` into all live engines. Raises EngineError where none is left, and what is
        wrong with the weights of an engine that returned."""
        if self.config.num_replicas == 0:
            self.version = version
            return
        started = time.perf_counter()
        async with self._changing:
            if self.engines.failure is not None:
                raise self.engines.failure
            await self._retry_on_live_replicas(lambda clients: self._publish(clients, version))
            self.version = version
            self._is_settled = True
            self._changing.notify_all()
        self.resumed_at = time.perf_counter()
        self._seconds = self.resumed_at - started

    @contextlib.asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Hold publishes back: within it the trainer's weights change, and no engine gets them.
        Engines that were to join before have the weights by then."""
        async with self._changing:
            # one step may follow the other at once, so that an engine would never find them settled
            await self._changing.wait_for(lambda: not (self._is_settled and self._num_waiting))
            self._is_settled = False
            yield

    async def join(self, index: int, client: EngineClient) -> None:
        """Bring the present weights into one engine, which was started again, prove that they
        arrived, and let it take requests. Waits until the trainer has the engines' version.

        Raises EngineError: it died; MismatchError: it holds other weights than the others."""
        async with self._changing:
            self._num_waiting += 1
            try:
                await self._changing.wait_for(lambda: self._is_settled)
                await self._send_present_weights(client)
                self.engines.join(index, client)
                self.unchecked.add(index)
            finally:
                self._num_waiting -= 1
                self._changing.notify_all()

    async def remove(self, index: int) -> None:
        """Take an engine out of the run, while no weights are on their way."""
        async with self._changing:
            self.engines.remove(index)
            self.unchecked.discard(index)

    async def _send_present_weights(self, client: EngineClient) -> None:
        """Send the present weights to one engine, and require those of the others."""
        control = self._new_control([client])
        try:
            await self._open_streams(control)
            await self._send(control, self.version)
        finally:  # the trainer has left its streams to the others: they connect anew
            self._control = self._new_control([])
        mine = await control.checksums(client)
        for replica in self.engines.alive:
            with contextlib.suppress(EngineUnreachable):  # it may die too
                theirs = await control.checksums(replica.client)
                require_equal_weights([replica.client.name, client.name], [theirs, mine])
                if set(theirs) == set(mine):
                    break

    @property
    def holds_requests(self) -> bool:
        """Whether engines keep requests that come now until the next weights have come, soon."""
        return (
            self._control.paused
            and not self._control.asleep
            and self._seconds < 0.1 * self.config.rollout.request_timeout_s
        )

    async def ensure_version(self, version: int) -> None:
        """Publish `version` unless the engines have it."""
        if self.version != version:
            await self.publish(version)

    async def pause_engines(self) -> None:
        """Pause engines until the next publish; colocated, the trainer gets their devices.

        Within `training`: an engine that is joining would lose the trainer's streams to the others,
        and one that joined later would not be paused."""
        placement = self.config.placement
        sleep = placement.mode == "colocated" and placement.gpus_per_node > 0

        async def pause(clients: Sequence[EngineClient]) -> None:
            await self._connect(clients)
            await self._control.pause(sleep=sleep)

        await self._retry_on_live_replicas(pause)

    async def _retry_on_live_replicas(
        self, work: Callable[[list[EngineClient]], Awaitable[None]]
    ) -> None:
        while True:
            before = self.engines.alive
            if not before:
                self.engines.require_not_all_gone()
                return None  # who returns gets the weights by `join`
            try:
                return await work([replica.client for replica in before])
            except EngineError as error:
                await self._mark_dead(error, before)

    async def _publish(self, clients: Sequence[EngineClient], version: int) -> None:
        await self._connect(clients)
        try:
            await self._send(self._control, version)
        except EngineError:  # the streams are broken: the next publish connects anew
            self._control = self._new_control([])
            raise
        self.paused_s = self._control.paused_s
        if self.config.publish.method != "file":
            self.sent_fraction = self._num_last_sent_bytes / self._num_bytes

    async def _send(self, control: EngineControl, version: int) -> None:
        if self.config.publish.method == "file":
            directory = self.run_dir.root / "publish"
            await self.trainer.call(ExportModel(directory))
            await control.publish_file(version, str(directory.absolute()))
            return
        adapters: list[TensorEntry] = []
        if self.config.engine_adapters:
            adapters = await self.trainer.call(DescribeWeights(adapters=True))
        if not adapters:
            await control.publish(version, partial(self._send_weights, version))
            return
        if not control.carries_adapter:
            await control.publish(version, partial(self._send_weights, version), more_comes=True)
            self._with_base.update(control.clients)
            await self._open_adapter_streams(control, adapters)
        await control.publish(version, partial(self._send_adapters, version))

    async def _send_weights(self, version: int) -> dict[str, str]:
        """Have the trainer send weights; returns the digest of each message."""
        sent = await self.trainer.call(SendWeights(version=version))
        self._num_bytes = max(sent.num_bytes, 1)
        self._num_last_sent_bytes = sent.num_sent_bytes
        return sent.digests

    async def _send_adapters(self, version: int) -> dict[str, str]:
        """Have the trainer send adapters; returns the digest of each message."""
        sent = await self.trainer.call(SendWeights(version=version, adapters=True))
        self._num_last_sent_bytes = sent.num_sent_bytes
        return sent.digests

    async def _connect(self, clients: Sequence[EngineClient]) -> None:
        """Connect trainer and engines anew where these are not `clients`."""
        if clients == self._control.clients:
            return
        control = self._new_control(clients)
        await self._open_streams(control)
        self._control = control

    def _new_control(self, clients: Sequence[EngineClient]) -> EngineControl:
        publish = self.config.publish
        return EngineControl(
            clients,
            pause_mode=publish.pause,
            beside_decoding=publish.beside_decoding,
            asleep=self._control.asleep,
        )

    async def _open_streams(self, control: EngineControl) -> None:
        """Have the trainer and all workers of the engines meet, where weights go from memory to
        memory. Engines that have the weights without adapters meet it for these."""
        if self.config.publish.method == "file":
            return
        if self._with_base.issuperset(control.clients):
            adapters = await self.trainer.call(DescribeWeights(adapters=True))
            await self._open_adapter_streams(control, adapters)
            return
        tensors = await self.trainer.call(DescribeWeights())
        kept = await control.kept_boxes(tensors)
        streams = await self.trainer.call(OpenTransfer(kept=kept))
        links: dict[LinkKind, int] = {}

        async def join_transfer() -> None:
            found = await self.trainer.call(JoinTransfer())
            links.update(found)

        await control.prepare(streams, join_transfer)
        _print_links("weights", links)

    async def _open_adapter_streams(
        self, control: EngineControl, adapters: Sequence[TensorEntry]
    ) -> None:
        """Have the trainer and all workers of the engines meet for adapters, from here on.

        Raises MismatchError: an engine has no place for one of them."""
        lora = self.config.lora
        assert lora is not None  # there are adapters
        kept = await control.kept_adapters(adapters)
        streams = await self.trainer.call(OpenTransfer(kept=kept, adapters=True))
        links: dict[LinkKind, int] = {}

        async def join_transfer() -> None:
            found = await self.trainer.call(JoinTransfer(adapters=True))
            links.update(found)

        await control.prepare(streams, join_transfer, {"rank": lora.rank, "scale": lora.scale})
        _print_links("adapters", links)

    async def _mark_dead(self, error: EngineError, before: Sequence[Replica]) -> None:
        """Go on with the engines that still answer, or return. If none has died, raise the
        error."""
        for replica in before:
            await self.engines.examine(replica, error)
        if all(replica.is_alive for replica in before):  # others may have joined meanwhile
            raise error
        if not self.engines.alive and not self.engines.can_wait:
            raise error

    async def check_logprobs(self, prompts: Sequence[Prompt]) -> dict[str, float]:
        """Have every live engine answer `prompts` and the trainer compute the same log-probs; where
        all die, those that return.

        Returns the largest and the mean difference of the worst engine, and the seconds it took.
        Raises MismatchError where one differs by more than `publish.canary_tolerance`."""
        started = time.perf_counter()
        metrics = {"canary/abs_max": 0.0, "canary/abs_mean": 0.0}
        num_checked = 0
        while num_checked == 0:
            await self.engines.wait_alive()
            num_checked = await self._check_engines(prompts, metrics)
        metrics[LOGPROB_CHECK_SECONDS] = time.perf_counter() - started
        return metrics

    async def _check_engines(self, prompts: Sequence[Prompt], metrics: dict[str, float]) -> int:
        """Raise `metrics` to those of the worst live engine; returns how many engines answered."""
        num_checked = 0
        to_check = deque(self.engines.alive)
        while to_check:
            replica = to_check.popleft()
            if not replica.is_alive:
                continue
            try:
                completions = await asyncio.gather(
                    *(self._sample(replica.client, prompt) for prompt in prompts)
                )
            except EngineError as error:
                if replica.is_alive:  # else the rollouts found out first
                    await self._mark_dead(error, self.engines.alive)
                if replica.is_alive:  # another one has died: this one is asked again
                    to_check.append(replica)
                continue
            found = await self._compare(prompts, completions, replica.client.name)
            for name, worst in metrics.items():
                metrics[name] = max(worst, found[name])
            num_checked += 1
            self.unchecked.discard(replica.index)
        return num_checked

    async def _sample(self, client: EngineClient, prompt: Prompt) -> Completion:
        rollout = self.config.rollout
        seed = None
        if rollout.deterministic:
            seed = derive_seed(self.config.seed, _CANARY, self.version, prompt.prompt_id)
        images: tuple[EngineImage, ...] = ()
        if prompt.images:
            assert self._images is not None  # of a model that sees
            images = self._images.of(prompt.images)
        [completion] = await client.generate(
            prompt.token_ids,
            adapter=self.config.engine_adapter_of(prompt.domain),
            images=images,
            max_tokens=min(LOGPROB_CHECK_TOKENS, self.config.max_new_tokens_of(prompt.domain)),
            temperature=rollout.temperature,
            seed=seed,
        )
        return completion

    async def _compare(
        self, prompts: Sequence[Prompt], completions: Sequence[Completion], engine: str
    ) -> dict[str, float]:
        """Return the log-prob differences of what an engine sampled. Raises MismatchError where
        they are large."""
        directory = self.run_dir.root / _CANARY
        samples = []
        for prompt, completion in zip(prompts, completions, strict=True):
            samples.append((0, prompt, completion))
        record_completions(
            directory,
            samples,
            engine,
            ImageFolder(self.run_dir.images),
            domains=[domain.name for domain in self.config.domains],
        )
        found = await self.trainer.call(CompareLogprobs(directory))
        if found.problem:
            raise MismatchError(
                f"weight version {self.version}: {found.problem}",
                where="publish.canary_tolerance",
                remedy=found.remedy,
            )
        return found.metrics


def _print_links(what: str, links: Mapping[LinkKind, int]) -> None:
    """Print how many links there are, and what carries them."""
    told = ", ".join(f"{count} by {kind}" for kind, count in sorted(links.items()))
    print(f"{what}: {sum(links.values())} links from trainer to engines: {told}", flush=True)
