"""A set of engines, paused, given new weights and resumed together, by HTTP control calls.

    pause all → (start and update all ∥ trainer sends) → finish all → compare → resume all

Where weights come beside decoding, engines pause when the trainer has sent, and only load:

    trainer sends → pause all → start and update all → finish all → compare → resume all

Whatever goes wrong, engines stay paused: none may sample from weights that were not verified."""

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from grpo_megatron.errors import EngineError, MismatchError
from grpo_megatron.rollout.client import EngineClient
from grpo_megatron.rollout.together import finish_or_cancel
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.publish_plan import (
    Kept,
    OpenedStream,
    checkpoint_order,
    tensor_names,
    wrong_messages,
)
from grpo_megatron.weights.tensor_entry import TensorEntry

_SETTLE_S = 2.0
_REMEDY = "the engines stay paused; look at memory and network of that host"


class EngineControl:
    """Controls a fixed set of replicas; sender and worker wait `timeout_s` for each other.

    `pause_mode` is what happens to requests in flight: `wait` for their end, `abort` them (the
    client continues them, see `segments`), or `keep` them, so that they go on under the new weights
    (with spans that say so) after their keys and values were computed anew. `beside_decoding`:
    weights come before the pause. `asleep`: the replicas sleep already, with their weights off the
    device.

    Attributes:
        carries_adapter: What `prepare` connected is for adapters, not for weights.
        paused_s: Seconds in which the last publish kept engines from decoding."""

    def __init__(
        self,
        clients: Sequence[EngineClient],
        *,
        timeout_s: float = 300.0,
        pause_mode: str = "wait",
        beside_decoding: bool = False,
        asleep: bool = False,
    ):
        self.clients = list(clients)
        self.pause_mode = pause_mode
        self._timeout_s = timeout_s
        self.asleep = asleep
        self.paused = False
        self.carries_adapter = False
        self.paused_s = 0.0
        self._paused_at = 0.0
        self._beside_decoding = beside_decoding
        self._started = False
        self._world_sizes: list[int] = []
        self._num_tensors = 0

    async def kept_boxes(self, tensors: Sequence[TensorEntry]) -> list[Kept]:
        """Ask every worker which boxes of `tensors` it keeps; replicas one after the other.

        Raises MismatchError where not all workers of a replica answer."""
        self._world_sizes = await self._count_workers()
        # An update that was broken off has taken the layers apart.
        await self._call_workers("abandon_update")
        answers = await self._call_workers("kept_boxes", tensors=tensors)
        kept: list[Kept] = []
        for client, size, workers in zip(self.clients, self._world_sizes, answers, strict=True):
            _require_all(client, size, workers)
            for number, worker in enumerate(workers):
                self._print_whole_tensors(client, number, worker["whole"])
                kept.append(msgspec.convert(worker["boxes"], dict[str, list[Box]]))
        return kept

    async def kept_adapters(self, tensors: Sequence[TensorEntry]) -> list[Kept]:
        """Return, for every worker, that it keeps the whole of each of `tensors`, of adapters:
        vLLM cuts it. Raises MismatchError where one cannot take it, and where not all workers
        answer."""
        self._world_sizes = await self._count_workers()
        await self._call_workers("abandon_update")
        answers = await self._call_workers("adapter_refusals", tensors=tensors)
        kept: list[Kept] = []
        for client, size, workers in zip(self.clients, self._world_sizes, answers, strict=True):
            _require_all(client, size, workers)
            for refused in workers:
                _require_taken(client, refused)
                kept.append({tensor.name: [whole_box(tensor.shape)] for tensor in tensors})
        return kept

    async def _count_workers(self) -> list[int]:
        answers = await self._control("/get_world_size", method="GET")
        return [answer["world_size"] for answer in answers]

    def _print_whole_tensors(
        self, client: EngineClient, worker: int, whole: Mapping[str, str]
    ) -> None:
        """Print which tensors a worker gets as a whole although it may keep a part of them."""
        if not whole:
            return
        first = min(whole)
        print(
            f"worker {worker} of {client.name} receives {len(whole)} tensors as a whole: "
            f"{whole[first]}",
            flush=True,
        )

    async def prepare(
        self,
        streams: Sequence[OpenedStream],
        join: Callable[[], Awaitable[Any]],
        adapter: Mapping[str, float] | None = None,
    ) -> None:
        """Connect every worker with its stream, after `kept_boxes`, or after `kept_adapters` with
        the adapters' rank and scale, `adapter`.

        `join` makes the senders wait for the workers; it runs at the same time."""
        of_worker: dict[int, tuple[int, OpenedStream]] = {}
        for number, opened in enumerate(streams):
            for worker in opened.stream.workers:
                of_worker[worker] = (number, opened)
        calls = [join()]
        first = 0
        for client, workers in zip(self.clients, self._world_sizes, strict=True):
            own = [of_worker[worker] for worker in range(first, first + workers)]
            info = {
                "streams": own,
                "first_worker": first,
                "timeout_s": self._timeout_s,
                "adapter": adapter,
            }
            calls.append(client.control("/init_weight_transfer_engine", {"init_info": info}))
            first += workers
        self._num_tensors = len(tensor_names(streams))
        await _all(calls)
        self.carries_adapter = adapter is not None

    async def publish(
        self,
        version: int,
        send: Callable[[], Awaitable[Mapping[str, str]]],
        *,
        more_comes: bool = False,
    ) -> None:
        """Bring `version` into every replica and prove that it arrived; `send` makes the trainer
        send and returns the digest of each message. Raises MismatchError: a worker received another
        one, or replicas of equal layout hold different weights; EngineError: a replica died.

        more_comes: leave the engines paused, for a publish that brings the rest of the version."""
        if self._beside_decoding and not self.paused and not self.asleep:
            sent = await self._transfer_beside_decoding(version, send)
        else:
            sent = await self._transfer(version, send)
        reports = await self._call_workers("update_report")
        if not _has_failed(reports):
            await self._control("/finish_weight_update", {"weight_version": str(version)})
        self._started = False
        self._check_reports(sent, reports)
        await self._require_equal()
        if not more_comes:
            await self.resume(tags="kv_cache")

    async def publish_file(self, version: int, path: str) -> None:
        """Have every replica reload the checkpoint directory `path`: the fallback."""

        async def reload(client: EngineClient) -> None:
            await client.call_workers("reload_from_path", path=path)
            await client.reset_prefix_cache()
            await client.set_weight_version(version)

        await self._make_ready_for_weights()
        await _all(reload(client) for client in self.clients)
        await self._require_equal()
        await self.resume(tags="kv_cache")

    async def pause(self, *, sleep: bool) -> None:
        """Stop the engines from scheduling until the next publish; with `sleep`, also take their
        weights, keys and values off the device, which the trainer shares with them."""
        if self.asleep:
            return
        await self._stop_scheduling()
        if sleep:
            await self._control("/sleep", params={"level": "1"})
            self.asleep = True
        elif self._world_sizes:  # 10 ms less when the weights come
            await self._start_update()

    async def resume(self, **tags: str) -> None:
        """Schedule again after `pause`; sleeping engines wake up, by default with the weights as
        they were (`tags`: with that part of their memory only)."""
        if self.asleep:
            await self._control("/wake_up", params=tags)
            self.asleep = False
        await self._control("/resume")
        self.paused = False
        self.paused_s = time.perf_counter() - self._paused_at

    async def _make_ready_for_weights(self) -> None:
        """Pause engines; those that sleep get the memory of their weights back instead."""
        if self.asleep:
            await self._control("/wake_up", params={"tags": "weights"})
        else:
            await self._stop_scheduling()

    async def _stop_scheduling(self) -> None:
        """Pause all engines, which drops their cached keys and values."""
        if not self.paused:  # vLLM takes 20 ms for it
            self._paused_at = time.perf_counter()
            await self._control("/pause", params={"mode": self.pause_mode, "clear_cache": "true"})
            self.paused = True

    async def _start_update(self) -> None:
        if not self._started:
            await self._control("/start_weight_update")
            self._started = True

    async def _transfer(
        self, version: int, send: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Mapping[str, str]:
        """Have paused workers receive what the trainer sends at the same time; digests as sent."""
        await self._make_ready_for_weights()
        await self._start_update()
        results = await _all([send(), *self._updates(version)])
        sent: Mapping[str, str] = results[0]
        return sent

    async def _transfer_beside_decoding(
        self, version: int, send: Callable[[], Awaitable[Mapping[str, str]]]
    ) -> Mapping[str, str]:
        """Have workers receive what the trainer sends while they decode, and then pause to load it;
        digests as sent. Where that fails, they have loaded nothing, and need not pause."""
        await self._call_workers("begin_receiving", publish=version)
        sent = await send()
        await self._make_ready_for_weights()
        await self._start_update()
        await _all(self._updates(version))
        return sent

    def _updates(self, version: int) -> list[Awaitable[Any]]:
        """Return calls that have the workers take a version."""
        body = {"update_info": {"publish": version}}
        return [client.control("/update_weights", body) for client in self.clients]

    async def _control(self, *request: Any, **options: Any) -> list[Any]:
        """Send a control request to every replica; returns their answers in order."""
        return await _all(client.control(*request, **options) for client in self.clients)

    async def _call_workers(self, method: str, **arguments: Any) -> list[list[Any]]:
        """Call a method of every worker; results by replica."""
        return await _all(client.call_workers(method, **arguments) for client in self.clients)

    def _check_reports(
        self, sent: Mapping[str, str], reports: Sequence[Sequence[Mapping[str, Any]]]
    ) -> None:
        """Raise where a worker did not receive everything, or something else than was sent."""
        for client, size, workers in zip(self.clients, self._world_sizes, reports, strict=True):
            _require_all(client, size, workers)
            for number, report in enumerate(workers):
                worker = f"worker {number} of {client.name}"
                if report["failure"]:
                    raise EngineError(f"{worker}: {report['failure']}")
                changed = report["changed"]
                if changed:
                    raise MismatchError(
                        f"{len(changed)} of {self._num_tensors} tensors reached {worker} changed, "
                        f"the first is {changed[0]!r}",
                        remedy=_REMEDY,
                    )
                wrong = wrong_messages(sent, report["digests"], report["stream"])
                if wrong:
                    raise MismatchError(
                        f"{len(wrong)} messages reached {worker} with other digests than the "
                        f"trainer reports, the first is {wrong[0]}",
                        where="stream/bucket/trainer rank",
                        remedy=_REMEDY,
                    )

    async def _require_equal(self) -> None:
        """Compare replicas with the same workers, which hold bit-identical parameters."""
        if len(self.clients) > 1:
            checksums = await _all(self.checksums(client) for client in self.clients)
            require_equal_weights([client.name for client in self.clients], checksums)

    async def checksums(self, client: EngineClient) -> dict[str, str]:
        """Ask a replica for the checksums of what was published: its adapters, or its weights."""
        if self.carries_adapter:
            return await client.adapter_checksums()
        return await client.weight_checksums()


def require_equal_weights(names: Sequence[str], checksums: Sequence[Mapping[str, str]]) -> None:
    """Raise MismatchError where replicas with the same workers hold different parameters.

    checksums: of each replica, by `EngineClient.weight_checksums`; `names` are theirs."""
    first_with_layout: dict[frozenset[str], int] = {}
    for index, mine in enumerate(checksums):
        other = first_with_layout.setdefault(frozenset(mine), index)
        theirs = checksums[other]
        wrong = sorted(name for name in mine if mine[name] != theirs[name])
        if wrong:
            raise MismatchError(
                f"parameter {wrong[0]!r} of {names[index]} differs from that of {names[other]} "
                f"({len(wrong)} of {len(mine)} do)",
                remedy=_REMEDY,
            )


def _require_all(client: EngineClient, size: int, workers: Sequence[Any]) -> None:
    if len(workers) != size:
        raise MismatchError(
            f"{len(workers)} of {size} workers of {client.name} reported",
            where="rollout.engine_arguments",
            remedy="set rollout.tensor_parallel_size and rollout.data_parallel_size instead of "
            "arguments that add workers",
        )


def _require_taken(client: EngineClient, refused: Mapping[str, str]) -> None:
    if refused:
        first = min(refused, key=checkpoint_order)
        raise MismatchError(
            f"{client.name} cannot take {len(refused)} tensors of the adapter, the first is "
            f"{first!r}: {refused[first]}",
            where="lora.targets",
            remedy="lora.publish='merged' publishes weights with the adapters in them, where "
            "domains have none of their own",
        )


def _has_failed(reports: Sequence[Sequence[Mapping[str, Any]]]) -> bool:
    """Whether a worker of any replica did not receive everything."""
    for workers in reports:
        for report in workers:
            if report["failure"]:
                return True
    return False


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run `calls` together. One end of a transfer that dies makes the other fail: the second error
    may explain both."""
    return await finish_or_cancel(calls, _SETTLE_S)
