"""How old trained tokens will be, and who waits for whom: a simulation of the steps in flight.

`plan` feeds it with predicted seconds, a run with those that it has seen. It is deterministic and
has no clock but its own. What it follows is what `controller/rl_loop.py` and
`controller/sampling_chain.py` do:

- step k + N may be asked for when step k begins to train (N: `batch.max_staleness`);
- a step begins to be sampled when the one before has drawn its prompts, and so many steps before
  it are recorded as may be sampled at once (`RunConfig.steps_sampled_at_once`);
- engines have `slots` sequences; a sample waits for a free one, and then gets a token every
  `token_s` seconds, except while a publish pauses the engines;
- rewards and recording follow the step's last answer; the trainer takes steps in their order;
- with `publish.pause = "wait"` a publish waits for the step in flight, and none begins meanwhile.

A token's version is that of the weights that engines have when it is sampled. With equal lengths
the result has closed forms, which tests hold the simulation against (docs/staleness.md)."""

import heapq
import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

NUM_ANSWERS = 32
"""Samples that stand for those of a step."""
_MAX_STEPS = 120
_CLOSE_ENOUGH = 0.005
_MAX_FITS = 8


@dataclass(frozen=True, slots=True)
class Flow:
    """What decides which steps are in flight together."""

    max_staleness: int
    """Steps that rollouts may run ahead of training."""
    steps_at_once: int
    """Steps that engines may be asked for together."""
    publish_waits: bool
    """Whether a publish waits for requests in flight, instead of coming in between."""
    answers: tuple[float, ...]
    """Tokens of the answers of a step, in the order in which they are asked for."""
    slots: int
    """Of these answers, how many engines generate at once."""

    @property
    def tokens(self) -> float:
        """Tokens of a step."""
        return sum(self.answers)

    @property
    def makespan(self) -> float:
        """Tokens that the busiest slot generates if a step has the engines for itself."""
        slots = [0.0] * min(self.slots, len(self.answers))
        for answer in self.answers:
            heapq.heappush(slots, heapq.heappop(slots) + answer)
        return max(slots)


@dataclass(frozen=True, slots=True)
class FlowSeconds:
    """Durations of a step, in seconds."""

    token_s: float
    """Of a token of one sequence."""
    reward_s: float
    """From a step's last answer until its samples are scored."""
    record_s: float
    """Until they are in the store, and can be trained."""
    train_s: float
    """And until engines pause, where weights come beside decoding."""
    publish_s: float
    """In which engines pause."""
    after_s: float
    """From the end of that until the trainer could take the next step."""
    check_s: float = 0.0
    """In which trainer and engines compare log-probs after a publish."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the simulation found, over the steps that were looked at."""

    mean: float
    """Versions by which tokens are older than the step that trains them, on the mean."""
    max: float
    """The same of the oldest token."""
    sample_mean: float
    """The same of each sample's first token, which is its oldest, on the mean over samples."""
    too_old_fraction: float
    """Share of tokens beyond the bound, which are dropped or masked."""
    step_s: float
    """From one step to the next."""
    generation_s: float
    """Of a step, in which engines have something to do, pauses for publishes among it."""
    trainer_idle: float
    """Share of the time in which the trainer neither trains nor publishes nor compares."""
    engine_idle: float
    """Share of the time in which engines have nothing to do."""


def spread_answers(lengths: Sequence[float], count: int = NUM_ANSWERS) -> tuple[float, ...]:
    """Return `count` lengths that stand for `lengths`, long and short ones mixed, always alike.
    Their mean is that of `lengths`."""
    ordered = sorted(lengths)
    parts = []
    for number in range(count):
        first = number * len(ordered) // count
        last = max((number + 1) * len(ordered) // count, first + 1)
        part = ordered[first:last]
        parts.append(sum(part) / len(part))
    mean = sum(ordered) / len(ordered)
    scale = mean * count / sum(parts)
    stride = round(count * 0.618) | 1  # has no divisor in common with a power of two
    return tuple(scale * parts[number * stride % count] for number in range(count))


def slots_of(num_samples: float, at_once: float, count: int = NUM_ANSWERS) -> int:
    """Return how many of `count` answers, which stand for `num_samples`, run together where
    `at_once` of the samples do."""
    return max(round(count * at_once / num_samples), 1)


def forecast(
    flow: Flow,
    seconds: FlowSeconds | Sequence[FlowSeconds],
    num_steps: int = 0,
    window: int = 0,
) -> Forecast:
    """Return what the last `window` of `num_steps` steps from the start of a run are like; by
    default the second half of as many as a steady state needs. seconds: of all steps, or of one
    after the other, and then again from the first."""
    if isinstance(seconds, FlowSeconds):
        seconds = [seconds]
    if not num_steps:
        num_steps = min(24 + 6 * flow.max_staleness, _MAX_STEPS)
    num_steps = min(num_steps, _MAX_STEPS)
    if not window:
        window = max(num_steps // 2, 1)
    simulation = _Simulation(flow, seconds, num_steps)
    simulation.run()
    return simulation.result(min(window, num_steps))


def fitted(
    flow: Flow,
    seconds: Sequence[FlowSeconds],
    generation_s: Sequence[float],
    window: int = 0,
) -> list[FlowSeconds]:
    """Return the durations with the seconds of a token fitted to a run.

    In proportion to the measured `generation_s` of each step, they are scaled until `forecast`
    finds engines busy for as long, on the mean of `window` steps: what was measured holds pauses,
    and may be of two steps that shared the engines."""
    scale = 1.0
    tried = list(seconds)
    measured = sum(generation_s[-window:])
    for _ in range(_MAX_FITS):
        tried = []
        for of_step, busy_s in zip(seconds, generation_s, strict=True):
            tried.append(replace(of_step, token_s=scale * busy_s / flow.makespan))
        found = forecast(flow, tried, len(tried), window)
        simulated = found.generation_s * min(window or len(tried), len(tried))
        if not measured or math.isclose(simulated, measured, rel_tol=_CLOSE_ENOUGH):
            break
        scale *= min(max(measured / simulated, 0.25), 4.0)
    return tried


def least_bound(flow: Flow, seconds: FlowSeconds | Sequence[FlowSeconds], added_idle: float) -> int:
    """Return how few steps ahead, at least one, cost no more than `added_idle` of the time that
    steps take with `flow.max_staleness` ahead."""
    fastest_s = forecast(flow, seconds).step_s
    for bound in range(1, flow.max_staleness):
        found_s = forecast(replace(flow, max_staleness=bound), seconds).step_s
        if 1 - fastest_s / found_s <= added_idle:
            return bound
    return flow.max_staleness


@dataclass(slots=True)
class _Step:
    """A step on its way through engines and trainer."""

    left: int
    """Answers that have not ended."""
    begins: list[tuple[float, float]] = field(default_factory=list)
    """By answer: when it got its slot, in seconds of the engines, and its tokens."""
    is_scored: bool = False


class _Timer(NamedTuple):
    """Something of a known duration that is under way, in the order in which they end."""

    at: float
    number: int
    """The order among equal times."""
    then: Callable[[], None]
    """What follows."""


@dataclass(slots=True)
class _Ages:
    """Sums over the tokens of some steps, and over the versions by which they are older than the
    step that trains them."""

    bound: int
    """Beyond this tokens are too old."""
    tokens: float = 0.0
    versions: float = 0.0
    too_old: float = 0.0
    oldest: float = 0.0

    def add(self, tokens: float, age: float) -> None:
        """Count tokens that are `age` versions older than the step that trains them."""
        self.tokens += tokens
        self.versions += tokens * age
        self.oldest = max(self.oldest, age)
        if age > self.bound:
            self.too_old += tokens


class _Simulation:
    """Simulates steps on their way through engines and trainer.

    Engines have a clock of their own, which stands still while a publish pauses them."""

    def __init__(self, flow: Flow, seconds: Sequence[FlowSeconds], num_steps: int):
        self._flow = flow
        self._seconds = seconds
        self._num_steps = num_steps
        self._now = 0.0
        self._engine_now = 0.0
        self._is_paused = False
        self._timers: list[_Timer] = []
        self._num_timers = 0
        self._waiting: deque[tuple[int, float]] = deque()
        self._running: list[tuple[float, int]] = []
        self._free = flow.slots
        self._steps: dict[int, _Step] = {}
        self._last_asked = 0
        self._num_recorded = 0
        self._may_begin = True
        self._trainer_waits = True
        self._training = 0  # the step that is trained next, or now
        self._drains = False
        self._came = [0.0]  # by version: when engines got it, in their seconds
        self._ended = [0.0]  # by number of steps: when the trainer was through with them
        self._busy_s = 0.0
        self._busy_at_end = [0.0]  # at the same times
        self._trainer_busy_at_end = [0.0]

    def run(self) -> None:
        """Take all steps."""
        while len(self._ended) <= self._num_steps:
            self._begin_steps()
            self._fill_slots()
            self._take_step()
            if self._publish_if_drained():
                continue
            self._advance()

    def _of(self, step: int) -> FlowSeconds:
        return self._seconds[step % len(self._seconds)]

    # What may go on at the present time

    def _begin_steps(self) -> None:
        while self._may_begin and self._next_may_begin():
            step = len(self._steps)
            answers = self._flow.answers
            self._steps[step] = _Step(left=len(answers))
            self._waiting.extend((step, answer) for answer in answers)

    def _next_may_begin(self) -> bool:
        step = len(self._steps)
        if step > self._last_asked:
            return False
        return step - self._num_recorded < self._flow.steps_at_once

    def _fill_slots(self) -> None:
        while self._waiting and self._free and not self._is_paused:
            step, answer = self._waiting.popleft()
            self._free -= 1
            self._steps[step].begins.append((self._engine_now, answer))
            end = self._engine_now + answer * self._of(step).token_s
            heapq.heappush(self._running, (end, step))

    def _take_step(self) -> None:
        if not self._trainer_waits or self._num_recorded <= self._training:
            return
        self._trainer_waits = False
        self._last_asked = max(self._last_asked, self._training + self._flow.max_staleness)
        self._begin_steps()
        self._fill_slots()
        self._set_timer(self._of(self._training).train_s, self._end_training)

    def _publish_if_drained(self) -> bool:
        """Begin a publish that waited, where no step is being sampled any more."""
        if not self._drains or self._num_recorded < len(self._steps):
            return False
        self._drains = False
        self._publish()
        return True

    def _publish(self) -> None:
        self._is_paused = True
        self._last_asked = max(self._last_asked, self._training)
        self._set_timer(self._of(self._training - 1).publish_s, self._end_publish)

    # What happens next

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        self._num_timers += 1
        heapq.heappush(self._timers, _Timer(self._now + seconds, self._num_timers, then))

    def _advance(self) -> None:
        """Go to the next moment at which something ends."""
        answer_s = math.inf
        if self._running and not self._is_paused:
            answer_s = self._running[0][0] - self._engine_now
        timer_s = math.inf
        if self._timers:
            timer_s = self._timers[0].at - self._now
        passed = max(min(answer_s, timer_s), 0.0)
        self._now += passed
        waits_for_weights = self._is_paused and not self._flow.max_staleness
        if (self._running or self._waiting) and not waits_for_weights:
            self._busy_s += passed
        if not self._is_paused:
            self._engine_now += passed
        if timer_s <= answer_s:
            timer = heapq.heappop(self._timers)
            timer.then()
            return
        end, step = heapq.heappop(self._running)
        self._engine_now = end
        self._free += 1
        self._steps[step].left -= 1
        if not self._steps[step].left:
            self._set_timer(self._of(step).reward_s, partial(self._end_scoring, step))

    def _end_scoring(self, step: int) -> None:
        self._steps[step].is_scored = True
        self._record_next()

    def _end_recording(self) -> None:
        self._num_recorded += 1
        self._record_next()

    def _end_training(self) -> None:
        self._training += 1
        if self._flow.publish_waits and self._flow.max_staleness:
            self._may_begin = False
            self._drains = True
        else:
            self._publish()

    def _end_publish(self) -> None:
        self._is_paused = False
        self._came.append(self._engine_now)
        self._set_timer(self._of(self._training - 1).check_s, self._end_check)

    def _end_check(self) -> None:
        self._may_begin = True
        self._set_timer(self._of(self._training - 1).after_s, self._end_step)

    def _record_next(self) -> None:
        """Steps get into the store in their order."""
        step = self._steps.get(self._num_recorded)
        if step is not None and step.is_scored:
            step.is_scored = False
            number = self._num_recorded
            self._set_timer(self._of(number).record_s, self._end_recording)

    def _end_step(self) -> None:
        self._trainer_waits = True
        self._ended.append(self._now)
        self._busy_at_end.append(self._busy_s)
        took = self._of(self._training - 1)
        busy_s = took.train_s + took.publish_s + took.check_s
        self._trainer_busy_at_end.append(self._trainer_busy_at_end[-1] + busy_s)

    # What it amounts to

    def result(self, window: int) -> Forecast:
        """Over the newest `window` steps."""
        first = self._num_steps - window
        ages = _Ages(bound=self._flow.max_staleness)
        versions_of_samples = 0
        for number in range(first, self._num_steps):
            for begin, answer in self._steps[number].begins:
                for age, share in self._ages(number, begin, answer):
                    ages.add(share * answer, age)
                versions_of_samples += number - self._version_at(begin)
        passed = self._ended[self._num_steps] - self._ended[first]
        engines = self._busy_at_end[self._num_steps] - self._busy_at_end[first]
        trainer = self._trainer_busy_at_end[self._num_steps] - self._trainer_busy_at_end[first]
        return Forecast(
            mean=ages.versions / ages.tokens,
            max=ages.oldest,
            sample_mean=versions_of_samples / (window * len(self._flow.answers)),
            too_old_fraction=ages.too_old / ages.tokens,
            step_s=passed / window,
            generation_s=engines / window,
            trainer_idle=_idle(trainer, passed),
            engine_idle=_idle(engines, passed),
        )

    def _ages(self, step: int, begin: float, answer: float) -> list[tuple[float, float]]:
        """Ages of an answer's tokens, with the share that has each."""
        length_s = answer * self._of(step).token_s
        version = self._version_at(begin)
        found = []
        at = begin
        while version + 1 < len(self._came) and self._came[version + 1] < begin + length_s:
            until = self._came[version + 1]
            found.append((float(step - version), (until - at) / length_s))
            at = until
            version += 1
        share = 1.0
        if length_s:
            share = (begin + length_s - at) / length_s
        found.append((float(step - version), share))
        return found

    def _version_at(self, engine_s: float) -> int:
        """Return the newest version that engines had at a time of their clock."""
        return max(bisect_right(self._came, engine_s) - 1, 0)


def _idle(busy: float, passed: float) -> float:
    if passed <= 0:
        return 0.0
    return min(max(1 - busy / passed, 0.0), 1.0)
