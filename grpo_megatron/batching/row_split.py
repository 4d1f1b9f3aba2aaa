"""Which tokens of a packed row each context-parallel rank computes.

What attention costs a token is the keys that it sees, so the last tokens of a segment cost the
most. Every segment is cut into 2 C even chunks, and rank r of C takes chunk r and chunk 2 C - 1 - r
(Llama 3, arXiv:2407.21783, section 3.3.2): all ranks have as many tokens, and as much to do.

    row              P P P P a a a a a b b b - -      # a prompt, two completions, padding
    owners, C = 2    0 1 1 0 0 0 1 1 0 0 1 1 0 1

Chunks of segments that 2 C does not divide are longer by one token on the ranks that have the
fewest so far. No segment is padded for it: the row is, once, at its end.

Shape legend: C context-parallel ranks, T packed tokens with padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from grpo_megatron.batching.prefix_rows import RowTree


@dataclass(frozen=True)
class RankSpan:
    """Adjacent tokens of a segment that one rank computes: places in the row, int64."""

    above: np.ndarray
    """The tokens before them in their samples, from the first on."""
    own: np.ndarray


@dataclass(frozen=True)
class RowSplit:
    """A row, and who computes which of its tokens; every rank has equally many."""

    tree: RowTree
    """With padding as its last segment."""
    owners: np.ndarray
    """The rank that computes each token, int64 [T]."""
    num_ranks: int
    """C."""

    @property
    def is_whole(self) -> bool:
        """Whether one rank computes all tokens."""
        return self.num_ranks == 1

    @property
    def num_own(self) -> int:
        """Tokens that each rank computes, with padding: T / C."""
        return len(self.owners) // self.num_ranks

    def own(self, rank: int) -> np.ndarray:
        """Return where a rank's tokens are in the row, ascending: int64 [T / C]."""
        return np.flatnonzero(self.owners == rank)

    @cached_property
    def places(self) -> np.ndarray:
        """Where each token of the row is among its rank's own ones, int64 [T]."""
        places = np.empty(len(self.owners), np.int64)
        for rank in range(self.num_ranks):
            places[self.own(rank)] = np.arange(self.num_own)
        return places

    @property
    def gathered_places(self) -> np.ndarray:
        """Where each token of the row is when the ranks' own ones lie end to end, int64 [T]."""
        places: np.ndarray = self.owners * self.num_own + self.places
        return places

    def spans(self, rank: int) -> Iterator[RankSpan]:
        """Yield what a rank computes, in the order of the row."""
        tree = self.tree
        prefixes: dict[int, np.ndarray] = {}
        for segment, parent in enumerate(tree.parents.tolist()):
            rows = tree.own(segment)
            own = rows[self.owners[rows] == rank]
            if not len(own):
                continue
            if parent not in prefixes:
                prefixes[parent] = tree.prefix(segment)
            gaps = np.flatnonzero(np.diff(own) > 1) + 1
            for adjacent in np.split(own, gaps):
                before = rows[: adjacent[0] - rows[0]]
                yield RankSpan(np.concatenate([prefixes[parent], before]), adjacent)

    def work(self, rank: int) -> int:
        """Count the pairs of query and key that a rank computes in attention."""
        positions = self.tree.positions[self.own(rank)]
        return int((positions + 1).sum())


def split_row(tree: RowTree, num_ranks: int, multiple_of: int) -> RowSplit:
    """Split a row, without padding so far, over `num_ranks`, and pad it.

    The tokens of a rank are a multiple of `multiple_of`, and at least as many. With one rank it
    has the whole row."""
    forth = np.arange(num_ranks)
    chunk_owners = np.concatenate([forth, forth[::-1]])
    counts = np.zeros(num_ranks, np.int64)
    owners = []
    for length in tree.lengths.tolist():
        sizes = _chunk_sizes(length, counts)
        owners.append(np.repeat(chunk_owners, sizes))
        counts += np.bincount(chunk_owners, sizes, num_ranks).astype(np.int64)
    most = int(counts.max())
    num_own = max(-(-most // multiple_of), 1) * multiple_of
    padding = num_own - counts
    owners.append(np.repeat(forth, padding))
    padded = tree.padded(int(padding.sum()))
    return RowSplit(padded, np.concatenate(owners).astype(np.int64), num_ranks)


def _chunk_sizes(length: int, counts: np.ndarray) -> np.ndarray:
    """Cut a segment into two chunks a rank, int64 [2 C]; counts: tokens that ranks have, [C]."""
    num_ranks = len(counts)
    num_chunks = 2 * num_ranks
    sizes = np.full(num_chunks, length // num_chunks, np.int64)
    fewest_first = np.argsort(counts, kind="stable")
    for number in range(length % num_chunks):
        rank = int(fewest_first[number % num_ranks])
        if number < num_ranks:
            sizes[rank] += 1
        else:
            sizes[num_chunks - 1 - rank] += 1
    return sizes
