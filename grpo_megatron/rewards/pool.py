"""Rewards of rollout groups, computed by processes that may hang, crash and print.

Processes and not threads: math-verify needs `signal.alarm` of a main thread, and nothing but a
kill stops a regular expression that backtracks for ever."""

import asyncio
import logging
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np

from grpo_megatron import progress
from grpo_megatron.config.run import DomainConfig
from grpo_megatron.errors import RewardError
from grpo_megatron.file_part import FilePart
from grpo_megatron.network import Endpoint
from grpo_megatron.rewards.calls import Call, CallOutcome, Chunk
from grpo_megatron.rewards.places import HostedPlace, HostLost, LocalPlace, Place
from grpo_megatron.rewards.process import RewardProcess
from grpo_megatron.rewards.registry import BoundReward, bind
from grpo_megatron.types import (
    Completion,
    Prompt,
    RolloutGroup,
    ScoredGroup,
    StoredCompletion,
)

logger = logging.getLogger(__name__)

CHUNK_CALLS = 64  # calls per message, which costs about as much as 20 cheap calls
MAX_KILLS = 32  # workers that one function may cost without a single result in between
_MIN_SAMPLES_TO_GIVE_UP = 64
_PLACE = re.compile(
    r'^ +File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)$', re.MULTILINE
)
"""Of a frame in a traceback."""
_CALLERS = [Path(__file__).with_name(name) for name in ("reward_worker.py", "registry.py")]
"""Whose frames are above those of a reward."""
_SHIPPED = "grpo_megatron."
AnyGroup = RolloutGroup[Any]  # as it is stored, or in memory
AnyCompletion = Completion | StoredCompletion


@dataclass(slots=True)
class Component:
    """One reward component of one domain, and how its calls have ended so far.

    Attributes:
        failures: By cause, of calls that metrics count and have not told yet."""

    domain: str
    name: str
    weight: float
    reward: BoundReward
    failures: Counter[str] = field(default_factory=Counter)
    num_scored: int = 0
    kills_in_a_row: int = 0
    is_awaited: bool = False  # a call was, although nothing said so before
    trace: str = ""  # the first

    def count(self, outcome: CallOutcome) -> None:
        """Take the outcome of a call. Raises RewardError where the function keeps killing its
        process."""
        if not outcome.failure:
            self.num_scored += 1
            self.kills_in_a_row = 0
            return
        if outcome.failure != "raised":
            self.kills_in_a_row += 1
            if self.kills_in_a_row >= MAX_KILLS:
                raise self.error(
                    f"{outcome.failure.replace('_', ' ')} on {MAX_KILLS} samples "
                    "without a result in between"
                )
        elif not self.trace:
            self.trace = outcome.trace.rstrip()
            logger.warning(
                "reward %s of domain %s raised; the sample is unscorable. First traceback:\n%s",
                self.name,
                self.domain,
                self.trace,
            )

    def check(self, failures: Sequence[str]) -> None:
        """Raise RewardError for a broken function: every sample of a batch failed, and no sample
        ever succeeded or the batch is large. failures: of the batch, "" for a sample that did not
        fail."""
        if not failures or not all(failures):
            return
        never_worked = self.num_scored == 0
        if not never_worked and len(failures) < _MIN_SAMPLES_TO_GIVE_UP:
            return
        told = []
        for cause, number in Counter(failures).items():
            told.append(f"{number} {cause.replace('_', ' ')}")
        raise self.error(f"failed on every sample ({', '.join(told)})")

    def error(self, what: str) -> RewardError:
        """Make the error that names the component, what it raised first, and where."""
        if self.trace:
            what += f": {raised_at(self.trace)}"
        remedy = "correct the function"
        if self.reward.reference.startswith(_SHIPPED):
            remedy = "mend what it names"
        return RewardError(
            f"reward {self.reward.reference} {what}",
            where=f"[[domains]] {self.domain}, reward {self.name}",
            remedy=f"{remedy}, or raise [data] reward_timeout_s",
        )


def raised_at(trace: str) -> str:
    """Return the exception of a reward's traceback, and the line of the reward that raised it."""
    places = list(_PLACE.finditer(trace))
    if not places:
        return ""
    words = []
    for line in trace[places[-1].end() :].splitlines():
        is_source = line.startswith("    ")
        if line and not is_source:
            words.append(line)
    told = " ".join(words)
    for place in reversed(places):
        if Path(place["file"]) not in _CALLERS:
            return f"{told}\n  at:     {place['file']}:{place['line']}, in {place['function']}"
    return told  # of what it returned


def components_of(domain: DomainConfig, max_new_tokens: int | None = None) -> tuple[Component, ...]:
    """Import the domain's components. Raises RewardError: one cannot be called, or comes twice.

    max_new_tokens: the domain's length budget, which rewards get as `max_tokens` where they require
    it and the recipe does not set it."""
    offered = {}
    if max_new_tokens is not None:
        offered["max_tokens"] = max_new_tokens
    components: dict[str, Component] = {}
    for reward in domain.rewards:
        name = reward.component
        try:
            if name in components:
                raise RewardError(
                    f"two reward components are called {name!r}", remedy="give one of them a `name`"
                )
            function = bind(reward.function, reward.arguments, offered)
            components[name] = Component(domain.name, name, reward.weight, function)
        except RewardError as error:
            error.where = f"[[domains]] {domain.name}, reward {name}"
            raise
    return tuple(components.values())


class RewardPool:
    """Long-lived reward processes; use as `async with RewardPool(...) as pool`.

    There are `num_workers` of them on this machine; with `hosts`, so many on each host and none
    here. Calls wait in one queue: a process has at most CHUNK_CALLS of them at a time. A host that
    goes is asked nothing any more, and the others get what it had.

    A call that raises, dies or takes longer than `timeout_s` scores NaN and is counted, and the sum
    of its sample is NaN too, unless its component weighs 0; its process is replaced where it was
    killed. A process runs `concurrency` coroutines at a time. What rewards
    print goes to `log_path`. `budgets`: the length budget of domains, in tokens. RewardError as by
    `components_of`."""

    def __init__(
        self,
        domains: Sequence[DomainConfig],
        *,
        num_workers: int = 1,
        timeout_s: float = 5.0,
        concurrency: int = 16,
        log_path: Path = Path(os.devnull),
        budgets: Mapping[str, int] | None = None,
        hosts: Sequence[Endpoint] = (),
    ):
        self.components: list[Component] = []
        self._of_domain: dict[str, list[int]] = {}
        for domain in domains:
            budget = (budgets or {}).get(domain.name)
            first = len(self.components)
            self.components += components_of(domain, budget)
            self._of_domain[domain.name] = list(range(first, len(self.components)))
        self._clips = {domain.name: domain.reward_clip or np.inf for domain in domains}
        self._timeout_s = timeout_s
        functions = [(c.reward.reference, c.reward.arguments) for c in self.components]
        limits = {"timeout_s": timeout_s, "concurrency": concurrency}
        self._workers: list[RewardProcess] = []
        self._idle: asyncio.Queue[RewardProcess] = asyncio.Queue()
        self._lost: dict[RewardProcess, HostLost] = {}
        for place in _places(num_workers, hosts, log_path):
            worker = RewardProcess(functions, limits, place)
            self._workers.append(worker)
            self._idle.put_nowait(worker)

    async def __aenter__(self) -> Self:
        await asyncio.gather(*(self._start(worker) for worker in self._workers))
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(worker.close() for worker in self._workers))

    async def _start(self, worker: RewardProcess) -> None:
        """Start a process early; without its host the others do the work."""
        try:
            await worker.start()
        except HostLost as error:
            self._leave(worker, error)
            if len(self._lost) == len(self._workers):
                raise

    async def score(
        self, groups: Sequence[AnyGroup], *, is_counted: bool = True
    ) -> list[ScoredGroup]:
        """Score every completion of every group, in the given order. May run concurrently.
        `rewards` is the weighted sum of the components that are not NaN, within ±reward_clip; NaN
        where none of them weighs anything, or a component that weighs something failed.

        is_counted: whether `take_metrics` returns the failures. RewardError where a function failed
        on every sample, or keeps killing its process."""
        calls: list[Call] = []
        bounds = []
        for group in groups:
            first = len(calls)
            calls += self._calls(group)
            bounds.append((first, len(calls)))
        outcomes = await self._outcomes(calls)
        self._refuse_broken(calls, outcomes)
        if is_counted:
            for call, outcome in zip(calls, outcomes, strict=True):
                if outcome.failure:
                    self.components[call.component].failures[outcome.failure] += 1
        scored = []
        for group, (first, end) in zip(groups, bounds, strict=True):
            scored.append(self._scored(group, outcomes[first:end]))
        return scored

    async def _outcomes(self, calls: Sequence[Call]) -> list[CallOutcome]:
        """Have processes run the calls; return their outcomes in the same order."""
        outcomes = [CallOutcome()] * len(calls)
        try:
            async with asyncio.TaskGroup() as tasks:

                def begin(chunk: Sequence[int]) -> None:
                    tasks.create_task(self._run(calls, chunk, outcomes, begin))

                for chunk in self._chunks(calls):
                    begin(chunk)
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return outcomes

    def _chunks(self, calls: Sequence[Call]) -> Iterator[list[int]]:
        """Yield the indices of calls that a process gets at a time: plain functions, then
        coroutines."""
        plain = []
        coroutines = []
        for index, call in enumerate(calls):
            if self._is_async(call):
                coroutines.append(index)
            else:
                plain.append(index)
        for indices in (plain, coroutines):
            share = -(-len(indices) // len(self._workers))
            size = max(1, min(CHUNK_CALLS, share))
            for start in range(0, len(indices), size):
                yield indices[start : start + size]

    def _refuse_broken(self, calls: Sequence[Call], outcomes: Sequence[CallOutcome]) -> None:
        """Raise RewardError for a component that failed on every sample, see `Component.check`."""
        failures: dict[int, list[str]] = {}
        for call, outcome in zip(calls, outcomes, strict=True):
            failures.setdefault(call.component, []).append(outcome.failure)
        for index, of_component in sorted(failures.items()):
            self.components[index].check(of_component)

    def take_metrics(self) -> dict[str, float]:
        """Return failures since the last call, `reward/<domain>.<component>/<cause>`, and
        restarts."""
        num_restarts = 0
        for worker in self._workers:
            num_restarts += worker.num_restarts
            worker.num_restarts = 0
        metrics = {"reward/pool/restarts": float(num_restarts)}
        for component in self.components:
            for cause in ("raised", "timed_out", "died"):
                name = f"reward/{component.domain}.{component.name}/{cause}"
                metrics[name] = float(component.failures.pop(cause, 0))
        return metrics

    def _calls(self, group: AnyGroup) -> list[Call]:
        """Return the calls for a group: one completion after the other, each with every
        component."""
        prompt = group.prompt
        components = self._of_domain[prompt.domain]
        metadata = b""
        if any("metadata" in self.components[index].reward.context for index in components):
            metadata = pickle.dumps(dict(prompt.metadata))
        calls: list[Call] = []
        for completion in group.completions:
            for index in components:
                context = self._context(index, prompt, metadata, completion)
                calls.append(Call(index, _text_of(completion), prompt.answer, context))
        return calls

    def _context(
        self, index: int, prompt: Prompt, metadata: bytes, completion: AnyCompletion
    ) -> dict[str, Any]:
        """Return what the reward of a component asks for beside text and answer (`Call`)."""
        found: dict[str, Any] = {}
        for name in self.components[index].reward.context:
            if name == "prompt":
                found[name] = prompt.text
            elif name == "metadata":
                found[name] = metadata
            elif name == "token_ids":
                found[name] = _token_ids_of(completion)
            elif name == "num_tokens":
                found[name] = completion.num_policy_tokens
            else:
                found[name] = getattr(completion, name)
        return found

    def _is_async(self, call: Call) -> bool:
        component = self.components[call.component]
        return component.reward.is_async or component.is_awaited

    async def _run(
        self,
        calls: Sequence[Call],
        chunk: Sequence[int],
        outcomes: list[CallOutcome],
        begin: Callable[[Sequence[int]], None],
    ) -> None:
        """Fill in the outcomes of `chunk`, which are indices in `calls`; what gets none is handed
        to `begin`, which has it run as a chunk of its own. Among calls that are answered in their
        order the first without an outcome has ended the process; coroutines run together, and each
        without an outcome runs again, alone."""
        worker = await self._next_idle()
        of_chunk = [calls[index] for index in chunk]
        sent = Chunk(of_chunk, is_async=all(map(self._is_async, of_chunk)))
        try:
            found, failure = await worker.run(sent, self._timeout_s)
        except HostLost as error:
            self._leave(worker, error)
            begin(chunk)
            return
        finally:
            self._idle.put_nowait(worker)  # a lost one too: who waits for it must see that
        in_order = sent.left_in_order(found)
        has_failed_in_order = failure != "" and len(in_order) > 0
        if has_failed_in_order:
            found[in_order[0]] = CallOutcome(failure)
        elif failure and len(chunk) == 1:
            found[0] = CallOutcome(failure)
        progress.advance()
        for place, outcome in found.items():  # in the order in which they came
            index = chunk[place]
            outcomes[index] = outcome
            component = self.components[calls[index].component]
            component.is_awaited = component.is_awaited or outcome.is_awaited
            component.count(outcome)
        for places in _chunks_left(sent, found, have_begun=not has_failed_in_order):
            begin([chunk[place] for place in places])

    async def _next_idle(self) -> RewardProcess:
        """Wait for a process whose host is there. HostLost where the hosts of all have gone."""
        while True:
            worker = await self._idle.get()
            if worker not in self._lost:
                return worker
            if len(self._lost) == len(self._workers):
                self._idle.put_nowait(worker)  # whoever waits behind is to see that as well
                raise self._lost[worker]

    def _leave(self, worker: RewardProcess, error: HostLost) -> None:
        """Give the process nothing more to do: its host has gone."""
        if worker not in self._lost:
            self._lost[worker] = error
            logger.warning("%s", error)

    def _scored(self, group: AnyGroup, outcomes: Sequence[CallOutcome]) -> ScoredGroup:
        """Return the group with its rewards. `outcomes` are those of its calls, in the order of
        `_calls`. An episode whose last turn is spoilt cannot be scored, whatever its text is."""
        domain = group.prompt.domain
        components = [self.components[index] for index in self._of_domain[domain]]
        table = np.empty((len(group.completions), len(components)), np.float64)
        has_failed = np.zeros(table.shape, bool)
        steps: list[tuple[tuple[int, float], ...]] = []
        for sample in range(len(group.completions)):
            of_sample = []
            turns = group.completions[sample].turns
            is_spoilt = len(turns) > 0 and turns[-1].spoilt
            first = sample * len(components)
            for column, component in enumerate(components):
                outcome = outcomes[first + column]
                table[sample, column] = outcome.value
                has_failed[sample, column] = outcome.failure != ""
                if is_spoilt:
                    table[sample, column] = np.nan
                    continue
                # One step that cannot be scored makes their sum NaN. Tokens are credited with
                # their step and all later ones, so the others say nothing without it.
                is_counted = component.weight != 0 and not math.isnan(outcome.value)
                if is_counted:
                    for end, reward in outcome.steps:
                        of_sample.append((end, reward * component.weight))
            steps.append(tuple(of_sample))
        weights = np.asarray([component.weight for component in components])
        rewards = weighted_sum(table, weights, self._clips[domain])
        # A sum without the part that failed would be that of a bad answer.
        is_unscorable = (has_failed & (weights != 0)).any(axis=1)
        rewards = np.where(is_unscorable, np.nan, rewards)
        by_name = {}
        for column, component in enumerate(components):
            by_name[component.name] = table[:, column].copy()
        if not any(steps):
            steps = []
        return ScoredGroup(group, by_name, rewards, tuple(steps))


def _chunks_left(
    sent: Chunk, found: Mapping[int, CallOutcome], *, have_begun: bool
) -> list[list[int]]:
    """Return the places of the calls of a chunk without an outcome, as they are to be run again:
    those that are answered in their order together, and coroutines, where they `have_begun`, each
    alone, since any may have ended the process."""
    in_order = sent.left_in_order(found)
    coroutines = []
    for place in range(len(sent.calls)):
        if place not in found and place not in in_order:
            coroutines.append(place)
    chunks = [in_order, coroutines]
    if have_begun:
        chunks = [in_order, *([place] for place in coroutines)]
    return [chunk for chunk in chunks if chunk]


def _places(num_workers: int, hosts: Sequence[Endpoint], log_path: Path) -> list[Place]:
    """Return a place for each process; those of the hosts in turn, so that all have something to
    do."""
    places: list[Place] = []
    for _ in range(num_workers):
        if not hosts:
            places.append(LocalPlace(log_path))
        for endpoint in hosts:
            places.append(HostedPlace(endpoint, log_path))
    return places


def _text_of(completion: AnyCompletion) -> str | FilePart:
    """Return the text, or where the reward's process finds it."""
    if isinstance(completion, StoredCompletion):
        return completion.stored_text
    return completion.text


def _token_ids_of(completion: AnyCompletion) -> tuple[int, ...] | FilePart:
    """Return the token ids of the text, or where the reward's process finds them."""
    if isinstance(completion, StoredCompletion):
        return completion.stored_answer_ids
    return tuple(completion.token_ids[completion.answer_start :].tolist())


def weighted_sum(table: np.ndarray, weights: np.ndarray, clip: float = np.inf) -> np.ndarray:
    """Return the weighted sum [G] of components [G, C], within ±clip. NaNs are skipped; NaN where
    all are that weigh something, or all, where none does."""
    known = ~np.isnan(table)
    total = np.clip(np.where(known, table, 0.0) @ weights, -clip, clip)
    says_something = weights != 0
    if not says_something.any():
        says_something = np.ones_like(says_something)
    is_scored = (known & says_something).any(axis=1)
    return np.where(is_scored, total, np.nan)
