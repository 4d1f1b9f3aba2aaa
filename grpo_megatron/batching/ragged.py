"""Arrays of different lengths as one flat array and its offsets."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, DTypeLike


def ragged(
    parts: Sequence[Sequence[int] | np.ndarray], dtype: DTypeLike
) -> tuple[np.ndarray, np.ndarray]:
    """Return the parts one after another, and their `offsets`, int64 [number of parts + 1]."""
    return concatenate(parts, dtype), offsets([len(part) for part in parts])


def concatenate(parts: Sequence[ArrayLike], dtype: DTypeLike) -> np.ndarray:
    """Return the parts one after another, [sum of their lengths]; an empty array if there are
    none."""
    if not parts:
        return np.empty(0, dtype)
    return np.concatenate([np.asarray(part, dtype) for part in parts])


def offsets(lengths: ArrayLike) -> np.ndarray:
    """Return where parts of these lengths begin, and where the last one ends: int64 [N+1]."""
    ends = np.cumsum(np.asarray(lengths, np.int64))
    return np.concatenate([np.zeros(1, np.int64), ends])
