"""Steps that are asked for before they are trained, in order.

Prompts are drawn step after step: a step draws only when the one before has drawn all of its own,
and gets into the store only when the one before is there. So what the store has is always the next
steps without a gap, each with the state of the sampler behind its own draws, and a run that goes on
from it draws what an uninterrupted one would have drawn. Where no draw depends on answers, two
steps are sampled at once: the next one's requests fill the engines while the last completions of
the one before come to their end and are scored (`RunConfig.steps_sampled_at_once`)."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.controller.recorded_step import RecordedStep, StepSource

_LOOK_S = 1.0


@dataclass(frozen=True)
class _AskedStep:
    drawn: asyncio.Event
    """Set when the step draws no more prompts, and when it has ended."""
    task: asyncio.Task[RecordedStep]


class SamplingChain:
    """The steps that were asked for and not taken. `at_once`: how many may be sampled together."""

    def __init__(self, steps: StepSource, at_once: int):
        self._steps = steps
        self._at_once = at_once
        self._asked: dict[int, _AskedStep] = {}
        self._running: set[int] = set()
        self._may_begin = asyncio.Event()
        self._may_begin.set()

    def __bool__(self) -> bool:
        """Whether any step was asked for and not taken."""
        return bool(self._asked)

    def ask(self, first: int, last: int) -> None:
        """Ask for the steps `first` to `last` that were not asked for; `first` is the one behind
        the last that was taken."""
        for step in range(first, last + 1):
            if step not in self._asked:
                self._asked[step] = self._begin(step)

    def _begin(self, step: int) -> _AskedStep:
        before = self._asked.get(step - 1)
        earlier = self._asked.get(step - self._at_once)
        drawn = asyncio.Event()
        task = asyncio.create_task(self._sample(step, drawn, before, earlier))
        task.add_done_callback(lambda _: drawn.set())
        return _AskedStep(drawn, task)

    def take(self, step: int) -> asyncio.Task[RecordedStep]:
        """Return the task that samples `step`, the first that was not taken; starts it if nothing
        has."""
        self.ask(step, step)
        return self._asked.pop(step).task

    async def drain(self, is_worth_waiting: Callable[[], bool]) -> None:
        """Let no step begin until `resume`, and wait until the running ones are recorded, or until
        there is nothing to wait for."""
        self._may_begin.clear()
        while self._tasks_running() and is_worth_waiting():
            await asyncio.wait(self._tasks_running(), timeout=_LOOK_S)

    def resume(self) -> None:
        """Let steps begin again, after `drain`."""
        self._may_begin.set()

    async def close(self) -> None:
        """End what was asked for."""
        tasks = [asked.task for asked in self._asked.values()]
        self._asked.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _tasks_running(self) -> list[asyncio.Task[RecordedStep]]:
        found = []
        for step, asked in self._asked.items():
            if step in self._running and not asked.task.done():
                found.append(asked.task)
        return found

    async def _sample(
        self,
        step: int,
        drawn: asyncio.Event,
        before: _AskedStep | None,
        earlier: _AskedStep | None,
    ) -> RecordedStep:
        """Wait until the step `before` has drawn and the `earlier` one is recorded, and sample.
        What one of them raised is raised here too: no step is sampled behind one that is not."""
        if before is not None:
            await before.drawn.wait()
            if before.task.done():
                before.task.result()
        if earlier is not None:
            await _finished(earlier.task)
        await self._may_begin.wait()

        async def in_order() -> None:
            if before is not None:
                await _finished(before.task)

        self._running.add(step)
        try:
            return await self._steps.sample(step, on_drawn=drawn.set, before_recording=in_order)
        finally:
            self._running.discard(step)


async def _finished(task: asyncio.Task[RecordedStep]) -> None:
    """Wait for `task`, and raise what it raised; it goes on when the one who waits is cancelled."""
    await asyncio.wait([task])
    task.result()
