"""Predicted and seen staleness of a run, step by step.

The prediction is that of `plan` (`plan/timing/staleness.py`), fed with what each of the newest
steps took. Seen is of the tokens of the groups that a step trains, predicted of those that are
sampled for it; both in weight versions."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.timing.prediction import asked_at_once, flow_of, num_engines
from grpo_megatron.plan.timing.staleness import (
    Flow,
    FlowSeconds,
    fitted,
    forecast,
    least_bound,
    spread_answers,
)
from grpo_megatron.types import ScoredGroup

_NUM_ANSWERS = 16
_NUM_STEPS = 40
"""Newest steps whose durations are known."""
_PREFIX = "staleness/"


@dataclass(frozen=True, slots=True)
class SampledSeconds:
    """How long a step's sampling took."""

    generation_s: float
    """In which engines were busy, none counted by two steps."""
    reward_s: float
    """From the last answer to the last reward, and a teacher's answers."""
    record_s: float
    answers: tuple[float, ...]
    """Lengths of its answers, as of `spread_answers`; empty where nothing was kept."""


@dataclass(frozen=True, slots=True)
class TrainedSeconds:
    """How long the trainer took for a step."""

    train_s: float
    """And until engines pause, where weights come beside decoding."""
    publish_s: float
    """In which engines pause."""
    check_s: float
    """In which log-probs are compared after a publish."""
    after_s: float
    """From then, after the step before this one, to the begin of this one."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A step that was sampled and trained."""

    sampling: SampledSeconds
    trainer: TrainedSeconds


def answers_of(groups: Sequence[ScoredGroup]) -> tuple[float, ...]:
    """Return a few lengths, in tokens of the policy, that stand for those of all completions."""
    lengths = []
    for group in groups:
        for completion in group.group.completions:
            lengths.append(float(completion.num_policy_tokens))
    if not lengths:
        return ()
    return spread_answers(lengths, _NUM_ANSWERS)


class StalenessWatch:
    """Takes the steps of an attempt in their order. A step that was in the store has no durations,
    and says nothing about the next ones.

    Attributes:
        bound: How many steps rollouts may run ahead now: `batch.max_staleness`, or with
            `batch.adapt_staleness` as much of it as is needed."""

    def __init__(self, config: RunConfig, bound: int = 0):
        """`bound`: where an earlier attempt left it; 0: as the recipe says."""
        self._config = config
        self.bound = config.batch.max_staleness
        if config.batch.adapt_staleness and bound:
            self.bound = min(bound, self.bound)
        self._newest: deque[_Taken] = deque(maxlen=_NUM_STEPS)

    def metrics(
        self,
        sampled: Mapping[str, float],
        sampling: SampledSeconds | None,
        trainer: TrainedSeconds,
    ) -> dict[str, float]:
        """Return seen and predicted staleness, and idle shares; empty where rollouts do not run
        ahead. sampled: metrics of the step, with `staleness/K`."""
        if self._config.batch.max_staleness == 0:
            return {}
        seen = seen_staleness(sampled)
        if sampling is None or not sampling.answers or not trainer.train_s:
            return seen
        self._newest.append(_Taken(sampling, trainer))
        flow, seconds = self._flow()
        found = forecast(flow, seconds, len(seconds), self._config.alarms.window)
        predicted = {
            "staleness/predicted_mean": found.mean,
            "staleness/predicted_max": found.max,
            "idle/predicted_trainer": found.trainer_idle,
            "idle/predicted_engines": found.engine_idle,
        }
        if seen:
            distance = seen["staleness/seen_mean"] - found.mean
            predicted["staleness/unforeseen"] = distance / max(found.mean, 1.0)
        if self._config.batch.adapt_staleness:
            predicted["staleness/bound"] = float(self.bound)
            self._adapt(flow, seconds)
        return seen | predicted

    def _adapt(self, flow: Flow, seconds: Sequence[FlowSeconds]) -> None:
        """Move the bound by one towards what is needed, once a window of steps is known."""
        window = self._config.alarms.window
        if len(self._newest) < window:
            return
        batch = self._config.batch
        widest = replace(flow, max_staleness=batch.max_staleness)
        needed = least_bound(widest, seconds[-window:], batch.added_idle)
        if needed > self.bound:
            self.bound += 1
        elif needed < self.bound:
            self.bound -= 1

    def _flow(self) -> tuple[Flow, list[FlowSeconds]]:
        """Return the flow of the newest steps, with the present bound, and the seconds of each."""
        config = self._config
        newest = list(self._newest)
        answers = newest[-1].sampling.answers
        flow = flow_of(config, answers, asked_at_once(config) * num_engines(config))
        flow = replace(flow, max_staleness=self.bound)
        seconds = []
        for taken, following in zip(newest, [*newest[1:], newest[-1]], strict=True):
            seconds.append(_flow_seconds(taken, following))
        generation_s = [taken.sampling.generation_s for taken in newest]
        return flow, fitted(flow, seconds, generation_s, config.alarms.window)


def _flow_seconds(taken: _Taken, following: _Taken) -> FlowSeconds:
    """Return the seconds of a step without those of a token; what comes after it is known from the
    `following` one."""
    sampling = taken.sampling
    trainer = taken.trainer
    return FlowSeconds(
        token_s=0.0,
        reward_s=max(sampling.reward_s, 0.0),
        record_s=sampling.record_s,
        train_s=trainer.train_s,
        publish_s=trainer.publish_s,
        check_s=trainer.check_s,
        after_s=following.trainer.after_s,
    )


def seen_staleness(sampled: Mapping[str, float]) -> dict[str, float]:
    """Return mean and maximum of what `staleness/K` are shares of; empty without them."""
    shares = {}
    for name, share in sampled.items():
        age = name.removeprefix(_PREFIX)
        if name.startswith(_PREFIX) and age.removeprefix("-").isdigit():
            shares[int(age)] = share
    if not shares:
        return {}
    mean = sum(age * share for age, share in shares.items())
    return {"staleness/seen_mean": float(mean), "staleness/seen_max": float(max(shares))}
