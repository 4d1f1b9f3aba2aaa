"""Alarms over the metrics of a run: which are on, and what the user is told."""

from collections import deque
from collections.abc import Mapping

import numpy as np

WINDOW_STEPS = 5
NUM_WINDOWS = 3


class Alarms:
    """Of one run. `load_limit` is `routing.load_alarm`."""

    def __init__(self, load_limit: float):
        self._load_limit = load_limit
        self._steps: deque[tuple[float, float]] = deque(maxlen=WINDOW_STEPS * NUM_WINDOWS)

    def __call__(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """Take a step's metrics; text by alarm, "" of those that are off."""
        texts = {"lazy_displacement": ""}
        if self._lazy_displacement(metrics):
            texts["lazy_displacement"] = (
                "right answers become less likely while the gradient grows "
                "(lazy likelihood displacement); see objective.llds_weight"
            )
        load = metrics.get("routing/load_max_ratio")
        if load is not None:
            texts["expert_load"] = self._expert_load(load)
        return texts

    def _expert_load(self, load: float) -> str:
        """Of the busiest expert, as a multiple of its layer's mean."""
        if load <= self._load_limit:
            return ""
        return (
            f"an expert has {load:.1f} times its layer's mean load (routing.load_alarm = "
            f"{self._load_limit:g}); see routing.balance_weight"
        )

    def _lazy_displacement(self, metrics: Mapping[str, float]) -> bool:
        """arXiv:2512.04220: in three consecutive windows of five steps
        `step/logprob_gain_positive` has a negative mean, and the mean `grad/norm` rises."""
        gain = metrics.get("step/logprob_gain_positive")
        norm = metrics.get("grad/norm")
        if gain is None or norm is None or np.isnan(gain):
            return False
        self._steps.append((gain, norm))
        if len(self._steps) < WINDOW_STEPS * NUM_WINDOWS:
            return False
        by_window = np.array(self._steps).reshape(NUM_WINDOWS, WINDOW_STEPS, 2).mean(axis=1)
        gains = by_window[:, 0]
        norms = by_window[:, 1]
        right_answers_lose = (gains < 0).all()
        never_falls = (np.diff(norms) >= 0).all()
        gradient_grows = never_falls and norms[0] < norms[-1]
        return bool(right_answers_lose and gradient_grows)
