"""The replicas of a run: which are alive, and where a failed request goes next."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_megatron import progress
from grpo_megatron.errors import EngineError, GrpoMegatronError
from grpo_megatron.rollout.client import EngineClient, EngineUnreachable
from grpo_megatron.rollout.together import Result

_LOOK_S = 0.2


@dataclass(slots=True)
class Replica:
    """One engine of the run, with what is known of its health."""

    index: int
    client: EngineClient
    in_flight: int = 0
    is_leaving: bool = False
    """Whether it gets no new requests, since it is to leave the run."""
    cause_of_death: EngineError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it was not found dead."""
        return self.cause_of_death is None


class ReplicaPool:
    """Replicas (None: one that never was) with health, and retries on another one, `max_attempts`
    in all. `on_death` is called once with a replica that was found dead. With `home`, all requests
    go to that replica as long as it is alive. `may_return` says of a replica that is not there
    whether somebody may start it again. `called` is the word for one of them in messages.

    Attributes:
        failure: Why no replica that returns can be trusted, if so."""

    def __init__(
        self,
        clients: Sequence[EngineClient | None],
        *,
        max_attempts: int = 3,
        on_death: Callable[[Replica], None] = lambda replica: None,
        home: int | None = None,
        may_return: Callable[[int], bool] = lambda index: False,
        called: str = "engine",
    ):
        self.failure: GrpoMegatronError | None = None
        self.replicas: list[Replica] = []
        for index, client in enumerate(clients):
            if client is not None:
                self.replicas.append(Replica(index, client))
        self._max_attempts = max_attempts
        self._on_death = on_death
        self._home = home
        self._may_return = may_return
        self._called = called
        self._size = len(clients)

    @property
    def alive(self) -> list[Replica]:
        """Those that were not found dead, in order."""
        return [replica for replica in self.replicas if replica.is_alive]

    @property
    def taking(self) -> list[Replica]:
        """Those that new requests go to: all that are alive and are not leaving; where all others
        have died, those that are leaving."""
        staying = [replica for replica in self.alive if not replica.is_leaving]
        return staying or self.alive

    @property
    def serving(self) -> list[Replica]:
        """Those that take requests: the one at home, or all that are alive."""
        at_home = [replica for replica in self.alive if replica.index == self._home]
        return at_home or self.alive

    def pick(self, avoid: Replica | None = None) -> Replica:
        """Return the live replica with the fewest requests, `avoid` only if there is no other.

        Raises EngineError: none is alive."""
        alive = self.alive
        if not alive:
            raise self._all_died()
        choices = [replica for replica in alive if replica is not avoid]
        return min(choices or alive, key=lambda replica: replica.in_flight)

    def is_alive(self, index: int) -> bool:
        """Whether there is a replica of this number that was not found dead."""
        return any(replica.index == index for replica in self.alive)

    @property
    def can_wait(self) -> bool:
        """Whether a replica that is not there may return."""
        missing = [index for index in range(self._size) if not self.is_alive(index)]
        return any(self._may_return(index) for index in missing)

    async def wait_alive(self) -> None:
        """Wait until a replica is alive. Raises EngineError where none is, and none will be."""
        while not self.alive:
            if self.failure is not None:
                raise self.failure
            if not self.can_wait:
                raise self._all_died()
            progress.advance()  # the wait is for a start, which is watched itself
            await asyncio.sleep(_LOOK_S)

    def join(self, index: int, client: EngineClient) -> None:
        """Let a replica that was started again, or is new, take requests, in place of the one
        before it."""
        others = [replica for replica in self.replicas if replica.index != index]
        self.replicas = sorted([*others, Replica(index, client)], key=lambda one: one.index)
        self._size = max(self._size, index + 1)

    def find(self, index: int) -> Replica | None:
        """Return the replica of a number; None: it never was there, or was let go."""
        for replica in self.replicas:
            if replica.index == index:
                return replica
        return None

    def remove(self, index: int) -> None:
        """Forget a replica; requests to it fail as to one that is not there."""
        replica = self.find(index)
        if replica is None:
            return
        if replica.is_alive:
            replica.cause_of_death = EngineError(f"{replica.client.name} has left the run")
        self.replicas.remove(replica)

    def require_not_all_gone(self) -> None:
        """Raise EngineError where no replica is alive and none may return."""
        if not self.alive and not self.can_wait:
            raise self._all_died()

    def _all_died(self) -> EngineError:
        if not self.replicas:
            return EngineError(
                "no engine is alive: the last one has left",
                remedy="look at the ends of the engines' logs; the run can be resumed",
            )
        last = self.replicas[-1]
        cause = ""
        if last.cause_of_death is not None:
            cause = last.cause_of_death.message
        gone = f"all {len(self.replicas)} died, {last.client.name} because {cause}"
        if self._size == 1:
            gone = f"{last.client.name} died because {cause}"
        return EngineError(
            f"no {self._called} is alive: {gone}",
            where=last.client.base_url,
            remedy="look at the end of its log; the run can be resumed",
        )

    async def call(
        self, request: Callable[[Replica], Awaitable[Result]], *, first: Replica | None = None
    ) -> tuple[Result, Replica]:
        """Make a request, first of `first`, on another live replica when one does not answer;
        `request` may run several times. Returns what it returned and the replica that served it.

        Raises EngineError: it was refused, failed `max_attempts` times, or no replica is alive."""
        replica = first
        if replica is None or not replica.is_alive:
            replica = self.pick()
        attempt = 0
        while True:
            attempt += 1
            replica.in_flight += 1
            try:
                return await request(replica), replica
            except EngineUnreachable as error:
                await self.examine(replica, error)
                if attempt == self._max_attempts and self.alive:
                    error.add_note(f"after {attempt} attempts")
                    raise
            finally:
                replica.in_flight -= 1
            replica = self.pick(avoid=replica)

    async def examine(self, replica: Replica, error: EngineError) -> None:
        """Mark a replica dead unless it still says that it is healthy."""
        if replica.is_alive and not await replica.client.health() and replica.is_alive:
            replica.cause_of_death = error
            self._on_death(replica)
