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
    """Return the relative training time of samples, float64 [N]: `length + quadratic * length**2`.
    lengths: tokens, [N]."""
    lengths = np.asarray(lengths, np.float64)
    return lengths + quadratic * lengths**2


def _require_room(episodes: Sequence[np.ndarray], sizes: np.ndarray, max_tokens: int) -> None:
    """Raise DataError for a sample that no micro-batch holds.

    episodes: samples of every episode, sizes: their tokens, int64."""
    if not len(sizes) or sizes.max() <= max_tokens:
        return
    largest = int(sizes.argmax())
    rows = episodes[largest]
    of_what = f"sample {rows[0]} has {sizes[largest]} tokens"
    remedy = "raise it to at least rollout.max_model_len"
    if len(rows) > 1:
        of_what += f" in its {len(rows)} sequences"
        remedy = "raise it, or let episodes have fewer turns"
    raise DataError(
        f"{of_what}, a micro-batch holds {max_tokens}",
        where="trainer.max_tokens_per_microbatch",
        remedy=remedy,
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
    sharing. Samples of one episode are always together.

    experts: which experts the samples need, as far as it is known: then samples are exchanged until
    the ranks that have these get equal shares (`expert_balance`)."""
    bins = _Bins(num_ranks, num_ranks * multiple_of, max_tokens)
    episodes = paths.by_episode()
    together = _sizes_together(paths, episodes)
    _require_room(episodes, together, max_tokens)
    apart = _units_apart(paths.totals, episodes)
    fits_apart = max((unit.size for unit in apart), default=0) <= max_tokens
    if not fits_apart:
        best = _plan_families(paths, episodes, bins)
    else:
        best = bins.plan(apart)
        if paths.have_common_pieces:
            shared = _plan_families(paths, episodes, bins)
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


def _sizes_together(paths: SamplePaths, episodes: Sequence[np.ndarray]) -> np.ndarray:
    """Return tokens of each episode, int64, of which those that its samples share count once."""
    sizes = np.empty(len(episodes), np.int64)
    for number, rows in enumerate(episodes):
        if len(rows) == 1:
            sizes[number] = paths.totals[rows[0]]
        else:
            sizes[number] = paths.count_tokens(rows)
    return sizes


def _plan_families(paths: SamplePaths, episodes: Sequence[np.ndarray], bins: _Bins) -> _UnitPlan:
    """Plan samples that share their first piece together, in as many parts as make ranks even."""
    families = _families(paths, episodes)
    whole = [_unit(paths, family, bins.max_tokens) for family in families]
    least = []
    for family, unit in zip(families, whole, strict=True):
        least.append(_parts_of(paths, family, unit, bins.max_tokens, 1))
    best = bins.plan(list(itertools.chain.from_iterable(least)))
    mean_cost = best.total_cost / best.num_bins
    for share in _SPLITS:
        if best.duration <= _GOOD * best.total_cost / bins.num_ranks:
            break
        units = []
        for family, unit, fewest in zip(families, whole, least, strict=True):
            num_wanted = len(family)
            if share < math.inf:
                num_wanted = math.ceil(share * unit.cost / max(mean_cost, 1.0))
            if num_wanted <= len(fewest):
                units += fewest
            else:
                units += _parts_of(paths, family, unit, bins.max_tokens, num_wanted)
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
        """The cost of all units."""
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


def _unit(paths: SamplePaths, episodes: Sequence[np.ndarray], max_tokens: int) -> _Unit:
    """Measure episodes that share their first piece, with the samples of each, int64."""
    rows = np.concatenate(episodes)
    totals = paths.totals[rows]
    if len(rows) == 1:
        return _Unit(rows, int(totals[0]), float(sample_costs(totals)[0]))
    lengths, before = paths.distinct_pieces(rows)
    size = int(lengths.sum()) + math.ceil(totals.sum() * KEY_SHARE)
    if len(episodes) == 1:
        size = min(size, max_tokens)  # nothing else is with it, and its tokens have room
    is_first = before == 0
    ends = before + lengths
    cost = float(sample_costs(lengths[is_first]).sum())
    cost += float(_branch_costs(before[~is_first], ends[~is_first]).sum())
    return _Unit(rows, size, cost)


def _units_apart(lengths: np.ndarray, episodes: Sequence[np.ndarray]) -> list[_Unit]:
    """Return one unit for each episode, of samples that share nothing and have these numbers of
    tokens, int64 [N]."""
    costs = sample_costs(lengths)
    units = []
    for rows in episodes:
        units.append(_Unit(rows, int(lengths[rows].sum()), float(costs[rows].sum())))
    return units


def _branch_costs(first: np.ndarray | int, totals: np.ndarray) -> np.ndarray:
    """Relative training time of pieces that end at token `totals` of a sample and have `first`
    tokens before them.

    A branch attends by its own queries to all keys, or by all queries causally, whichever is less
    (`trainer.megatron.packed_attention`)."""
    own = totals - first
    area = np.minimum(2 * own * totals, totals**2)
    costs: np.ndarray = own + _QUADRATIC * area
    return costs


def _families(paths: SamplePaths, episodes: Sequence[np.ndarray]) -> list[list[np.ndarray]]:
    """Episodes by the piece with which they begin, in order of appearance."""
    by_piece: dict[int, list[np.ndarray]] = {}
    first_pieces = paths.pieces[:, 0].tolist()
    for rows in episodes:
        by_piece.setdefault(first_pieces[rows[0]], []).append(rows)
    return list(by_piece.values())


def _parts_of(
    paths: SamplePaths,
    family: Sequence[np.ndarray],
    whole: _Unit,
    max_tokens: int,
    num_wanted: int,
) -> list[_Unit]:
    """Split episodes that share their first piece into even units: `num_wanted`, or more where a
    micro-batch does not hold these. whole: all of them as one unit."""
    if len(family) == 1 or (whole.size <= max_tokens and num_wanted <= 1):
        return [whole]
    first = int(paths.lengths[family[0][0], 0])
    own, sizes, costs = _behind_first(paths, family, first)
    room = max(max_tokens - first, 1)
    num_units = max(math.ceil(sizes.sum() / room), num_wanted)
    order = np.argsort(-own, kind="stable")
    while num_units < len(family):
        parts = _level(sizes, costs, order, num_units, room)
        if parts is None:
            num_units += 1
            continue
        units = []
        for part in parts:
            if len(part):
                episodes = [family[place] for place in part]
                units.append(_unit(paths, episodes, max_tokens))
        return units
    return [_unit(paths, [rows], max_tokens) for rows in family]


def _behind_first(
    paths: SamplePaths, family: Sequence[np.ndarray], first: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return what episodes that begin with the same piece, of `first` tokens, have behind it: their
    tokens, int64, the tokens that these take of a micro-batch, int64, and their cost, float64."""
    if all(len(rows) == 1 for rows in family):
        totals = paths.totals[np.concatenate(family)]
        keys_of = np.ceil(totals * KEY_SHARE).astype(np.int64)
        return totals - first, totals - first + keys_of, _branch_costs(first, totals)
    own = np.empty(len(family), np.int64)
    sizes = np.empty(len(family), np.int64)
    costs = np.empty(len(family), np.float64)
    for number, rows in enumerate(family):
        lengths, before = paths.distinct_pieces(rows)
        is_behind = before > 0
        ends = (before + lengths)[is_behind]
        own[number] = lengths.sum() - first
        keys = np.ceil(paths.totals[rows].sum() * KEY_SHARE)
        sizes[number] = own[number] + int(keys)
        costs[number] = _branch_costs(before[is_behind], ends).sum()
    return own, sizes, costs


def _level(
    lengths: np.ndarray, costs: np.ndarray, order: np.ndarray, num_bins: int, capacity: int
) -> list[np.ndarray] | None:
    """Put the samples, in `order`, into the cheapest bins with room. Returns sample rows by bin,
    int64, ascending; None when some sample finds no room."""
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
