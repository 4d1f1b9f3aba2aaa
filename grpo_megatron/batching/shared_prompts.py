"""Which samples of an optimizer step share their prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.batching.store import SampleTable


@dataclass(frozen=True)
class SharedPrompts:
    """Samples whose prompts are computed once wherever they are in one row."""

    paths: SamplePaths
    """A prompt and a completion of every sample."""
    num_split: int
    """How many prompts more there are because the engine's routes on equal tokens differ."""


def shared_prompts(table: SampleTable, rows: np.ndarray) -> SharedPrompts:
    """Find the equal prompts of `rows`, int64 [N]: the same tokens, whatever group they are of.

    Where the engine recorded routes, these must be the same too: a shared token has one route."""
    by_tokens: dict[bytes, int] = {}
    tokens_of: dict[tuple[int, int], int] = {}
    by_route: dict[tuple[int, ...], int] = {}
    prompts = np.empty(len(rows), np.int64)
    for place, row in enumerate(rows.tolist()):
        stored = table.prompt_key(row)
        if stored not in tokens_of:
            token_ids = table.prompt_ids(row).tobytes()
            tokens_of[stored] = by_tokens.setdefault(token_ids, len(by_tokens))
        key = (tokens_of[stored], *table.prompt_route_key(row))
        prompts[place] = by_route.setdefault(key, len(by_route))
    completions = len(by_route) + np.arange(len(rows))
    lengths = [table.prompt_lengths[rows], table.completion_lengths[rows]]
    paths = SamplePaths.of_pieces(
        np.stack([prompts, completions], 1), np.stack(lengths, 1).astype(np.int64)
    )
    return SharedPrompts(paths, len(by_route) - len(by_tokens))
