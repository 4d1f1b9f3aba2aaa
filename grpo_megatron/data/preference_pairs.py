"""Which two samples of a graded group become a pair."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from grpo_megatron.config.run import PairChoice


class ChosenPair(NamedTuple):
    """Places in a group, and by how much the first one's reward is higher."""

    chosen: int
    rejected: int
    margin: float


def pair_of(
    rewards: np.ndarray, correct: np.ndarray, is_usable: Sequence[bool], how: PairChoice
) -> ChosenPair | None:
    """Return the pair of a group, the first of equal ones; None where it has none.

    best_worst: the highest and the lowest reward, if they differ. correct_incorrect: the correct
    sample with the highest reward and the incorrect one with the lowest. rewards: float64 [G], NaN:
    unscorable; correct: float64 [G], 1, 0 or NaN; is_usable: whether a sample may be in a pair."""
    usable = np.asarray(is_usable) & ~np.isnan(rewards)
    may_be_chosen = usable
    may_be_rejected = usable
    if how == "correct_incorrect":
        may_be_chosen = usable & (correct == 1)
        may_be_rejected = usable & (correct == 0)
    if not may_be_chosen.any() or not may_be_rejected.any():
        return None
    chosen = int(np.where(may_be_chosen, rewards, -np.inf).argmax())
    rejected = int(np.where(may_be_rejected, rewards, np.inf).argmin())
    margin = float(rewards[chosen] - rewards[rejected])
    if chosen == rejected or (how == "best_worst" and margin <= 0):
        return None
    return ChosenPair(chosen, rejected, margin)
