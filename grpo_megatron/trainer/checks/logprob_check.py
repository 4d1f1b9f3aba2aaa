"""Whether engines compute what the trainer computes: log-probs of the same tokens.

An engine may hold the right bytes and still compute with something else (prepacked copies, stale
caches). Rare tokens may be far apart: rounding moves one that is between two experts to the other,
so a token counts for at most four times the tolerance."""

import numpy as np
import torch

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device

REMEDY = "the engine has other weights than it was sent, or another precision"


def compare(
    config: RunConfig, table: SampleTable, rows: np.ndarray, logprob_diff: torch.Tensor
) -> Stats:
    """Measure how far trainer and engines are apart, also by engine (for `disagreement`).

    rows: int64, those of a micro-batch in the table; logprob_diff: [n], the trainer's log-probs of
    their policy tokens less the engine's."""
    stats = Stats()
    diff = logprob_diff.detach().abs().double()
    of_tokens = np.repeat(table.shard[rows], table.policy_lengths[rows])
    engines = to_device(torch.from_numpy(of_tokens), diff.device)
    bounded = diff.clamp(max=4 * config.canary_tolerance)
    for engine, num_tokens in zip(*np.unique(of_tokens, return_counts=True), strict=True):
        total = torch.where(engines == engine, bounded, 0.0).sum()
        stats.mean(f"canary/of_{engine}", total, float(num_tokens))
    stats.mean("canary/abs_mean", diff.sum(), len(diff))
    stats.maximum("canary/abs_max", diff)
    return stats


def disagreement(config: RunConfig, table: SampleTable, stats: Stats) -> str:
    """Name the engines that are too far apart from the trainer; empty: none is.

    Takes measures by engine out of `stats`."""
    found = stats.result()
    tolerance = config.canary_tolerance
    problems = []
    for number, shard in enumerate(table.manifest.shards):
        name = f"canary/of_{number}"
        mean = found.get(name, 0.0)
        total = stats.means.pop(name, None)
        stats.units.pop(name, None)
        if mean <= tolerance:
            continue
        engine = shard.name.partition(".")[0]
        assert total is not None  # found has it
        num_tokens = int(total[1])
        largest = float(stats.maxima["canary/abs_max"])
        problems.append(
            f"{engine} and the trainer disagree about log-probs of {num_tokens} tokens, by "
            f"{mean:.3g} on average where {tolerance:.3g} is allowed and no token counts for more "
            f"than {4 * tolerance:.3g}; the largest difference of any engine is {largest:.3g}"
        )
    return "; ".join(problems)
