"""Which samples of an optimizer step share their prompts, and sequences of an episode more."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.batching.sequences import Fork
from grpo_megatron.batching.store import SampleTable

_NO_PARENT = -1


@dataclass(frozen=True)
class SharedPrompts:
    """Samples whose prompts are computed once wherever they are in one row."""

    paths: SamplePaths
    """A prompt and a completion of every sample, or more pieces, where sequences of an episode
    begin alike."""
    num_split: int
    """How many times more equal tokens are computed because the engine's routes on them differ."""


def shared_prompts(table: SampleTable, rows: np.ndarray) -> SharedPrompts:
    """Find what `rows` share, int64 [N], ascending, with all rows of an episode or none: equal
    prompts, that is, the same tokens and images, whatever group they are of; and what a sequence
    has in common with an earlier one of its episode.

    Where the engine recorded routes, these must be the same too: a shared token has one route."""
    by_tokens: dict[bytes, int] = {}
    tokens_of: dict[tuple[int, int], int] = {}
    by_route: dict[tuple[int, ...], int] = {}
    prompts = np.empty(len(rows), np.int64)
    forks: dict[int, Fork] = {}
    num_cut = 0
    for place, row in enumerate(rows.tolist()):
        fork = table.fork(row)
        if fork is not None:
            num_cut += fork.is_cut
            if fork.num_tokens:
                forks[place] = fork
                continue
        stored = table.prompt_key(row)
        if stored not in tokens_of:
            content = table.prompt_ids(row).tobytes()
            for image in table.images(row):
                content += bytes.fromhex(image.digest)
            tokens_of[stored] = by_tokens.setdefault(content, len(by_tokens))
        key = (tokens_of[stored], *table.prompt_route_key(row))
        prompts[place] = by_route.setdefault(key, len(by_route))
    num_split = len(by_route) - len(by_tokens) + num_cut
    lengths = np.stack([table.prompt_lengths[rows], table.completion_lengths[rows]], 1)
    lengths = lengths.astype(np.int64)
    episodes = table.episode[rows]
    if not forks:
        completions = len(by_route) + np.arange(len(rows))
        pieces = np.stack([prompts, completions], 1)
        return SharedPrompts(SamplePaths.of_pieces(pieces, lengths, episodes), num_split)
    tree = _PieceTree()
    place_of = {row: place for place, row in enumerate(rows.tolist())}
    prompt_pieces: dict[int, int] = {}
    leaves: list[int] = []
    for place in range(len(rows)):
        num_prompt, num_completion = lengths[place].tolist()
        if place in forks:
            fork = forks[place]
            before = tree.cut(leaves[place_of[fork.after]], fork.num_tokens)
            leaves.append(tree.add(before, num_prompt + num_completion - fork.num_tokens))
            continue
        prompt = int(prompts[place])
        if prompt not in prompt_pieces:
            prompt_pieces[prompt] = tree.add(_NO_PARENT, num_prompt)
        leaves.append(tree.add(prompt_pieces[prompt], num_completion))
    return SharedPrompts(tree.paths(leaves, episodes), num_split)


class _PieceTree:
    """Pieces that continue one another, and are cut where another one continues their tokens."""

    def __init__(self) -> None:
        self._lengths: list[int] = []
        self._parents: list[int] = []

    def add(self, parent: int, length: int) -> int:
        """Make a piece of `length` tokens behind another one; returns its number."""
        self._parents.append(parent)
        self._lengths.append(length)
        return len(self._lengths) - 1

    def cut(self, leaf: int, num_tokens: int) -> int:
        """Return the piece with which the first `num_tokens` of the pieces up to `leaf` end; one
        that goes on is cut in two, of which the second one keeps the number."""
        start = 0
        piece = _NO_PARENT
        for piece in self._path(leaf):
            end = start + self._lengths[piece]
            if end == num_tokens:
                return piece
            if end > num_tokens:
                break
            start = end
        upper = self.add(self._parents[piece], num_tokens - start)
        self._parents[piece] = upper
        self._lengths[piece] -= num_tokens - start
        return upper

    def paths(self, leaves: list[int], episodes: np.ndarray) -> SamplePaths:
        """Return the pieces of samples that end with `leaves`. episodes: int64 [N]."""
        found = [self._path(leaf) for leaf in leaves]
        depth = max(len(path) for path in found)
        pieces = np.full((len(found), depth), len(self._lengths), np.int64)
        lengths = np.zeros((len(found), depth), np.int64)
        for sample, path in enumerate(found):
            pieces[sample, : len(path)] = path
            lengths[sample, : len(path)] = [self._lengths[piece] for piece in path]
        return SamplePaths.of_pieces(pieces, lengths, episodes)

    def _path(self, leaf: int) -> list[int]:
        """Return the pieces up to one, from the first."""
        path = []
        piece = leaf
        while piece != _NO_PARENT:
            path.append(piece)
            piece = self._parents[piece]
        return path[::-1]
