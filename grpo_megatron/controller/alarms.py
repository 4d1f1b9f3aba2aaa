"""Alarms over the metrics of a run: which are on, and what the user reads."""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.signal import carries_signal
from grpo_megatron.algorithms.batch import Events, SampleBatch
from grpo_megatron.config.alarms import AlarmsConfig
from grpo_megatron.config.objective import ObjectiveConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError
from grpo_megatron.telemetry.metrics import read_metrics

WINDOW_STEPS = 5
NUM_WINDOWS = 3
"""Of lazy displacement, as its paper has them."""
_FAILED_EPISODES = ("/spoilt", "/lost", "/begun_otherwise")
"""Ends of the names of counts by domain."""
_MIN_EXPLODED_ENTROPY = 1.0
"""Nats a token. A policy that was nearly certain may become several times less so."""


class MovingMean:
    """A metric averaged over windows of `size` steps.

    Attributes:
        first: Mean of the first window; None until it is full.
        newest: Mean of the newest `size` steps; None until there are as many.
        before: Mean of the `size` steps before these; None until there are as many."""

    def __init__(self, size: int):
        self.first: float | None = None
        self.newest: float | None = None
        self.before: float | None = None
        self._size = size
        self._values: deque[float] = deque(maxlen=2 * size)

    def add(self, value: float) -> None:
        """Take in the metric of one more step."""
        self._values.append(value)
        values = list(self._values)
        if len(values) >= self._size:
            self.newest = float(np.mean(values[-self._size :]))
        if len(values) == 2 * self._size:
            self.before = float(np.mean(values[: self._size]))
        if self.first is None:
            self.first = self.newest


Check = Callable[[AlarmsConfig, MovingMean], str]
"""The text of an alarm that is on, "" of one that is off. The newest window is full."""


@dataclass(frozen=True, slots=True)
class WatchedMetric:
    """An alarm that looks at the moving mean of one metric."""

    alarm: str
    metric: str
    check: Check


def _failed_episodes(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return the counts of episodes that could not be scored, of a step that has any."""
    found = {}
    for name, count in metrics.items():
        is_count = name.startswith("environment/") and name.endswith(_FAILED_EPISODES)
        if is_count and count:
            found[name] = count
    return found


def entropy_collapse(limits: AlarmsConfig, entropy: MovingMean) -> str:
    """Say that all samples of a prompt become the same."""
    assert entropy.newest is not None
    if entropy.newest >= limits.min_entropy:
        return ""
    return (
        f"entropy collapsed: {entropy.newest:.2g} nats a token over {limits.window} steps "
        f"(alarms.min_entropy = {limits.min_entropy:g}); raise objective.clip_high, "
        "objective.entropy_weight or objective.kl_beta, or end the run if the task is solved"
    )


def entropy_explosion(limits: AlarmsConfig, entropy: MovingMean) -> str:
    """Say that the policy falls apart into noise."""
    assert entropy.newest is not None and entropy.first is not None
    limit = max(limits.entropy_growth * entropy.first, _MIN_EXPLODED_ENTROPY)
    if entropy.newest <= limit:
        return ""
    return (
        f"entropy explodes: {entropy.newest:.2g} nats a token over {limits.window} steps, "
        f"{entropy.first:.2g} at first (alarms.entropy_growth = {limits.entropy_growth:g}); lower "
        "optimizer.lr, objective.entropy_weight or objective.clip_high"
    )


def far_from_reference(limits: AlarmsConfig, kl: MovingMean) -> str:
    """Say that the policy has left its reference, whose abilities it may lose."""
    assert kl.newest is not None
    if kl.newest <= limits.reference_kl:
        return ""
    return (
        f"KL to the reference is {kl.newest:.2g} nats a token over {limits.window} steps "
        f"(alarms.reference_kl = {limits.reference_kl:g}); raise objective.kl_beta, lower "
        "optimizer.lr, or set objective.reference_interval"
    )


def length_growth(limits: AlarmsConfig, length: MovingMean) -> str:
    """Say that responses get longer within a few steps."""
    assert length.newest is not None
    if length.before is None or length.newest <= limits.length_growth * length.before:
        return ""
    return (
        f"responses grew from {length.before:.0f} to {length.newest:.0f} tokens within "
        f"{2 * limits.window} steps (alarms.length_growth = {limits.length_growth:g}); see "
        'objective.aggregation = "constant" (Dr. GRPO), objective.overlong and the reward '
        "soft_overlong"
    )


def no_signal(limits: AlarmsConfig, share: MovingMean) -> str:
    """Say that nearly all groups teach nothing."""
    assert share.newest is not None
    if share.newest <= limits.no_signal_fraction:
        return ""
    return (
        f"{share.newest:.0%} of the groups sampled in {limits.window} steps have equal rewards and "
        f"teach nothing (alarms.no_signal_fraction = {limits.no_signal_fraction:g}); see "
        "sampling.dynamic, [curriculum], a larger batch.num_samples_per_prompt, or prompts of "
        "another difficulty"
    )


def too_much_clipped(limits: AlarmsConfig, share: MovingMean) -> str:
    """Say that the policy moves further than its clip allows."""
    assert share.newest is not None
    if share.newest <= limits.clip_fraction:
        return ""
    return (
        f"{share.newest:.0%} of the tokens are outside of the clip range over {limits.window} "
        f"steps (alarms.clip_fraction = {limits.clip_fraction:g}); lower optimizer.lr, "
        "batch.updates_per_rollout or batch.max_staleness, or widen objective.clip_low and "
        "clip_high"
    )


def unforeseen_staleness(limits: AlarmsConfig, distance: MovingMean) -> str:
    """Say that tokens are older, or younger, than the seen durations explain."""
    assert distance.newest is not None
    if abs(distance.newest) <= limits.staleness_distance:
        return ""
    direction = "younger"
    remedy = "see idle/* for who waits"
    if distance.newest > 0:
        direction = "older"
        remedy = "look for steps that take much longer than the mean; lower batch.max_staleness"
    return (
        f"trained tokens are {direction} than the seen durations of steps would make them, by "
        f"{abs(distance.newest):.0%} of the predicted staleness over {limits.window} steps "
        f"(alarms.staleness_distance = {limits.staleness_distance:g}): an engine stalls or was "
        f"restarted, or lengths vary (response/length_max); {remedy}"
    )


_OF_RL = (
    WatchedMetric("entropy_collapse", "policy/entropy", entropy_collapse),
    WatchedMetric("entropy_explosion", "policy/entropy", entropy_explosion),
    WatchedMetric("reference_kl", "reference/k3", far_from_reference),
    WatchedMetric("length_growth", "response/length_mean", length_growth),
    WatchedMetric("clip_fraction", "clip/region_fraction", too_much_clipped),
    WatchedMetric("unforeseen_staleness", "staleness/unforeseen", unforeseen_staleness),
)
_NO_SIGNAL = WatchedMetric("no_signal", "group/all_equal_fraction", no_signal)


class Alarms:
    """The alarms of one run, which see the metrics of its steps in order.

    `load_limit` is `routing.load_alarm`. `on` are the names of the alarms that were on in the
    newest step that measured their metric."""

    def __init__(
        self, limits: AlarmsConfig, watched: Sequence[WatchedMetric], *, load_limit: float
    ):
        self.on: frozenset[str] = frozenset()
        self._limits = limits
        self._watched = watched
        self._means = {rule.metric: MovingMean(limits.window) for rule in watched}
        self._load_limit = load_limit
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS * NUM_WINDOWS)

    def __call__(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Take a step's metrics; text by alarm, "" of those that are off. A metric that is missing
        or not finite (None in a line of metrics.jsonl) says nothing of its alarms."""
        texts: dict[str, str] = {}
        gain = _finite(metrics, "step/logprob_gain_positive")
        norm = _finite(metrics, "grad/norm")
        if gain is not None and norm is not None:
            texts["lazy_displacement"] = self._lazy_displacement(gain, norm)
        load = _finite(metrics, "routing/load_max_ratio")
        if load is not None:
            texts["expert_load"] = self._expert_load(load)
        unscorable = _finite(metrics, "reward/unscorable_fraction")
        if unscorable is not None:
            texts["unscorable"] = self._unscorable(unscorable, metrics)
        texts |= self._moving_means(metrics)
        still_on = self.on - texts.keys()
        self.on = still_on.union(alarm for alarm, text in texts.items() if text)
        return texts

    def _moving_means(self, metrics: Mapping[str, float | None]) -> dict[str, str]:
        """Return texts of the alarms whose metric the step has."""
        measured = set()
        for metric, mean in self._means.items():
            value = _finite(metrics, metric)
            if value is not None:
                mean.add(value)
                measured.add(metric)
        texts = {}
        for rule in self._watched:
            if rule.metric not in measured:
                continue
            mean = self._means[rule.metric]
            texts[rule.alarm] = ""
            if mean.newest is not None:
                texts[rule.alarm] = rule.check(self._limits, mean)
        return texts

    def _expert_load(self, load: float) -> str:
        """Say that an expert has too much load. load: that of the busiest one, as a multiple of its
        layer's mean."""
        if load <= self._load_limit:
            return ""
        return (
            f"an expert has {load:.1f} times its layer's mean load (routing.load_alarm = "
            f"{self._load_limit:g}); see routing.balance_weight"
        )

    def _unscorable(self, share: float, metrics: Mapping[str, float | None]) -> str:
        """Say that rewards, or environments, fail. share: of the step's samples that have no
        reward."""
        if share <= self._limits.unscorable_fraction:
            return ""
        told = (
            f"{share:.0%} of the step's samples could not be scored and train nothing "
            f"(alarms.unscorable_fraction = {self._limits.unscorable_fraction:g}); "
        )
        failed = _failed_episodes(metrics)
        if failed:
            counted = ", ".join(f"{name} = {count:.0f}" for name, count in failed.items())
            return f"{told}{counted}; logs/latest/worker-*.log has why"
        return (
            f"{told}reward/*/raised, timed_out and died of metrics.jsonl count why, and "
            "controller.log has what was raised; raise data.reward_timeout_s for what takes too "
            "long"
        )

    def _lazy_displacement(self, gain: float, norm: float) -> str:
        """Say that right answers lose (arXiv:2512.04220): in three consecutive windows of five
        steps the mean `gain`, `step/logprob_gain_positive`, is negative, and the mean `norm`,
        `grad/norm`, rises."""
        self._steps.append((gain, norm))
        if len(self._steps) < WINDOW_STEPS * NUM_WINDOWS:
            return ""
        by_window = np.array(self._steps).reshape(NUM_WINDOWS, WINDOW_STEPS, 2).mean(axis=1)
        gains = by_window[:, 0]
        norms = by_window[:, 1]
        right_answers_lose = (gains < 0).all()
        never_falls = (np.diff(norms) >= 0).all()
        gradient_grows = never_falls and norms[0] < norms[-1]
        if not (right_answers_lose and gradient_grows):
            return ""
        return (
            "right answers become less likely while the gradient grows "
            "(lazy likelihood displacement); see objective.llds_weight"
        )


def alarms_of(config: RunConfig, metrics: Path) -> Alarms:
    """Return the alarms of a run after the steps whose lines `metrics`, its metrics.jsonl, has: a
    resumed run has the same first window."""
    alarms = Alarms(config.alarms, watched_metrics(config), load_limit=config.routing.load_alarm)
    if metrics.exists():
        for step in read_metrics(metrics):
            alarms(step)
    return alarms


def watched_metrics(config: RunConfig) -> list[WatchedMetric]:
    """Return what a run of this kind and objective is watched for."""
    if config.kind != "rl":
        return []
    watched = list(_OF_RL)
    if _equal_rewards_teach_nothing(config.objective):
        watched.append(_NO_SIGNAL)
    return watched


def _equal_rewards_teach_nothing(o: ObjectiveConfig) -> bool:
    """Whether a group of equal rewards has no advantages but 0, though its samples differ in
    length, components and rewards of steps."""
    size = 3
    different = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    group = SampleBatch(
        rewards=torch.ones(size, dtype=torch.float64),
        group_ids=torch.zeros(size, dtype=torch.int64),
        token_counts=torch.arange(1, size + 1),
        sample_ids=torch.arange(size),
        domains=torch.zeros(size, dtype=torch.int64),
        trained=torch.ones(size, dtype=torch.bool),
        components={"first": different, "second": different**2},
        component_weights={"first": torch.ones(size), "second": torch.ones(size)},
        correct=torch.ones(size, dtype=torch.bool),
        events=Events(
            sample=torch.arange(size),
            end=torch.zeros(size, dtype=torch.int64),
            reward=different,
        ),
    )
    try:
        return not carries_signal(o, group)
    except DataError:  # it needs the turns of a conversation
        return False


def _finite(metrics: Mapping[str, float | None], name: str) -> float | None:
    value = metrics.get(name)
    if value is None or not math.isfinite(value):
        return None
    return value
