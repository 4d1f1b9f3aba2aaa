"""A process of environments: `python -m …environments.environment_worker SOCKET PARENT_PID`.

It reads requests from the socket, a line each, runs every episode as tasks of one event loop, and
answers as they end (`wire.py`). It ends with the input, or with its parent.

A step that takes longer than `step_s` is cancelled. Time is counted by a task of the loop, so that
an episode is not blamed for the time that others kept the loop busy. What keeps the loop busy
itself for so long is ended by the kernel where it computes, by the host otherwise."""

import asyncio
import signal
import socket
import sys
import traceback
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import msgspec

from grpo_megatron.data.conversation import conversation_of
from grpo_megatron.environments import isolation
from grpo_megatron.environments.checks import checked_observation, checked_step
from grpo_megatron.environments.protocol import Environment, Unscorable
from grpo_megatron.environments.registry import BoundEnvironment, bind
from grpo_megatron.environments.wire import (
    LONGEST_LINE,
    REQUESTS,
    Act,
    Answer,
    Beat,
    Begin,
    Closed,
    Failed,
    Observed,
    PackedObservation,
    PackedStep,
    Ready,
    Request,
    Reset,
    Stepped,
    line,
    too_long,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.orphans import die_with_parent

GRACE_S = 1.0
"""What a cancelled step has to end."""
_LONGEST_REQUEST = 1 << 26
_MAX_TRACEBACKS = 50


@dataclass(eq=False, slots=True)
class _Running:
    """A piece of work of one episode, with its time limit on the worker's clock."""

    task: asyncio.Task[Any]
    ended: asyncio.Future[None]
    deadline: float
    is_late: bool = False


class _Asked(NamedTuple):
    """A request that has no answer yet."""

    request: int
    answering: asyncio.Task[None]


class EnvironmentWorker:
    """Runs episodes until the input ends."""

    def __init__(self, bound: BoundEnvironment, begin: Begin, writer: asyncio.StreamWriter):
        self._bound = bound
        self._step_s = begin.step_s
        self._characters = begin.characters
        self._writer = writer
        self._environments: dict[int, Environment] = {}
        self._of_episode: dict[int, _Asked] = {}
        self._running: set[_Running] = set()
        self._clock = 0.0
        self._num_traced = 0

    async def serve(self, reader: asyncio.StreamReader) -> None:
        """Answer each request as a task of its own."""
        beats = asyncio.create_task(self._beat())
        while text := await reader.readline():
            request = REQUESTS.decode(text)
            earlier = self._of_episode.pop(request.episode, None)
            if earlier is not None:  # only an end comes before the answer to what was asked first
                earlier.answering.cancel()
                self._writer.write(line(Failed(earlier.request, "its episode was ended")))
            task = asyncio.create_task(self._answer(request))
            self._of_episode[request.episode] = _Asked(request.request, task)
            task.add_done_callback(partial(self._forget, request.episode))
        beats.cancel()

    def _forget(self, episode: int, task: asyncio.Task[None]) -> None:
        asked = self._of_episode.get(episode)
        if asked is not None and asked.answering is task:
            del self._of_episode[episode]

    async def _answer(self, request: Request) -> None:
        answer: Answer
        try:
            answer = await self._limited(self._do(request))
        except Exception as error:
            if not isinstance(error, Unscorable | EpisodeError):
                self._trace()
            answer = Failed(request.request, _reason_of(error))
        try:
            text = line(answer)
        except (TypeError, ValueError) as error:
            text = line(Failed(request.request, f"its reply is no JSON: {error}"[:500]))
        if len(text) > LONGEST_LINE:
            text = line(Failed(request.request, too_long(len(text))))
        self._writer.write(text)
        await self._writer.drain()

    async def _do(self, request: Request) -> Answer:
        if isinstance(request, Reset):
            environment = self._bound.make()
            self._environments[request.episode] = environment
            observation = await environment.reset(request.problem, request.seed)
            of_recipe = conversation_of(request.metadata)
            checked = checked_observation(observation, self._characters, of_recipe)
            return Observed(request.request, PackedObservation.of(checked))
        if isinstance(request, Act):
            step = await self._environments[request.episode].step(request.reply)
            packed = PackedStep.of(checked_step(step, self._characters))
            return Stepped(request.request, packed)
        ended = self._environments.pop(request.episode, None)
        if ended is not None:
            await ended.close()
        return Closed(request.request)

    async def _limited(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Return the result of `work`; Unscorable where it takes too long, whether it can be
        cancelled or not."""
        task = asyncio.create_task(_guarded(work))
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        task.add_done_callback(lambda _: _end(ended))
        running = _Running(task, ended, self._clock + self._step_s)
        self._running.add(running)
        try:
            await ended
        except asyncio.CancelledError:
            task.cancel()
            raise
        finally:
            self._running.discard(running)
        if running.is_late:
            raise Unscorable(f"it took longer than {self._step_s:g} s (step_s)")
        if task.cancelled():  # by nobody here: it has cancelled itself, or awaited what was
            raise Unscorable("it raised CancelledError")
        return task.result()

    async def _beat(self) -> None:
        """Say that the loop runs, count its time, and cancel what is late."""
        interval_s = min(0.5, self._step_s / 4)
        while True:
            isolation.allow_cpu(self._step_s + GRACE_S)
            self._writer.write(line(Beat()))
            await asyncio.sleep(interval_s)
            self._clock += interval_s
            for running in list(self._running):
                if self._clock < running.deadline:
                    continue
                if not running.is_late:
                    running.is_late = True
                    running.task.cancel()
                elif self._clock >= running.deadline + GRACE_S:
                    _end(running.ended)  # it does not let itself be cancelled

    def _trace(self) -> None:
        self._num_traced += 1
        if self._num_traced <= _MAX_TRACEBACKS:
            traceback.print_exc()


def _end(ended: asyncio.Future[None]) -> None:
    if not ended.done():
        ended.set_result(None)


async def _guarded(work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await `work`; an environment that raises what is no Exception, to end the process for
    example, ends its episode instead."""
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise Unscorable(f"it raised {type(error).__name__}") from error


def _reason_of(error: Exception) -> str:
    """Return why there is no answer; an environment's error may have no text, or none to be had."""
    kind = type(error).__name__
    try:
        if isinstance(error, Unscorable):
            return str(error.reason)
        if isinstance(error, EpisodeError):
            return _in_a_line(error)
        return f"it raised {kind}: {error}"[:500]
    except BaseException:
        return f"it raised {kind}, whose text cannot be had"


def _in_a_line(error: EpisodeError) -> str:
    if not error.remedy:
        return str(error.message)
    return f"{error.message}; {error.remedy}"


def _bound(begin: Begin) -> BoundEnvironment:
    """Return the environment, imported within its limits; EpisodeError as by `bind`."""
    isolation.limit_memory_and_files(begin.memory_bytes)
    isolation.allow_cpu(120.0)
    if not begin.network:
        isolation.refuse_network()
    return bind(begin.name, begin.arguments)


async def serve(link: int) -> None:
    """Serve the parent until its end of the socket closes."""
    reader, writer = await asyncio.open_connection(
        sock=socket.socket(fileno=link), limit=_LONGEST_REQUEST
    )
    begin = msgspec.json.decode(await reader.readline(), type=Begin)
    try:
        bound = _bound(begin)
    except (EpisodeError, MemoryError) as error:
        writer.write(line(Ready(str(error) or "out of memory while it was imported")))
        await writer.drain()
        return
    writer.write(line(Ready()))
    await EnvironmentWorker(bound, begin, writer).serve(reader)


def main() -> None:
    """Start as `SOCKET PARENT` say."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    link, parent = map(int, sys.argv[1:])
    die_with_parent(parent)  # a socket's end cannot stop an environment that hangs
    asyncio.run(serve(link))


if __name__ == "__main__":
    main()
