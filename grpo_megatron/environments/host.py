"""Environments in processes that may crash, hang and write garbage.

    async with EnvironmentHost(domains, log_path=path) as host:
        environment = host.environment("sums")      # an `Environment` like any other
        observation = await environment.reset(problem, seed)
        step = await environment.step(reply)        # Unscorable where the environment fails
        await environment.close()                   # never raises

A domain has `processes` processes of its own, here or behind servers of the run (`served.py`); an
episode is in the one with the fewest. Episodes that wait are entries of a table: no thread, no task
on either side."""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from grpo_megatron.config.environment import EnvironmentConfig
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.environments.environment_worker import GRACE_S
from grpo_megatron.environments.failures import EpisodeEnd, EpisodeLost, Failures
from grpo_megatron.environments.protocol import Observation, Reply, Step, Unscorable
from grpo_megatron.environments.registry import BoundEnvironment, bind
from grpo_megatron.environments.served import (
    SERVER_LOGS,
    EnvironmentServers,
    ServedEnvironment,
    server_role,
)
from grpo_megatron.environments.wire import (
    ANSWERS,
    LONGEST_LINE,
    Act,
    Answer,
    Beat,
    Begin,
    Close,
    Closed,
    Failed,
    Observed,
    Ready,
    Request,
    Reset,
    Stepped,
    line,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.orphans import start_worker
from grpo_megatron.rewards.printing import Printing, open_log
from grpo_megatron.types import Problem

logger = logging.getLogger(__name__)
_WORKER = "grpo_megatron.environments.environment_worker"
_STARTUP_S = 120.0
_CLOSE_S = 2.0
_TICK_S = 0.25

_Wanted = TypeVar("_Wanted", Observed, Stepped, Closed)


class EnvironmentProcess:
    """One process, started when it is first needed and again when it has ended."""

    def __init__(
        self, bound: BoundEnvironment, config: EnvironmentConfig, failures: Failures, log_path: Path
    ):
        self._begin = Begin(
            bound.reference,
            dict(bound.arguments),
            config.step_s,
            config.observation_characters,
            config.memory_mib << 20,
            bound.network,
        )
        self.failures = failures
        self._log_path = log_path
        self._requests = itertools.count()
        self._starting = asyncio.Lock()
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._printing: Printing | None = None
        self._flooded = ""  # what it printed too much of while it began
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._num_lines = 0
        self.life = 0  # how many processes there were
        self._num_beginning = 0  # episodes that wait until the process runs
        self._num_episodes = 0  # in this life

    @property
    def load(self) -> int:
        """How many episodes are in it, or will be when it runs."""
        return self._num_beginning + self._num_episodes

    @property
    def pid(self) -> int | None:
        """Id of the process that runs now; None: it does not."""
        if self._process is None:
            return None
        return self._process.pid

    async def take_episode(self) -> int:
        """Start the process unless it runs, count one more episode, and say which life this is.

        Raises EpisodeError where it cannot begin."""
        self._num_beginning += 1
        try:
            life = await self.start()
        finally:
            self._num_beginning -= 1
        self._num_episodes += 1
        return life

    def give_back_episode(self) -> None:
        """Count one episode of this life less."""
        self._num_episodes -= 1

    async def start(self) -> int:
        """Start the process unless it runs, and say which life this is.

        Raises EpisodeError where it cannot begin."""
        async with self._starting:
            if self._process is not None:
                return self.life
            self._flooded = ""
            reader = await self._open()
            try:
                async with asyncio.timeout(_STARTUP_S):
                    ready = msgspec.json.decode(await reader.readline(), type=Ready)
            except (TimeoutError, OSError, ValueError) as error:
                await self._end()
                why = self._flooded or "it ended, or wrote something else than that it is"
                raise self._broken(why) from error
            except BaseException:
                await self._end()
                raise
            if ready.error:
                await self._end()
                raise self._broken(ready.error)
            self.life += 1
            self._num_episodes = 0
            self._tasks += [
                asyncio.create_task(self._read(reader)),
                asyncio.create_task(self._watch()),
            ]
            return self.life

    async def ask(self, request: Request, life: int, wanted: type[_Wanted]) -> _Wanted:
        """Return the answer of the process that was started as `life`. Unscorable where there is
        none."""
        if life != self.life or self._process is None or self._writer is None:
            raise Unscorable("its process has ended")
        try:
            text = line(request)
        except (TypeError, ValueError) as error:
            raise Unscorable(f"the problem or the turn is no JSON: {error}") from error
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting[request.request] = future
        try:
            with contextlib.suppress(ConnectionError):  # whose reason the reader finds
                self._writer.write(text)
                await self._writer.drain()
            answer = await future
        finally:
            self._waiting.pop(request.request, None)
        if isinstance(answer, Failed):
            raise Unscorable(answer.reason)
        if not isinstance(answer, wanted):
            await self._lose("its process answered something else than was asked")
            raise Unscorable("its process answered something else than was asked")
        return answer

    def next_request(self) -> int:
        """Return a number that no other request has."""
        return next(self._requests)

    async def close(self) -> None:
        """End the process by ending its input, or by killing it (idempotent)."""
        if self._process is not None and self._writer is not None:
            self._writer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _CLOSE_S)
        await self._lose("its host was closed")

    async def _open(self) -> asyncio.StreamReader:
        """Start it, and say what it runs."""
        log = open_log(self._log_path)
        worker = await start_worker(_WORKER)
        self._process = worker.process
        self._printing = Printing(worker.output, log, self.failures.subject, self._end_flood)
        reader, self._writer = await asyncio.open_connection(sock=worker.link, limit=LONGEST_LINE)
        with contextlib.suppress(ConnectionError):  # it has ended: its missing answer says so
            self._writer.write(line(self._begin))
            await self._writer.drain()
        return reader

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Give answers to who waits for them, until the process ends or writes what is none."""
        try:
            while True:
                text = await reader.readline()
                if not text.endswith(b"\n"):
                    reason = "its process ended"
                    break
                answer = ANSWERS.decode(text)
                self._num_lines += 1
                if isinstance(answer, Beat):
                    continue
                future = self._waiting.get(answer.request)
                if future is not None and not future.done():
                    future.set_result(answer)
        except ConnectionError:
            reason = "its process ended"
        except ValueError as error:  # no answer, a line over the limit, or no UTF-8
            reason = f"its process wrote what is no answer: {error}"
        await self._lose(reason)

    async def _watch(self) -> None:
        """End a process that is silent for too long. Time is counted in ticks: a host that is too
        busy to tick does not count against the process."""
        limit_s = self._begin.step_s + 2 * GRACE_S
        silent_s = 0.0
        seen = self._num_lines
        while silent_s < limit_s:
            await asyncio.sleep(_TICK_S)
            silent_s += _TICK_S
            if seen != self._num_lines:
                seen = self._num_lines
                silent_s = 0.0
        await self._lose(f"its process has not answered for {limit_s:g} s")

    async def _end_flood(self, printed: str) -> None:
        """End the process, which prints too much."""
        reason = f"its process {printed}"
        self._flooded = reason
        logger.warning("%s: %s", self.failures.subject, reason)
        await self._lose(reason)

    async def _lose(self, reason: str) -> None:
        """End the process; requests that wait for it fail with the reason."""
        was_running = self._process is not None
        exit_code = await self._end()
        if not was_running:
            return
        if reason == "its process ended":
            reason = f"its process ended ({_end_in_words(exit_code)})"
        if reason != "its host was closed":
            self.failures.add("ends", reason)
        waiting = self._waiting
        self._waiting = {}
        for request, future in waiting.items():
            if not future.done():
                future.set_result(Failed(request, reason))

    async def _end(self) -> int | None:
        """Kill the process and what its environments started. Returns its exit code."""
        process = self._process
        self._process = None
        tasks = self._tasks
        self._tasks = []
        printing = self._printing
        self._printing = None
        for task in tasks:
            if task is not asyncio.current_task():
                task.cancel()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if process is None:
            return None
        ended_itself = process.returncode
        with contextlib.suppress(TimeoutError):  # of itself: its exit code says why
            if ended_itself is None:
                ended_itself = await asyncio.wait_for(process.wait(), 0.2)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        if printing is not None:
            await printing.end()
        return ended_itself

    def _broken(self, why: str) -> EpisodeError:
        return EpisodeError(
            f"a process of environment {self._begin.name} does not begin: {why}",
            where=str(self._log_path),
            remedy="see the messages there; is memory_mib of the environment enough?",
        )


class HostedEnvironment:
    """One episode in a process of the host: an `Environment`.

    `reset` and `step` raise Unscorable where the environment or its process fails, and EpisodeError
    where it has failed too often. `close` never raises."""

    def __init__(self, processes: Sequence[EnvironmentProcess], episode: int):
        self._processes = processes
        self._episode = episode
        self._process: EnvironmentProcess | None = None
        self._life = 0
        self._end = EpisodeEnd(processes[0].failures)  # those of all processes of a domain

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin the episode in the process that has the fewest."""
        process = min(self._processes, key=lambda process: process.load)
        process.failures.check()
        self._life = await process.take_episode()
        self._process = process
        request = Reset(
            process.next_request(),
            self._episode,
            problem.question,
            problem.answer,
            dict(problem.metadata),
            seed,
        )
        return (await self._ask(request, Observed)).observation.observation

    async def step(self, reply: Reply) -> Step:
        """Reply to a turn."""
        assert self._process is not None, "reset comes first"
        request = Act(self._process.next_request(), self._episode, reply)
        step = (await self._ask(request, Stepped)).step.step
        self._end.count(step)
        return step

    async def close(self) -> None:
        """Have the environment give back what it holds; an episode that was asked is cancelled."""
        process = self._process
        self._process = None
        if process is None or process.life != self._life:
            return
        self._end.close()
        process.give_back_episode()
        request = Close(process.next_request(), self._episode)
        with contextlib.suppress(Unscorable):
            await process.ask(request, self._life, Closed)

    async def _ask(self, request: Request, wanted: type[_Wanted]) -> _Wanted:
        assert self._process is not None
        process = self._process
        try:
            return await process.ask(request, self._life, wanted)
        except Unscorable as error:
            if self._process is None:  # closed while it was asked: counted by `close`
                raise
            self._end.failed()
            is_lost = process.pid is None or process.life != self._life
            if is_lost:
                process.failures.add_lost()
            else:
                process.failures.add("spoilt", error.reason)
            process.failures.check()
            if is_lost:
                raise EpisodeLost(error.reason) from error
            raise


class EnvironmentHost:
    """The processes of all domains that have an environment, or an agent that is a function; use as
    `async with`.

    What environments print goes to `log_path`. endpoints: where the run's servers of environments
    say where they are; without, an environment with servers has processes here, too. EpisodeError
    where one cannot be found, made or started."""

    def __init__(
        self,
        domains: Sequence[DomainConfig],
        *,
        log_path: Path = Path(os.devnull),
        endpoints: Path | None = None,
    ):
        self._processes: dict[str, list[EnvironmentProcess]] = {}
        self._servers: dict[str, EnvironmentServers] = {}
        self._failures: list[Failures] = []
        self._episodes = itertools.count()
        num_servers = 0
        for domain in domains:
            config = domain.hosted
            if config is None:
                continue
            if endpoints is not None and config.servers:
                roles = range(num_servers, num_servers + config.servers)
                num_servers += config.servers
                failures = Failures(domain.name, f"environment {config.name}", SERVER_LOGS)
                self._failures.append(failures)
                self._servers[domain.name] = EnvironmentServers(
                    [endpoints / f"{server_role(number)}.json" for number in roles],
                    config.step_s,
                    failures,
                )
                continue
            try:
                bound = bind(config.name, config.arguments)
            except EpisodeError as error:
                error.where = f"[[domains]] {domain.name}, {domain.episodes_table}"
                raise
            name = f"environment {config.name}"
            if domain.agent is not None:
                name = f"agent {domain.agent.function}"
            failures = Failures(
                domain.name,
                name,
                log_path,
                # whoever runs an agent knows which of its episodes a limit has ended
                bounds_spoilt=domain.agent is None,
            )
            self._failures.append(failures)
            self._processes[domain.name] = [
                EnvironmentProcess(bound, config, failures, log_path)
                for _ in range(config.processes)
            ]

    async def __aenter__(self) -> Self:
        try:
            await asyncio.gather(*(process.start() for process in self.processes))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self.close()

    @property
    def processes(self) -> list[EnvironmentProcess]:
        """The processes of all domains."""
        processes: list[EnvironmentProcess] = []
        for of_domain in self._processes.values():
            processes += of_domain
        return processes

    def environment(self, domain: str) -> HostedEnvironment | ServedEnvironment:
        """Return an environment for one episode of a domain. Raises KeyError for one that has
        none."""
        if domain in self._servers:
            return ServedEnvironment(self._servers[domain])
        if domain not in self._processes:
            known = did_you_mean(domain, [*self._processes, *self._servers])
            raise KeyError(f"domain {domain!r} has no environment; {known}")
        return HostedEnvironment(self._processes[domain], next(self._episodes))

    def take_metrics(self) -> dict[str, float]:
        """Since the last call, by domain: `environment/DOMAIN/episodes` that ended with an outcome,
        `spoilt` ones, those `lost` with their process, and processes that came to `ends`."""
        metrics: dict[str, float] = {}
        for failures in self._failures:
            metrics |= failures.take_metrics()
        return metrics

    async def close(self) -> None:
        """End all processes (idempotent)."""
        await asyncio.gather(*(process.close() for process in self.processes))


def _end_in_words(exit_code: int | None) -> str:
    """Return what an exit code says, in words."""
    if exit_code is None:
        return "it closed its output"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    with contextlib.suppress(ValueError):
        name = signal.Signals(-exit_code).name
        if name == "SIGXCPU":
            return "out of CPU time: a step computed for longer than step_s"
        return name
    return f"signal {-exit_code}"
