"""Prompts of one domain drawn by their success rate, without a random number generator.

Weights w: docs/sampling.md. Draws without replacement take the smallest -ln(u) / w (Efraimidis
and Spirakis, 2006), where u is a hash of (seed, domain, prompts drawn so far, prompt id)."""

import base64
import hashlib
import zlib
from collections.abc import Collection, Iterable

import numpy as np

from grpo_megatron.config.run import CurriculumConfig

# Mastered: p at least this on so many visits in a row, until it falls below the last.
MASTERED_AT = 0.95
MASTERED_VISITS = 3
DEMOTED_BELOW = 0.8


class Curriculum:
    """Success of every prompt of a domain, and draws that follow it and `key` (seed, domain)."""

    def __init__(self, prompt_ids: Iterable[str], key: str, settings: CurriculumConfig):
        self._ids = sorted(prompt_ids)
        self._key = key
        self._settings = settings
        self._index = dict(zip(self._ids, range(len(self._ids)), strict=True))
        self._hashes = np.array([_hash64(prompt_id) for prompt_id in self._ids], np.uint64)
        self._success = np.full(len(self._ids), np.nan)  # p; NaN: unseen
        # visits in a row with p >= MASTERED_AT; at MASTERED_VISITS it stays until demotion
        self._streak = np.zeros(len(self._ids))

    def draw(self, count: int, exclude: Collection[str], num_drawn: int) -> list[str]:
        """`count` distinct prompts that are not in `exclude`; fewer where there are no more.
        `num_drawn` prompts were drawn before: no two draws share that number."""
        lottery = _mix(self._hashes ^ np.uint64(_hash64(f"{self._key}\0{num_drawn}")))
        uniform = ((lottery >> np.uint64(11)).astype(float) + 0.5) * 2.0**-53
        p = np.where(np.isnan(self._success), 0.5, self._success)
        order = np.argsort(-np.log(uniform) / (p * (1 - p) + self._settings.floor), kind="stable")
        order = order[~np.isin(order, [self._index[prompt_id] for prompt_id in exclude])]
        is_mastered = self._streak[order] == MASTERED_VISITS
        mastered = order[is_mastered]
        others = order[~is_mastered]
        # whole prompts only: the fraction is carried in the number drawn so far
        share = self._settings.replay_share
        due = int(share * (num_drawn + count)) - int(share * num_drawn)
        num_others = min(count - min(due, len(mastered)), len(others))
        chosen = np.concatenate([mastered[: count - num_others], others[:num_others]])
        # mastered and likely ones come first so far: spread them over the optimizer steps
        chosen = chosen[np.argsort(_mix(lottery[chosen]), kind="stable")]
        return [self._ids[index] for index in chosen]

    def observe(self, prompt_id: str, success: float) -> None:
        """Take in how many of a prompt's samples, as a fraction, were correct."""
        index = self._index[prompt_id]
        before = self._success[index]
        streak = self._streak[index]
        p = success
        if not np.isnan(before):
            p = before + self._settings.rate * (success - before)
        self._success[index] = p
        least = MASTERED_AT
        if streak == MASTERED_VISITS:
            least = DEMOTED_BELOW
        if p >= least:
            self._streak[index] = min(streak + 1, MASTERED_VISITS)
        else:
            self._streak[index] = 0

    def buckets(self) -> dict[str, int]:
        """Return the number of prompts by bucket, for metrics: frozen is p < 0.05, hard p <
        0.25."""
        p = self._success
        bucket = np.select(
            [self._streak == MASTERED_VISITS, np.isnan(p), p < 0.05, p < 0.25],
            ["mastered", "unseen", "frozen", "hard"],
            "frontier",
        )
        counts = {}
        for name in ("unseen", "frozen", "hard", "frontier", "mastered"):
            counts[name] = int((bucket == name).sum())
        return counts

    def state_dict(self) -> str:
        """Success and streaks, compressed: 16 bytes a prompt before that, and mostly alike."""
        rows = np.stack([self._success, self._streak]).astype("<f8")
        return base64.b64encode(zlib.compress(rows.tobytes())).decode()

    def load_state_dict(self, state: str) -> None:
        """Continue from what `state_dict` returned for the same prompts."""
        rows = np.frombuffer(zlib.decompress(base64.b64decode(state)), "<f8")
        self._success, self._streak = rows.astype(float).reshape(2, -1)


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _mix(bits: np.ndarray) -> np.ndarray:
    """Return the finalizer of SplitMix64: every bit of the result depends on every bit of
    `bits`."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    mixed: np.ndarray = bits ^ (bits >> np.uint64(31))
    return mixed
