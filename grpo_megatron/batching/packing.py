"""Which samples share a micro-batch, and which data-parallel rank trains it.

Every rank computes the same plan from the lengths alone, so a recorded step can be trained at
any layout. Costs, not lengths, are balanced: attention is quadratic in a sample's length."""

import heapq

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
    order = np.argsort(-lengths, kind="stable")
    step = num_ranks * multiple_of
    # fewer do not hold all tokens, and none holds two samples of more than half of it
    least = max(-(-int(lengths.sum()) // max_tokens), int((2 * lengths > max_tokens).sum()), 1)
    num_bins = -(-least // step) * step
    costs = sample_costs(lengths)
    while (bins := _level(lengths, costs, order, num_bins, max_tokens)) is None:
        num_bins += step * max(num_bins // (32 * step), 1)
    return _deal([(float(costs[rows].sum()), rows) for rows in bins], num_ranks)


def _level(
    lengths: np.ndarray, costs: np.ndarray, order: np.ndarray, num_bins: int, capacity: int
) -> list[np.ndarray] | None:
    """Longest first into the cheapest bin with room; None when some sample finds no room."""
    heap = [(0.0, b) for b in range(num_bins)]
    used = [0] * num_bins
    rows: list[list[int]] = [[] for _ in range(num_bins)]
    for row in order.tolist():
        full = []
        while heap and used[heap[0][1]] + lengths[row] > capacity:
            full.append(heapq.heappop(heap))
        if not heap:
            return None
        cost, b = heapq.heappop(heap)
        used[b] += int(lengths[row])
        rows[b].append(row)
        for entry in (*full, (cost + costs[row], b)):
            heapq.heappush(heap, entry)
    return [np.sort(np.array(r, np.int64)) for r in rows]


def _deal(bins: list[tuple[float, np.ndarray]], num_ranks: int) -> list[list[np.ndarray]]:
    """Bins (cost, rows) to ranks, equally many each: the most expensive to the least loaded."""
    ranks: list[list[np.ndarray]] = [[] for _ in range(num_ranks)]
    load = [0.0] * num_ranks
    for cost, rows in sorted(bins, key=lambda found: -found[0]):
        open_ranks = (r for r in range(num_ranks) if len(ranks[r]) < len(bins) // num_ranks)
        rank = min(open_ranks, key=load.__getitem__)
        ranks[rank].append(rows)
        load[rank] += cost
    return ranks
