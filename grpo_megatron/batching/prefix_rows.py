"""What samples of a packed row share: the row as a tree of segments.

A prompt and its completions are a root and its branches: the tokens of the prompt are in the row
once, and every completion continues them.

    samples          P P P a a a      P P P b b      Q Q c
    row              P P P a a a b b Q Q c
    segments         0     1     2   3              # "Q Q c" has no branches: one segment
    parents         -1     0     0  -1
    first_positions  0     3     3   0

A token sees the tokens of its segment up to itself, and all tokens of the segments above. The
sequences of an episode make deeper trees: one continues another where that was cut.

Shape legend: N samples, D pieces of a sample at most, B segments, T packed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

_NO_PARENT = -1


@dataclass(frozen=True)
class SamplePaths:
    """The pieces that each sample's tokens consist of, from its first token on.

    A piece of the same number is the same tokens behind the same tokens, wherever it occurs."""

    pieces: np.ndarray
    """Numbers of pieces, int64 [N, D]."""
    lengths: np.ndarray
    """Their tokens, int64 [N, D]; 0: no piece."""
    uses: np.ndarray
    """How many samples of the optimizer step have the piece, int64 [N, D]."""
    episodes: np.ndarray
    """Numbers of episodes, int64 [N]: samples with the same number are never apart."""

    @classmethod
    def of_pieces(
        cls, pieces: np.ndarray, lengths: np.ndarray, episodes: np.ndarray | None = None
    ) -> SamplePaths:
        """Count the uses of pieces, int64 [N, D] both. episodes: int64 [N], by default each sample
        is one."""
        _, places, counts = np.unique(pieces, return_inverse=True, return_counts=True)
        if episodes is None:
            episodes = np.arange(len(pieces))
        return cls(pieces, lengths, counts[places].reshape(pieces.shape), episodes)

    @classmethod
    def without_sharing(cls, lengths: np.ndarray) -> SamplePaths:
        """Return samples with these numbers of tokens, int64 [N], none of them shared."""
        column = np.asarray(lengths, np.int64)[:, None]
        return cls.of_pieces(np.arange(len(column))[:, None], column)

    @cached_property
    def totals(self) -> np.ndarray:
        """Tokens of each sample, int64 [N]."""
        totals: np.ndarray = self.lengths.sum(1)
        return totals

    @property
    def have_common_pieces(self) -> bool:
        """Whether any samples begin with the same piece."""
        return len(np.unique(self.pieces[:, 0])) < len(self.pieces)

    def of(self, samples: np.ndarray) -> SamplePaths:
        """Take some samples, int64 [S]; uses stay those of the step."""
        return SamplePaths(
            self.pieces[samples],
            self.lengths[samples],
            self.uses[samples],
            self.episodes[samples],
        )

    def apart(self) -> SamplePaths:
        """Share nothing within a row; uses stay, for what counts a shared token once."""
        own_pieces = np.arange(self.pieces.size).reshape(self.pieces.shape)
        return replace(self, pieces=own_pieces)

    def count_tokens(self, samples: np.ndarray) -> int:
        """Count the tokens of a row of some samples, int64 [S], without padding."""
        lengths, _ = self.distinct_pieces(samples)
        return int(lengths.sum())

    def distinct_pieces(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return, for the pieces of some samples (int64 [S]), how many tokens each piece has and
        how many tokens are before it; int64 both, in the order of the pieces' numbers."""
        lengths = self.lengths[samples]
        before = np.cumsum(lengths, axis=1) - lengths
        _, firsts = np.unique(self.pieces[samples], return_index=True)
        own = lengths.ravel()[firsts]
        has_tokens = own > 0
        return own[has_tokens], before.ravel()[firsts][has_tokens]

    def by_episode(self) -> list[np.ndarray]:
        """Return the samples of every episode, int64 [its samples] each, ascending, in order of
        appearance."""
        starts = np.flatnonzero(np.diff(self.episodes)) + 1
        return np.split(np.arange(len(self.episodes)), starts)


@dataclass(frozen=True)
class RowTree:
    """Segments of a packed row, in the order in which they lie; parents come before."""

    lengths: np.ndarray
    """Tokens of every segment, int64 [B]."""
    parents: np.ndarray
    """The segment that it continues, int64 [B]; -1: none."""
    token_rows: tuple[np.ndarray, ...]
    """Where each sample's tokens are in the row, int64 [T_p + T], by sample."""

    @cached_property
    def bounds(self) -> list[int]:
        """Where segments begin, and the end of the last; [B + 1]."""
        return [0, *np.cumsum(self.lengths).tolist()]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.bounds[-1]

    @cached_property
    def first_positions(self) -> np.ndarray:
        """Positions of the first tokens in their samples, int64 [B]."""
        positions = np.zeros(len(self.lengths), np.int64)
        for segment, parent in enumerate(self.parents.tolist()):
            if parent != _NO_PARENT:
                positions[segment] = positions[parent] + self.lengths[parent]
        return positions

    @cached_property
    def positions(self) -> np.ndarray:
        """Every token's position in its samples, int64 [T]."""
        offsets = self.first_positions - np.array(self.bounds[:-1], np.int64)
        positions: np.ndarray = np.arange(self.num_tokens) + np.repeat(offsets, self.lengths)
        return positions

    @property
    def has_branches(self) -> bool:
        """Whether any token is shared."""
        return bool((self.parents != _NO_PARENT).any())

    @property
    def longest_path(self) -> int:
        """Tokens that the last token of a segment sees, at most."""
        return int((self.first_positions + self.lengths).max(initial=0))

    def prefix(self, segment: int) -> np.ndarray:
        """Return where the tokens before a segment are, from the first position on: int64 [their
        number]."""
        parts = [np.empty(0, np.int64)]
        parent = int(self.parents[segment])
        while parent != _NO_PARENT:
            parts.append(self.own(parent))
            parent = int(self.parents[parent])
        return np.concatenate(parts[::-1])

    def own(self, segment: int) -> np.ndarray:
        """Return where the tokens of a segment are: int64 [its length]."""
        return np.arange(*self.bounds[segment : segment + 2])

    def padded(self, num_tokens: int) -> RowTree:
        """Append a segment of `num_tokens` that no sample has; none where it is 0."""
        if num_tokens == 0:
            return self
        return RowTree(
            np.append(self.lengths, num_tokens),
            np.append(self.parents, _NO_PARENT),
            self.token_rows,
        )


def lay_out(paths: SamplePaths) -> RowTree:
    """Lay the pieces of some samples end to end, each once and before those that continue it.

    A piece that only one other continues is a segment together with it."""
    following = _pieces_after(paths)
    lengths: list[int] = []
    parents: list[int] = []
    start_of: dict[int, int] = {}
    length_of = dict(
        zip(paths.pieces.ravel().tolist(), paths.lengths.ravel().tolist(), strict=True)
    )
    end = 0
    pending = [(piece, _NO_PARENT, False) for piece in reversed(following[None])]
    while pending:
        piece, segment, continues = pending.pop()
        if continues:
            lengths[segment] += length_of[piece]
        else:
            parents.append(segment)
            lengths.append(length_of[piece])
            segment = len(lengths) - 1
        start_of[piece] = end
        end += length_of[piece]
        after = following[piece]
        is_only = len(after) == 1
        pending += [(next_piece, segment, is_only) for next_piece in reversed(after)]
    token_rows = []
    for pieces in _piece_lists(paths):
        parts = [np.empty(0, np.int64)]
        for piece in pieces:
            parts.append(np.arange(start_of[piece], start_of[piece] + length_of[piece]))
        token_rows.append(np.concatenate(parts))
    return RowTree(np.array(lengths, np.int64), np.array(parents, np.int64), tuple(token_rows))


def _pieces_after(paths: SamplePaths) -> dict[int | None, list[int]]:
    """Return the pieces that continue each piece, in the order of samples; of None: the first."""
    following: dict[int | None, list[int]] = {None: []}
    for pieces in _piece_lists(paths):
        before: int | None = None
        for piece in pieces:
            if piece not in following:
                following[piece] = []
                following[before].append(piece)
            before = piece
    return following


def _piece_lists(paths: SamplePaths) -> Iterable[Sequence[int]]:
    """Yield the pieces of every sample that have tokens."""
    for pieces, lengths in zip(paths.pieces.tolist(), paths.lengths.tolist(), strict=True):
        yield [piece for piece, length in zip(pieces, lengths, strict=True) if length]
