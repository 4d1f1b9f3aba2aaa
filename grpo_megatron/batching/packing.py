"""Which samples share a micro-batch, and which data-parallel rank trains it.

Every rank computes the same plan from the lengths alone, so a recorded step can be trained at
any layout. Costs, not lengths, are balanced: attention is quadratic in a sample's length."""

import heapq
import math

import numpy as np

from grpo_megatron.errors import DataError


def sample_costs(lengths: np.ndarray, quadratic: float = 1 / 4096) -> np.ndarray:
    """Relative training time of samples: `length + quadratic * length**2`."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + quadratic * lengths**2


def plan_microbatches(
    lengths: np.ndarray, *, num_ranks: int, max_tokens: int, multiple_of: int = 1
) -> list[list[np.ndarray]]:
    """The longest first into the cheapest bin of `max_tokens` with room, as few bins as that takes.

    lengths: prompt plus completion tokens per sample, int [N]; num_ranks: data-parallel size.
    Returns, by rank, then micro-batch: sample rows, int64. All ranks have equally many
    micro-batches, a multiple of `multiple_of` (interleaved pipelines)."""
    lengths = np.asarray(lengths, np.int64)
    if len(lengths) and lengths.max() > max_tokens:
        raise DataError(
            f"sample {lengths.argmax()} has {lengths.max()} tokens, a micro-batch "
            f"holds {max_tokens}",
            where="trainer.max_tokens_per_microbatch",
            remedy="raise it to at least rollout.max_model_len",
        )
    longest_first = np.argsort(-lengths, kind="stable")
    costs = sample_costs(lengths)
    step = num_ranks * multiple_of
    # fewer do not hold all tokens, and none holds two samples of more than half of it
    for_all_tokens = math.ceil(int(lengths.sum()) / max_tokens)
    for_long_samples = int((2 * lengths > max_tokens).sum())
    fewest = max(for_all_tokens, for_long_samples, 1)
    num_bins = math.ceil(fewest / step) * step
    bins = _level(lengths, costs, longest_first, num_bins, max_tokens)
    while bins is None:
        num_bins += step * max(num_bins // (32 * step), 1)
        bins = _level(lengths, costs, longest_first, num_bins, max_tokens)
    return _deal(bins, costs, num_ranks)


def _level(
    lengths: np.ndarray, costs: np.ndarray, order: np.ndarray, num_bins: int, capacity: int
) -> list[np.ndarray] | None:
    """Samples in `order` into the cheapest bin with room; None when some sample finds no room.

    Returns sample rows by bin, int64, ascending."""
    cheapest_first = [(0.0, number) for number in range(num_bins)]  # a heap: cost, bin
    used = [0] * num_bins
    rows: list[list[int]] = [[] for _ in range(num_bins)]
    for row in order.tolist():
        without_room = []
        while cheapest_first and used[cheapest_first[0][1]] + lengths[row] > capacity:
            without_room.append(heapq.heappop(cheapest_first))
        if not cheapest_first:
            return None
        cost, number = heapq.heappop(cheapest_first)
        used[number] += int(lengths[row])
        rows[number].append(row)
        heapq.heappush(cheapest_first, (cost + costs[row], number))
        for entry in without_room:
            heapq.heappush(cheapest_first, entry)
    return [np.sort(np.array(of_bin, np.int64)) for of_bin in rows]


def _deal(bins: list[np.ndarray], costs: np.ndarray, num_ranks: int) -> list[list[np.ndarray]]:
    """Bins to ranks, equally many each: the most expensive to the least loaded rank with room."""
    bin_costs = np.array([float(costs[rows].sum()) for rows in bins])
    ranks: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    load = np.zeros(num_ranks)
    for number in np.argsort(-bin_costs, kind="stable"):
        has_room = np.array([len(of_rank) < len(bins) // num_ranks for of_rank in ranks])
        rank = int(np.where(has_room, load, np.inf).argmin())
        ranks[rank].append(bins[number])
        load[rank] += bin_costs[number]
    return ranks
