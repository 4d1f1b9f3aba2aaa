"""Episodes on the servers of a run (`environments.server`), as an environment of this process."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron import progress
from grpo_megatron.environments.failures import EpisodeEnd, Failures
from grpo_megatron.environments.protocol import Observation, Reply, Step, Unscorable
from grpo_megatron.environments.remote import RemoteEnvironment, ServerLost
from grpo_megatron.types import Problem

SERVER_LOGS = Path("logs/latest/environment-*-processes.log")
"""Of a run, what environments print that have servers."""
_START_S = 150.0
"""What a server may take beside a step: it may have to start a process again."""
_CLOSE_S = 5.0
_AWAY_S = 1.0
"""How long a server that does not answer is not asked to begin an episode."""
_WAIT_S = 600.0
"""How long an episode waits for a server to begin it."""


def server_role(number: int) -> str:
    """Return the role of a server, by its number among those of all domains
    (`RunConfig .environment_servers`); also the name of its endpoint's file."""
    return f"environment-{number}"


class EnvironmentServers:
    """The servers of one domain, by the files in which they say where they are: those that are not
    there, because they start or start again, are asked later.

    step_s: seconds that the environment may take to begin or to reply."""

    def __init__(self, files: Sequence[Path], step_s: float, failures: Failures):
        self.failures = failures
        self._files = files
        self._timeout_s = step_s + _START_S
        self._num_episodes: Counter[Path] = Counter()
        self._away_until_s: dict[Path, float] = {}

    async def begin(
        self, problem: Problem, seed: int
    ) -> tuple[Path, RemoteEnvironment, Observation]:
        """Begin an episode on the server with the fewest of this process; returns the server's file
        for `end`.

        Raises Unscorable where the environment does not begin it, or no server is there for ten
        minutes."""
        ends_at = time.monotonic() + _WAIT_S
        reason = "none of its servers answers"
        while time.monotonic() < ends_at:
            for file in self._there():
                self._num_episodes[file] += 1
                try:
                    environment = self._connect(file)
                    return file, environment, await environment.reset(problem, seed)
                except ServerLost as error:  # nothing was begun: another server may
                    reason = error.reason
                    self._away_until_s[file] = time.monotonic() + _AWAY_S
                    self.end(file)
                except BaseException:
                    self.end(file)
                    raise
            progress.advance()  # the wait is for a start, which is watched itself
            await asyncio.sleep(_AWAY_S)
        raise Unscorable(reason)

    def end(self, file: Path) -> None:
        """An episode of this server has ended."""
        self._num_episodes[file] -= 1

    def _there(self) -> list[Path]:
        """Servers that may answer, those with few episodes first."""
        now = time.monotonic()
        there = [file for file in self._files if self._away_until_s.get(file, 0.0) <= now]
        return sorted(there, key=lambda file: self._num_episodes[file])

    def _connect(self, file: Path) -> RemoteEnvironment:
        try:
            return RemoteEnvironment(endpoint=str(file), timeout_s=self._timeout_s)
        except (OSError, ValueError, TypeError) as error:
            raise ServerLost(f"{file.stem} has not said where it is: {error}") from error


class ServedEnvironment:
    """One episode on one of the servers: an `Environment`.

    `reset` and `step` raise Unscorable where the environment fails or its server is gone, and
    EpisodeError where it has failed too often. `close` never raises."""

    def __init__(self, servers: EnvironmentServers):
        self._servers = servers
        self._end = EpisodeEnd(servers.failures)
        self._file: Path | None = None
        self._remote: RemoteEnvironment | None = None

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin the episode."""
        failures = self._servers.failures
        failures.check()
        try:
            self._file, self._remote, observation = await self._servers.begin(problem, seed)
        except Unscorable as error:
            failures.add("spoilt", error.reason)
            failures.check()
            raise
        return observation

    async def step(self, reply: Reply) -> Step:
        """Reply to a turn."""
        assert self._remote is not None, "reset comes first"
        failures = self._servers.failures
        try:
            step = await self._remote.step(reply)
        except ServerLost:
            self._end.failed()
            failures.add_lost()
            raise
        except Unscorable as error:
            self._end.failed()
            failures.add("spoilt", error.reason)
            failures.check()
            raise
        self._end.count(step)
        return step

    async def close(self) -> None:
        """End the episode on the server, which would end it by itself after a while."""
        remote = self._remote
        if self._file is None or remote is None:
            return
        self._end.close()
        self._servers.end(self._file)
        self._file = None
        self._remote = None
        with contextlib.suppress(Unscorable, TimeoutError):
            await asyncio.wait_for(remote.close(), _CLOSE_S)
