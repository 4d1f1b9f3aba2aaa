"""Rewards of rollout groups, computed by processes that may hang, crash and print.

Processes and not threads: math-verify needs `signal.alarm` of a main thread, and nothing but a
kill stops a regular expression that backtracks for ever.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from grpo_megatron.config.data import DomainConfig
from grpo_megatron.errors import RewardError
from grpo_megatron.rewards.board import DIED, PENDING, RAISED, SCORED, TIMED_OUT
from grpo_megatron.rewards.process import RewardProcess
from grpo_megatron.rewards.registry import Component, components_of
from grpo_megatron.rewards.worker import Call
from grpo_megatron.types import Completion, RolloutGroup, ScoredGroup

logger = logging.getLogger(__name__)

CHUNK_CALLS = 64
"""Calls per message (at most `board.CAPACITY`): a message costs about as much as 20 cheap calls."""

MAX_KILLS = 32
"""Workers that one function may cost without a single result in between."""

_MAX_IDLE_DEATHS = 3
_MIN_SAMPLES_TO_GIVE_UP = 64
_OF_COMPLETION: Mapping[str, Callable[[Completion], Any]] = {
    "num_tokens": lambda completion: len(completion.token_ids),
    "truncated": lambda completion: completion.truncated,
    "token_ids": lambda completion: tuple(completion.token_ids.tolist()),
}
_CAUSES = {RAISED: "raised", TIMED_OUT: "timed_out", DIED: "died"}


class RewardPool:
    """Long-lived reward processes; use as `async with RewardPool(...) as pool`.

    A call that raises, dies or takes longer than `timeout_s` scores NaN and is counted; its
    process is replaced where it had to be killed. Results do not depend on the number of workers.

    Args:
        domains: Their reward functions are imported and checked here, so that a wrong recipe
            fails before anything starts.
        num_workers: Processes.
        timeout_s: Hard limit per call.
        concurrency: Coroutines of async rewards that one process runs at a time.
        log_path: What rewards print; None: the standard error of this process.

    Raises:
        RewardError: A function cannot be imported or does not fit its arguments.
    """

    def __init__(self, domains: Sequence[DomainConfig], *, num_workers: int = 1,
                 timeout_s: float = 5.0, concurrency: int = 16, log_path: Path | None = None):
        self._components: list[Component] = []
        self._clips = {domain.name: domain.reward_clip for domain in domains}
        self._by_domain: dict[str, range] = {}
        for domain in domains:
            start = len(self._components)
            self._components += components_of(domain)
            self._by_domain[domain.name] = range(start, len(self._components))
        self._limits = {"timeout_s": timeout_s, "concurrency": concurrency}
        self._log_path = log_path
        self._slots: asyncio.Queue[_Slot] = asyncio.Queue()
        self._all_slots = [_Slot() for _ in range(num_workers)]
        for slot in self._all_slots:
            self._slots.put_nowait(slot)
        self._failures = [Counter[str]() for _ in self._components]
        self._num_scored = [0] * len(self._components)
        self._kills_in_a_row = [0] * len(self._components)
        self._num_restarts = 0
        self._tracebacks: dict[int, str] = {}

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    async def start(self) -> None:
        """Start every process now rather than at the first call.

        Raises:
            RewardError: A process cannot import the rewards.
        """
        await asyncio.gather(*(self._process_of(slot) for slot in self._all_slots))

    async def close(self) -> None:
        """End every process (idempotent)."""
        ending = [slot.process for slot in self._all_slots if slot.process is not None]
        for slot in self._all_slots:
            slot.process = None
        await asyncio.gather(*(process.close() for process in ending))

    async def score(self, groups: Sequence[RolloutGroup]) -> list[ScoredGroup]:
        """Score every completion of every group, in the given order. May run concurrently.

        Returns:
            Per group: `components[name]` float64 [G], NaN where a component was skipped, and
            `rewards` float64 [G], the weighted sum of the other components within ±reward_clip,
            NaN where all were.

        Raises:
            RewardError: A function failed on every sample, or keeps killing its process.
        """
        calls = [call for group in groups for call in self._calls(group)]
        functions = [call[0] for call in calls]
        statuses = [PENDING] * len(calls)
        values = [np.nan] * len(calls)
        steps: dict[int, list[tuple[int, float]]] = {}
        size = max(1, min(CHUNK_CALLS, -(-len(calls) // len(self._all_slots))))
        spans = (range(start, min(start + size, len(calls)))
                 for start in range(0, len(calls), size))
        tasks = [asyncio.ensure_future(self._score_chunk(calls, span, statuses, values, steps))
                 for span in spans]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        self._check(functions, statuses)
        return self._assembled(groups, values, steps)

    def metrics(self) -> dict[str, float]:
        """Failures since the start, `reward/<domain>.<component>/<cause>`, and restarts."""
        counted = {"reward/pool/restarts": float(self._num_restarts)}
        for component, failures in zip(self._components, self._failures, strict=True):
            for cause in _CAUSES.values():
                key = f"reward/{component.domain}.{component.name}/{cause}"
                counted[key] = float(failures[cause])
        return counted

    @property
    def tracebacks(self) -> Mapping[str, str]:
        """First traceback by `<domain>.<component>` of the functions that raised."""
        return {f"{self._components[index].domain}.{self._components[index].name}": text
                for index, text in self._tracebacks.items()}

    def _calls(self, group: RolloutGroup) -> list[Call]:
        prompt = group.prompt
        if prompt.domain not in self._by_domain:
            raise RewardError(f"no rewards for domain {prompt.domain!r}",
                              where=f"prompt {prompt.prompt_id}",
                              remedy=f"domains with rewards: {', '.join(self._by_domain)}")
        shared = {"prompt": prompt.text, "metadata": dict(prompt.metadata)}
        return [(index, completion.text, prompt.answer,
                 {name: shared[name] if name in shared else _OF_COMPLETION[name](completion)
                  for name in self._components[index].context})
                for completion in group.completions for index in self._by_domain[prompt.domain]]

    async def _score_chunk(self, calls: Sequence[Call], span: range, statuses: list[int],
                           values: list[float],
                           steps: dict[int, list[tuple[int, float]]]) -> None:
        pending, idle_deaths = list(span), 0
        slot = await self._slots.get()
        try:
            while pending:
                process = await self._process_of(slot)
                results = await process.run([calls[i] for i in pending])
                for i, status, value in zip(pending, *results, strict=True):
                    statuses[i], values[i] = status, value if status == SCORED else np.nan
                    self._count(calls[i][0], status)
                steps |= {pending[call]: found for call, found in process.steps.items()}
                self._keep_tracebacks(process)
                left = [i for i in pending if statuses[i] == PENDING]
                idle_deaths = idle_deaths + 1 if len(left) == len(pending) else 0
                if idle_deaths == _MAX_IDLE_DEATHS:
                    raise RewardError("reward processes end before their first call",
                                      where=str(self._log_path or "standard error"),
                                      remedy="see the messages there; is memory short?")
                pending = left
        finally:
            self._slots.put_nowait(slot)

    async def _process_of(self, slot: _Slot) -> RewardProcess:
        if slot.process is None or not slot.process.alive:
            if slot.process is not None:
                self._num_restarts += 1
            functions = [(c.reference, c.arguments) for c in self._components]
            slot.process = await RewardProcess.start(functions, self._log_path, **self._limits)
        return slot.process

    def _count(self, function: int, status: int) -> None:
        if status == SCORED:
            self._num_scored[function] += 1
            self._kills_in_a_row[function] = 0
        elif status in _CAUSES:
            self._failures[function][_CAUSES[status]] += 1
            if status == RAISED:
                return
            self._kills_in_a_row[function] += 1
            if self._kills_in_a_row[function] >= MAX_KILLS:
                raise self._failed(function, f"{_CAUSES[status].replace('_', ' ')} on "
                                   f"{MAX_KILLS} samples without a result in between")

    def _keep_tracebacks(self, process: RewardProcess) -> None:
        for function, text in process.tracebacks.items():
            if function not in self._tracebacks:
                self._tracebacks[function] = text
                component = self._components[function]
                logger.warning("reward %s of domain %s raised; the sample is unscorable. First "
                               "traceback:\n%s", component.name, component.domain, text.rstrip())

    def _check(self, functions: Sequence[int], statuses: Sequence[int]) -> None:
        """A function that failed on every sample is broken. One bad group is no proof of that
        once the function has worked; many samples are."""
        called = Counter(functions)
        worked = {f for f, status in zip(functions, statuses, strict=True) if status == SCORED}
        for function, number in called.items():
            if function in worked:
                continue
            if self._num_scored[function] == 0 or number >= _MIN_SAMPLES_TO_GIVE_UP:
                causes = Counter(_CAUSES[s] for f, s in zip(functions, statuses, strict=True)
                                 if f == function)
                told = ", ".join(f"{n} {cause.replace('_', ' ')}" for cause, n in causes.items())
                raise self._failed(function, f"failed on every sample ({told})")

    def _failed(self, function: int, what: str) -> RewardError:
        component = self._components[function]
        trace = self._tracebacks.get(function)
        told = f"\n{trace.rstrip()}" if trace else ""
        return RewardError(f"reward {component.reference} {what}{told}",
                           where=f"[[domains]] {component.domain}, reward {component.name}",
                           remedy="correct the function; [data] reward_timeout_s is "
                           f"{self._limits['timeout_s']:g} s")

    def _assembled(self, groups: Sequence[RolloutGroup],
                   values: Sequence[float],
                   steps: Mapping[int, list[tuple[int, float]]]) -> list[ScoredGroup]:
        scored, start = [], 0
        for group in groups:
            components = [self._components[i] for i in self._by_domain[group.prompt.domain]]
            shape = (len(group.completions), len(components))
            table = np.asarray(values[start:start + shape[0] * shape[1]],
                               dtype=np.float64).reshape(shape)
            first, start = start, start + shape[0] * shape[1]
            weights = np.asarray([component.weight for component in components])
            scored.append(ScoredGroup(
                group, {c.name: table[:, k].copy() for k, c in enumerate(components)},
                weighted_sum(table, weights, self._clips[group.prompt.domain]),
                tuple(tuple((end, reward * component.weight)
                            for k, component in enumerate(components)
                            for end, reward in steps.get(first + sample * shape[1] + k, ()))
                      for sample in range(shape[0])) if steps else ()))
        return scored


class _Slot:
    """Room for one process; empty before the first start and after a close."""

    process: RewardProcess | None = None


def weighted_sum(table: np.ndarray, weights: np.ndarray, clip: float | None = None) -> np.ndarray:
    """Rewards [G] of components [G, C], clipped to ±clip: NaN components are skipped, NaN where
    all are."""
    known = ~np.isnan(table)
    total = np.where(known, table, 0.0) @ weights
    if clip is not None:
        total = np.clip(total, -clip, clip)
    return np.where(known.any(axis=1), total, np.nan)
