"""The replicas of a run: which are alive, and where a failed request goes next."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.client import EngineClient, EngineUnreachable
from grpo_megatron.rollout.segments import Result


@dataclass(slots=True)
class Replica:
    """One engine of the run, with what is known of its health."""

    index: int
    client: EngineClient
    in_flight: int = 0
    cause_of_death: EngineError | None = None

    @property
    def is_alive(self) -> bool:
        """Whether it was not found dead."""
        return self.cause_of_death is None


class ReplicaPool:
    """Replicas (None: one that never was) with health, and retries on another one, `max_attempts`
    in all. `on_death` is called once with a replica that was found dead. With `home`, all requests
    go to that replica as long as it is alive."""

    def __init__(
        self,
        clients: Sequence[EngineClient | None],
        *,
        max_attempts: int = 3,
        on_death: Callable[[Replica], None] = lambda replica: None,
        home: int | None = None,
    ):
        self.replicas: list[Replica] = []
        for index, client in enumerate(clients):
            if client is not None:
                self.replicas.append(Replica(index, client))
        self._max_attempts = max_attempts
        self._on_death = on_death
        self._home = home

    @property
    def alive(self) -> list[Replica]:
        """Those that were not found dead, in order."""
        return [replica for replica in self.replicas if replica.is_alive]

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

    def _all_died(self) -> EngineError:
        last = self.replicas[-1]
        cause = ""
        if last.cause_of_death is not None:
            cause = last.cause_of_death.message
        return EngineError(
            f"no engine is alive: all {len(self.replicas)} died, {last.client.name} "
            f"because {cause}",
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
