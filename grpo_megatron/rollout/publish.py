"""Publishing weights to all replicas: drive their HTTP control calls while the trainer sends.

    pause all → (start and update all ∥ trainer sends) → finish all → compare → resume all

Whatever goes wrong, engines stay paused: none may sample from weights that nobody vouches for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpo_megatron.errors import MismatchError
from grpo_megatron.rollout.client import EngineClient

if TYPE_CHECKING:  # imports torch, which a controller need not wait for
    from grpo_megatron.weights.transfer_plan import TransferPlan

_SETTLE_S = 2.0

Send = Callable[[], Awaitable[Mapping[str, str]]]
"""Makes the trainer send; returns the digest of every tensor it sent."""


class WeightPublisher:
    """Publishes to a fixed set of replicas.

    Args:
        clients: All replicas, in order.
        timeout_s: Limit of each wait of sender and worker for the other.
        pause_mode: What happens to requests in flight: `wait` for their end, `abort` them (the
            client continues them, see `segments`), or `keep` them, so that they go on under the
            new weights (with spans that say so) after their keys and values were computed anew.
    """

    def __init__(
        self, clients: Sequence[EngineClient], *, timeout_s: float = 300.0,
        pause_mode: str = "wait",
    ) -> None:
        self.clients, self.pause_mode = list(clients), pause_mode
        self._timeout_s = timeout_s
        self._world_sizes: list[int] = []

    async def num_workers(self) -> int:
        """Worker processes of all replicas: how many each sender must wait for."""
        self._world_sizes = await _all(c.get_world_size() for c in self.clients)
        return sum(self._world_sizes)

    async def prepare(
        self, senders: Sequence[tuple[str, int]], join: Callable[[], Awaitable[Any]] | None = None,
    ) -> None:
        """Connect every worker with every sender, once.

        Args:
            senders: Host and port of each sender, in plan order.
            join: Makes the senders wait for the workers; runs at the same time. Not needed when
                they are joining already.

        Raises:
            EngineError: A replica could not join.
        """
        world_size = 1 + await self.num_workers()
        calls: list[Awaitable[Any]] = [join()] if join is not None else []
        offset = 1
        for client, workers in zip(self.clients, self._world_sizes, strict=True):
            calls.append(client.init_weight_transfer(
                senders, rank_offset=offset, world_size=world_size, timeout_s=self._timeout_s
            ))
            offset += workers
        await _all(calls)

    async def publish(self, version: int, plan: TransferPlan, send: Send) -> None:
        """Bring `version` into every replica and prove that it arrived.

        Raises:
            MismatchError: A worker received something else than the trainer sent, or replicas of
                equal layout hold different weights.
            EngineError: A replica died or hung.
            Exception: What `send` raises, when nothing else went wrong before.
        """
        await _all(c.pause(self.pause_mode) for c in self.clients)
        sent, *_ = await _all([send(), *(self._receive(c, version, plan) for c in self.clients)])
        answers = await _all([*(c.finish_weight_update(version) for c in self.clients),
                              *(c.received_digests() for c in self.clients)])
        received = answers[len(self.clients):]
        self._check_digests(plan, sent, received)
        await self._check_replicas()
        await _all(c.resume() for c in self.clients)

    async def _receive(self, client: EngineClient, version: int, plan: TransferPlan) -> None:
        await client.start_weight_update()
        await client.update_weights(plan, publish=version)

    async def publish_file(self, version: int, path: str) -> None:
        """The fallback: every replica reloads the checkpoint directory `path`.

        Raises:
            MismatchError: Replicas of equal layout hold different weights.
        """
        await _all(c.pause(self.pause_mode) for c in self.clients)
        await _all(c.reload_from_path(path, version=version) for c in self.clients)
        await self._check_replicas()
        await _all(c.resume() for c in self.clients)

    def _check_digests(
        self, plan: TransferPlan, sent: Mapping[str, str],
        received: Sequence[Sequence[Mapping[str, str]]],
    ) -> None:
        names = [entry.name for entry in plan.entries]
        for name in names:
            if name not in sent:
                raise MismatchError(f"the trainer gave no digest of {name!r}")
        for client, workers in zip(self.clients, received, strict=True):
            for number, digests in enumerate(workers):
                wrong = [name for name in names if digests.get(name) != sent[name]]
                if wrong:
                    raise MismatchError(
                        f"{len(wrong)} of {len(names)} tensors reached worker {number} of "
                        f"{client.name} changed, the first is {wrong[0]!r}",
                        where=f"trainer {sent[wrong[0]]}, engine {digests.get(wrong[0])}",
                        remedy="the engines stay paused; look at memory and network of that host",
                    )

    async def _check_replicas(self) -> None:
        """Replicas with the same workers hold bit-identical parameters."""
        if len(self.clients) < 2:
            return
        checksums = await _all(c.weight_checksums() for c in self.clients)
        first: dict[frozenset[str], int] = {}
        for index, mine in enumerate(checksums):
            other = first.setdefault(frozenset(mine), index)
            wrong = sorted(k for k in mine if mine[k] != checksums[other][k])
            if wrong:
                raise MismatchError(
                    f"parameter {wrong[0]!r} of {self.clients[index].name} differs from that of "
                    f"{self.clients[other].name} ({len(wrong)} of {len(mine)} do)",
                    remedy="the engines stay paused; look at memory and network of these hosts",
                )


async def _all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Results in order. The first failure is raised; what else fails soon after is noted on it.

    One end of a transfer that dies makes the other end fail too, so the second error often tells
    what the first one means.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    except BaseException as error:
        await asyncio.wait(tasks, timeout=_SETTLE_S)
        for task in tasks:
            task.cancel()
        for other in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(other, Exception) and other is not error:
                error.add_note(f"then: {other}")
        raise
