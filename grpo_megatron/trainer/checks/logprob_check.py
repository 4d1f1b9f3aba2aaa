"""Whether engines compute what the trainer computes: log-probs of the same tokens.

An engine may hold the right bytes and still compute with something else (prepacked copies, stale
caches). Rare tokens may be far apart: rounding moves one that is between two experts to the other,
so a token counts for at most four times the tolerance.

A model whose next tokens are all about equally likely has log-probs that differ little from token
to token, and another model's are within the tolerance of them. So differences are also compared
with that: two models that have nothing in common are further apart than one is from its own mean.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device

_UNRELATED = 0.5
"""Mean squared difference, as a share of the variance of log-probs over tokens, from which an
engine computes another model; of two that are independent it is 1 or more, of rounding far less."""
_MIN_DIFFERENCE = 0.01
"""Mean difference below which that is not asked: log-probs may all be nearly equal."""
_MIN_TOKENS = 16

REMEDY = "the engine has other weights than it was sent, or another precision"


def compare(
    config: RunConfig,
    table: SampleTable,
    rows: np.ndarray,
    logprobs: torch.Tensor,
    logprob_diff: torch.Tensor,
) -> Stats:
    """Measure how far trainer and engines are apart, also by engine (for `disagreement`).

    rows: int64, those of a micro-batch in the table; logprobs: [n], the trainer's log-probs of
    their policy tokens; logprob_diff: [n], the same less the engine's."""
    stats = Stats()
    diff = logprob_diff.detach().abs().double()
    engine_of_row, _ = _engines_of(table)
    of_tokens = np.repeat(engine_of_row[rows], table.policy_lengths[rows])
    engines = to_device(torch.from_numpy(of_tokens), diff.device)
    own = logprobs.detach().double()
    measured = {
        "bounded": diff.clamp(max=4 * config.canary_tolerance),
        "squared": diff.square(),
        "logprob": own,
        "logprob_squared": own.square(),
    }
    for engine, num_tokens in zip(*np.unique(of_tokens, return_counts=True), strict=True):
        for name, values in measured.items():
            total = torch.where(engines == engine, values, 0.0).sum()
            stats.set_mean(_name(name, engine), total, float(num_tokens))
    stats.set_mean("canary/abs_mean", diff.sum(), len(diff))
    stats.set_maximum("canary/abs_max", diff)
    return stats


def _engines_of(table: SampleTable) -> tuple[np.ndarray, list[str]]:
    """Return who answered each row of a table, int64 [N], as a place in the names of the engines,
    which come second."""
    of_groups = table.manifest.engines
    if not of_groups:
        return np.zeros(len(table.group), np.int64), ["the engine"]
    names = sorted(set(of_groups))
    places = np.array([names.index(name) for name in of_groups])
    return places[table.group], names


def _name(measure: str, engine: int) -> str:
    return f"canary/{measure}_of_{engine}"


@dataclass(frozen=True)
class _OfEngine:
    """What was measured of the tokens of one engine."""

    num_tokens: int
    bounded: float
    """Mean difference, each token's bounded."""
    squared: float
    """Mean squared difference."""
    variance: float
    """Of the trainer's log-probs over tokens."""

    def problem(self, tolerance: float) -> str:
        """Say why these are not log-probs of one model; empty: they may be."""
        if not self.bounded <= tolerance:  # NaN is not
            return (
                f"by {self.bounded:.3g} on average where {tolerance:.3g} is allowed and no token "
                f"counts for more than {4 * tolerance:.3g}"
            )
        is_asked = self.bounded > _MIN_DIFFERENCE and self.num_tokens >= _MIN_TOKENS
        if is_asked and self.squared > _UNRELATED * self.variance:
            return (
                f"by {math.sqrt(self.squared):.3g} (root mean square), where log-probs differ by "
                f"{math.sqrt(self.variance):.3g} from token to token: as models that have nothing "
                "in common"
            )
        return ""


def disagreement(config: RunConfig, table: SampleTable, stats: Stats) -> str:
    """Name the engines that are too far apart from the trainer; empty: none is.

    Takes measures by engine out of `stats`."""
    problems = []
    _, names = _engines_of(table)
    for number, engine in enumerate(names):
        found = _take(stats, number)
        if found is None:  # it sampled nothing
            continue
        problem = found.problem(config.canary_tolerance)
        if not problem:
            continue
        largest = float(stats.maxima["canary/abs_max"])
        problems.append(
            f"{engine} and the trainer disagree about log-probs of {found.num_tokens} tokens, "
            f"{problem}; the largest difference of any engine is {largest:.3g}"
        )
    return "; ".join(problems)


def _take(stats: Stats, engine: int) -> _OfEngine | None:
    """Take the measures of an engine out of `stats`; None: there are none."""
    means = {}
    num_tokens = 0
    for measure in ("bounded", "squared", "logprob", "logprob_squared"):
        name = _name(measure, engine)
        sums = stats.means.pop(name, None)
        stats.units.pop(name, None)
        if sums is None:
            return None
        total, count = sums.tolist()
        num_tokens = int(count)
        means[measure] = total / count
    return _OfEngine(
        num_tokens,
        means["bounded"],
        means["squared"],
        max(means["logprob_squared"] - means["logprob"] ** 2, 0.0),
    )
