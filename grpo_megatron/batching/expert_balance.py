"""Micro-batches whose tokens are even over the ranks that have the experts.

With expert parallelism the tokens of all micro-batches that a group of ranks computes at once go to
the experts of its ranks, and the group waits for the rank that got most of them, layer by layer.
Where the engine's routes are replayed it is known beforehand which samples need which experts, so
that samples can be exchanged between micro-batches until none of them crowds one rank (the idea of
ForeMoE, arXiv:2606.11867; what is exchanged and for what is our own).

Shape legend: U units (samples that stay together), G groups of ranks, M micro-batches of a rank,
L layers with experts, R ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

EXPERT_SHARE = 0.5
"""Of a token's training time what experts take, where all ranks have equally many."""
_PASSES = 4
_PARTNERS = 48
"""With how many units an exchange is considered, at most."""
_TRIED = 4
"""Of these, how many are looked at closely."""
_MOST_NUMBERS = 3e7
"""Loads that a pass looks at, so that it takes less than about a second whatever the size: units of
the most uneven micro-batches come first."""
_ENOUGH = 0.005
"""A pass that saves a smaller share of the time is the last one."""

Numbers = Sequence[Sequence[Sequence[int]]]
"""Numbers of units, by data-parallel rank and micro-batch."""


@dataclass(frozen=True)
class ExpertLoads:
    """How many choices of samples' tokens fall on the experts of every rank of a group."""

    prompts: np.ndarray
    """Of prompt tokens, float64 [N, L, R]."""
    completions: np.ndarray
    """Of the others, float64 [N, L, R]."""
    ranks_per_group: int
    """Data-parallel ranks whose micro-batches go to the experts of one group."""

    def of_samples(self, samples: np.ndarray) -> ExpertLoads:
        """Take some samples, int64 [S]."""
        return ExpertLoads(self.prompts[samples], self.completions[samples], self.ranks_per_group)

    def of_unit(self, samples: np.ndarray) -> np.ndarray:
        """Return the loads of samples, int64 [S], that share a prompt, which counts once; [L, R].
        Sequences of an episode share their beginning likewise."""
        loads: np.ndarray = self.prompts[samples[0]] + self.completions[samples].sum(0)
        return loads


def imbalance(numbers: Numbers, loads: np.ndarray, ranks_per_group: int) -> float:
    """Return what the fullest ranks get beside the mean, of all layers and micro-batches.

    1 where all get equally many, or nothing is routed. loads: float64 [U, L, R]."""
    crowded = _group_loads(numbers, loads, ranks_per_group)
    even = crowded.mean(-1).sum()
    if even == 0:
        return 1.0
    return float(crowded.max(-1).sum() / even)


def _group_loads(numbers: Numbers, loads: np.ndarray, ranks_per_group: int) -> np.ndarray:
    """Add up the loads of what a group computes at once; float64 [G, M, L, R]."""
    num_groups = len(numbers) // ranks_per_group
    total = np.zeros((num_groups, len(numbers[0]), *loads.shape[1:]))
    for rank, place, units in _units_by_place(numbers):
        total[rank // ranks_per_group, place] += loads[units].sum(0)
    return total


def _units_by_place(numbers: Numbers) -> Iterator[tuple[int, int, list[int]]]:
    """Yield rank, micro-batch and what is in it."""
    for rank, of_rank in enumerate(numbers):
        for place, units in enumerate(of_rank):
            yield rank, place, list(units)


def level_experts(
    numbers: Numbers,
    sizes: np.ndarray,
    costs: np.ndarray,
    loads: np.ndarray,
    *,
    max_tokens: int,
    ranks_per_group: int,
) -> list[list[list[int]]]:
    """Exchange units between micro-batches as long as that shortens the step; `numbers` anew.

    The time of a step: in every micro-batch the most expensive rank, and what a group waits for its
    fullest experts. It is never longer than that of `numbers`. Every rank finds the same.

    sizes: what units take of a micro-batch of `max_tokens`, int64 [U]; costs: their relative
    training time, float64 [U]; loads: float64 [U, L, R]."""
    search = _Search(numbers, sizes, costs, loads, max_tokens, ranks_per_group)
    for _ in range(_PASSES):
        before = search.duration
        search.exchange()
        if search.duration > (1 - _ENOUGH) * before:
            break
    return search.numbers()


class _Search:
    """Where units are, what micro-batches hold, and what that costs."""

    def __init__(
        self,
        numbers: Numbers,
        sizes: np.ndarray,
        costs: np.ndarray,
        loads: np.ndarray,
        max_tokens: int,
        ranks_per_group: int,
    ):
        self.sizes = sizes
        self.costs = costs
        self.loads = loads.astype(np.float32)  # a search of 94 layers is bound by memory
        self.max_tokens = max_tokens
        self.ranks_per_group = ranks_per_group
        self.num_places = len(numbers[0])
        self.rank = np.zeros(len(sizes), np.int64)
        self.place = np.zeros(len(sizes), np.int64)
        self.used = np.zeros((len(numbers), self.num_places), np.int64)
        self.cost = np.zeros((len(numbers), self.num_places))
        for rank, place, units in _units_by_place(numbers):
            self.rank[units] = rank
            self.place[units] = place
            self.used[rank, place] = sizes[units].sum()
            self.cost[rank, place] = costs[units].sum()
        self.crowded = _group_loads(numbers, self.loads, ranks_per_group)
        self.weight = self._cost_of_a_choice()
        self.random = np.random.default_rng(0)

    def _cost_of_a_choice(self) -> float:
        """Return the cost of one more choice on the fullest rank of a layer, as the mean over all
        groups."""
        num_groups = len(self.crowded)
        even = self.crowded.mean(-1).sum() / num_groups
        if even == 0:
            return 0.0
        num_ranks = len(self.cost)
        return EXPERT_SHARE * float(self.cost.sum()) / num_ranks / float(even) / num_groups

    @property
    def duration(self) -> float:
        """Return what the step costs: the longest micro-batches of all ranks, and the crowded
        experts."""
        return float(self.cost.max(0).sum() + self.weight * self.crowded.max(-1).sum())

    def exchange(self) -> None:
        """Let the units of the most uneven micro-batches look for a better place."""
        if len(self.sizes) == 0:
            return
        excess = (self.crowded.max(-1) - self.crowded.mean(-1)).sum(-1)
        of_unit = excess[self.rank // self.ranks_per_group, self.place]
        numbers_of_unit = 2 * _PARTNERS * self.loads[0].size
        most = int(_MOST_NUMBERS // max(numbers_of_unit, 1))
        for unit in np.argsort(-of_unit, kind="stable")[:most].tolist():
            self._find_partner(unit)

    def _find_partner(self, unit: int) -> None:
        """Exchange a unit with another one, or move it, where that saves most of what is tried."""
        partners = np.arange(len(self.sizes))
        if len(partners) > _PARTNERS:
            partners = self.random.choice(len(self.sizes), _PARTNERS, replace=False)
        partners = partners[self._is_elsewhere(unit, self.rank[partners], self.place[partners])]
        swaps = _Moves.of_units(self, partners)
        moves = swaps.and_to(self, self._places_with_room(unit))
        if len(moves.rank) == 0:
            return
        gains = self._crowding_after(unit, moves)
        best = 0.0
        chosen = -1
        for number in np.argsort(gains, kind="stable")[:_TRIED].tolist():
            change = self.weight * gains[number] + self._cost_after(unit, moves, number)
            if change < best - 1e-9 * self.cost.max():
                best = change
                chosen = number
        if chosen >= 0:
            self._make(unit, moves, chosen)

    def _is_elsewhere(self, unit: int, rank: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Say which places are of another group's micro-batch than the unit's, bool."""
        own_group = self.rank[unit] // self.ranks_per_group
        is_other_group = rank // self.ranks_per_group != own_group
        is_other_place = place != self.place[unit]
        is_elsewhere: np.ndarray = is_other_group | is_other_place
        return is_elsewhere

    def _places_with_room(self, unit: int) -> np.ndarray:
        """Return micro-batches that could take the unit besides what they hold, int64 [P, 2]."""
        places: np.ndarray = np.argwhere(self.used + self.sizes[unit] <= self.max_tokens)
        places = places[self._is_elsewhere(unit, places[:, 0], places[:, 1])]
        if len(places) > _PARTNERS:
            places = places[self.random.choice(len(places), _PARTNERS, replace=False)]
        return places

    def _crowding_after(self, unit: int, moves: _Moves) -> np.ndarray:
        """Return how much more the fullest ranks would get, float64 [P]; inf where none fits."""
        rank = self.rank[unit]
        place = self.place[unit]
        size = self.sizes[unit]
        here = self.crowded[rank // self.ranks_per_group, place].astype(np.float32)
        there = self.crowded[moves.rank // self.ranks_per_group, moves.place].astype(np.float32)
        difference = self.loads[unit] - moves.loads
        now = here.max(-1).sum() + there.max(-1).sum(-1)
        after = (here - difference).max(-1).sum(-1) + (there + difference).max(-1).sum(-1)
        fits_here = self.used[rank, place] - size + moves.sizes <= self.max_tokens
        used_there = self.used[moves.rank, moves.place]
        fits_there = used_there - moves.sizes + size <= self.max_tokens
        gains: np.ndarray = np.where(fits_here & fits_there, after - now, np.inf)
        return gains

    def _cost_after(self, unit: int, moves: _Moves, number: int) -> float:
        """Return how much longer ranks would compute besides."""
        if moves.sizes[number] > self.max_tokens:
            return np.inf
        places = np.unique([self.place[unit], moves.place[number]])
        columns = self.cost[:, places].copy()
        before = columns.max(0).sum()
        more = moves.costs[number] - self.costs[unit]
        columns[self.rank[unit], np.searchsorted(places, self.place[unit])] += more
        columns[moves.rank[number], np.searchsorted(places, moves.place[number])] -= more
        return float(columns.max(0).sum() - before)

    def _make(self, unit: int, moves: _Moves, number: int) -> None:
        """Carry out a move."""
        here = int(self.rank[unit]), int(self.place[unit])
        there = int(moves.rank[number]), int(moves.place[number])
        self._put(unit, here, there)
        partner = int(moves.units[number])
        if partner >= 0:
            self._put(partner, there, here)

    def _put(self, unit: int, old: tuple[int, int], new: tuple[int, int]) -> None:
        for (rank, place), sign in ((old, -1), (new, 1)):
            self.used[rank, place] += sign * self.sizes[unit]
            self.cost[rank, place] += sign * self.costs[unit]
            self.crowded[rank // self.ranks_per_group, place] += sign * self.loads[unit]
        self.rank[unit] = new[0]
        self.place[unit] = new[1]

    def numbers(self) -> list[list[list[int]]]:
        """Return units by rank and micro-batch."""
        found: list[list[list[int]]] = []
        for _ in range(len(self.cost)):
            found.append([[] for _ in range(self.num_places)])
        for unit in range(len(self.sizes)):
            found[self.rank[unit]][self.place[unit]].append(unit)
        return found


@dataclass(frozen=True)
class _Moves:
    """What a unit may change places with: another unit, or nothing where there is room."""

    units: np.ndarray
    """int64 [P]; -1: nothing."""
    rank: np.ndarray
    place: np.ndarray
    sizes: np.ndarray
    costs: np.ndarray
    loads: np.ndarray
    """float64 [P, L, R]."""

    @classmethod
    def of_units(cls, search: _Search, units: np.ndarray) -> _Moves:
        """Exchanges with `units`, int64."""
        return cls(
            units,
            search.rank[units],
            search.place[units],
            search.sizes[units],
            search.costs[units],
            search.loads[units],
        )

    def and_to(self, search: _Search, places: np.ndarray) -> _Moves:
        """Also to `places`, rank and micro-batch, int64 [Q, 2]."""
        count = len(places)
        return _Moves(
            np.concatenate([self.units, np.full(count, -1)]),
            np.concatenate([self.rank, places[:, 0]]),
            np.concatenate([self.place, places[:, 1]]),
            np.concatenate([self.sizes, np.zeros(count, np.int64)]),
            np.concatenate([self.costs, np.zeros(count)]),
            np.concatenate([self.loads, np.zeros((count, *search.loads.shape[1:]), np.float32)]),
        )
