"""Which samples share a micro-batch, and which data-parallel rank trains it.

Every rank computes the same plan from the recorded step alone, so it can be trained at
any layout. Costs, not lengths, are balanced: attention is quadratic in a sample's length. Where
prompts are shared, so is their cost."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_megatron.batching.expert_balance import ExpertLoads, imbalance, level_experts
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.errors import DataError

KEY_SHARE = 1 / 8
"""What gathered keys and values of a token take beside all that layers keep of one, at most: a 35th
to a 55th with grouped queries, a sixth with latent attention whose layers are not recomputed."""
_QUADRATIC = 1 / 4096
_SPLITS = (1.0, 2.0, math.inf)
"""Into how many units samples of one prompt are split that cost as much as a mean micro-batch."""
_GOOD = 1.02
"""How much longer than with even ranks a step may take before other splits are tried."""
_COST_OF_A_ROW = 16.0
"""Relative training time of a micro-batch whatever is in it."""


def sample_costs(lengths: np.ndarray, quadratic: float = _QUADRATIC) -> np.ndarray:
    """Relative training time of samples: `length + quadratic * length**2`."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + quadratic * lengths**2


def _require_room(lengths: np.ndarray, max_tokens: int) -> None:
    """Raise DataError for a sample that no micro-batch holds."""
    if len(lengths) and lengths.max() > max_tokens:
        raise DataError(
            f"sample {lengths.argmax()} has {lengths.max()} tokens, a micro-batch "
            f"holds {max_tokens}",
            where="trainer.max_tokens_per_microbatch",
            remedy="raise it to at least rollout.max_model_len",
        )


@dataclass(frozen=True)
class ExpertBalance:
    """What the fullest rank of a group gets beside the mean (`expert_balance.imbalance`)."""

    before: float
    """With micro-batches of even costs."""
    after: float
    """With samples exchanged between them."""


@dataclass(frozen=True)
class MicroBatchPlan:
    """What every data-parallel rank trains in an optimizer step."""

    paths: SamplePaths
    """What samples of a row share: nothing where that is faster."""
    samples: list[list[np.ndarray]]
    """Sample rows by rank and micro-batch, int64, ascending."""
    experts: ExpertBalance | None = None
    """Where routes were known."""


def plan_microbatches(
    paths: SamplePaths,
    *,
    num_ranks: int,
    max_tokens: int,
    multiple_of: int = 1,
    experts: ExpertLoads | None = None,
) -> MicroBatchPlan:
    """The longest first into the cheapest bin of `max_tokens` with room, as few bins as that takes.

    paths: the N samples, and what they share; num_ranks: data-parallel size. All ranks have equally
    many micro-batches, a multiple of `multiple_of` (interleaved pipelines).

    Samples that begin with the same piece stay together, and it is computed once a row. They are
    split, and the piece is repeated, where a micro-batch does not hold them, or where ranks would
    wait for one that has too many. What samples share behind the first piece makes rows shorter
    than planned. Where samples fill fewer micro-batches by themselves, and what they share is
    little beside that, nothing is shared: a step is never planned to take longer than without
    sharing.

    experts: which experts the samples need, as far as it is known: then samples are exchanged until
    the ranks that have these get equal shares (`expert_balance`)."""
    _require_room(paths.totals, max_tokens)
    bins = _Bins(num_ranks, num_ranks * multiple_of, max_tokens)
    best = bins.plan(_units_apart(paths.totals))
    if paths.have_common_pieces:
        shared = _plan_families(paths, bins)
        if shared.duration <= best.duration:
            best = shared
        else:
            paths = paths.apart()
    balance = None
    if experts is not None:
        best, balance = _with_even_experts(best, experts, max_tokens)
    return MicroBatchPlan(paths, best.samples_by_rank(), balance)


def _with_even_experts(
    plan: _UnitPlan, experts: ExpertLoads, max_tokens: int
) -> tuple[_UnitPlan, ExpertBalance]:
    """Exchange units between micro-batches; also return the imbalance before and after."""
    ranks_per_group = experts.ranks_per_group
    loads = np.zeros((len(plan.units), *experts.prompts.shape[1:]))
    for number, unit in enumerate(plan.units):
        loads[number] = experts.of_unit(unit.rows)
    numbers = level_experts(
        plan.numbers,
        np.array([unit.size for unit in plan.units], np.int64),
        np.array([unit.cost for unit in plan.units], np.float64),
        loads,
        max_tokens=max_tokens,
        ranks_per_group=ranks_per_group,
    )
    balance = ExpertBalance(
        imbalance(plan.numbers, loads, ranks_per_group),
        imbalance(numbers, loads, ranks_per_group),
    )
    return _UnitPlan(plan.units, numbers), balance


def _plan_families(paths: SamplePaths, bins: _Bins) -> _UnitPlan:
    """Plan samples that share their first piece together, in as many parts as make ranks even."""
    whole = [_unit(paths, rows) for rows in _families(paths)]
    least = [_pieces_of(paths, unit, bins.max_tokens, 1) for unit in whole]
    best = bins.plan(list(itertools.chain.from_iterable(least)))
    mean_cost = best.total_cost / best.num_bins
    for share in _SPLITS:
        if best.duration <= _GOOD * best.total_cost / bins.num_ranks:
            break
        units = []
        for unit, fewest in zip(whole, least, strict=True):
            num_wanted = len(unit.rows)
            if share < math.inf:
                num_wanted = math.ceil(share * unit.cost / max(mean_cost, 1.0))
            if num_wanted <= len(fewest):
                units += fewest
            else:
                units += _pieces_of(paths, unit, bins.max_tokens, num_wanted)
        found = bins.plan(units)
        if found.duration < 0.98 * best.duration:
            best = found
    return best


@dataclass(frozen=True)
class _UnitPlan:
    """Units in micro-batches."""

    units: Sequence[_Unit]
    numbers: Sequence[Sequence[Sequence[int]]]
    """Of units, by rank and micro-batch."""

    @property
    def num_bins(self) -> int:
        """Micro-batches of all ranks."""
        return len(self.numbers) * len(self.numbers[0])

    @property
    def total_cost(self) -> float:
        """Of all units."""
        return sum(unit.cost for unit in self.units)

    @cached_property
    def duration(self) -> float:
        """Cost until all ranks are done that wait for each other after every micro-batch."""
        duration = 0.0
        for of_ranks in zip(*self.numbers, strict=True):
            duration += max(self._cost(numbers) for numbers in of_ranks)
        return duration

    def _cost(self, numbers: Sequence[int]) -> float:
        return _COST_OF_A_ROW + sum(self.units[number].cost for number in numbers)

    def samples_by_rank(self) -> list[list[np.ndarray]]:
        """Sample rows by rank and micro-batch, int64, ascending."""
        by_rank = []
        for of_rank in self.numbers:
            microbatches = []
            for numbers in of_rank:
                parts = [np.empty(0, np.int64)]
                parts += [self.units[number].rows for number in numbers]
                microbatches.append(np.sort(np.concatenate(parts)))
            by_rank.append(microbatches)
        return by_rank


@dataclass(frozen=True)
class _Bins:
    """Micro-batches of a rank hold `max_tokens`; of all ranks there is a multiple of `step`."""

    num_ranks: int
    step: int
    max_tokens: int

    def plan(self, units: Sequence[_Unit]) -> _UnitPlan:
        """Put units into as few micro-batches as hold them, with even costs."""
        sizes = np.array([unit.size for unit in units], np.int64)
        costs = np.array([unit.cost for unit in units], np.float64)
        order = np.argsort(-sizes, kind="stable")
        # fewer do not hold all tokens, and none holds two units of more than half of it
        fewest = max(sizes.sum() / self.max_tokens, int((2 * sizes > self.max_tokens).sum()), 1)
        num_bins = math.ceil(fewest / self.step) * self.step
        bins = _level(sizes, costs, order, num_bins, self.max_tokens)
        while bins is None:
            num_bins += self.step * max(num_bins // (32 * self.step), 1)
            bins = _level(sizes, costs, order, num_bins, self.max_tokens)
        numbers = []
        for of_rank in _deal(bins, costs, self.num_ranks):
            numbers.append([row.tolist() for row in of_rank])
        return _UnitPlan(units, numbers)


@dataclass(frozen=True)
class _Unit:
    """Samples that share their first piece and a micro-batch."""

    rows: np.ndarray
    size: int
    """What it takes of a micro-batch: tokens, and for keys that branches gather `KEY_SHARE` of
    one, so that a row needs no more memory than one of as many tokens without branches."""
    cost: float


def _unit(paths: SamplePaths, rows: np.ndarray) -> _Unit:
    """Measure samples that share their first piece. rows: int64 [S]."""
    first = int(paths.lengths[rows[0], 0])
    totals = paths.totals[rows]
    if len(rows) == 1:
        return _Unit(rows, int(totals[0]), float(sample_costs(totals)[0]))
    tokens = first + int((totals - first).sum())
    keys = math.ceil(totals.sum() * KEY_SHARE)
    cost = float(sample_costs(np.array([first]))[0]) + float(_branch_costs(first, totals).sum())
    return _Unit(rows, tokens + keys, cost)


def _units_apart(lengths: np.ndarray) -> list[_Unit]:
    """One unit for each sample of so many tokens, int64 [N]."""
    units = []
    for row, cost in enumerate(sample_costs(lengths).tolist()):
        units.append(_Unit(np.array([row]), int(lengths[row]), cost))
    return units


def _branch_costs(first: int, totals: np.ndarray) -> np.ndarray:
    """Relative training time of samples behind their first piece, of `first` tokens.

    A branch attends by its own queries to all keys, or by all queries causally, whichever is less
    (`trainer.megatron.packed_attention`)."""
    own = totals - first
    area = np.minimum(2 * own * totals, totals**2)
    costs: np.ndarray = own + _QUADRATIC * area
    return costs


def _families(paths: SamplePaths) -> list[np.ndarray]:
    """Samples by their first piece, int64, ascending, in order of appearance."""
    by_piece: dict[int, list[int]] = {}
    for row, piece in enumerate(paths.pieces[:, 0].tolist()):
        by_piece.setdefault(piece, []).append(row)
    return [np.array(rows, np.int64) for rows in by_piece.values()]


def _pieces_of(paths: SamplePaths, whole: _Unit, max_tokens: int, num_wanted: int) -> list[_Unit]:
    """Split samples that share their first piece into even units: `num_wanted`, or more where a
    micro-batch does not hold these."""
    rows = whole.rows
    if len(rows) == 1 or (whole.size <= max_tokens and num_wanted <= 1):
        return [whole]
    first = int(paths.lengths[rows[0], 0])
    totals = paths.totals[rows]
    own = totals - first
    sizes = own + np.ceil(totals * KEY_SHARE).astype(np.int64)
    room = max(max_tokens - first, 1)
    num_units = max(math.ceil(sizes.sum() / room), num_wanted)
    costs = _branch_costs(first, totals)
    order = np.argsort(-own, kind="stable")
    while num_units < len(rows):
        parts = _level(sizes, costs, order, num_units, room)
        if parts is not None:
            return [_unit(paths, rows[part]) for part in parts if len(part)]
        num_units += 1
    return [_unit(paths, rows[place : place + 1]) for place in range(len(rows))]


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
