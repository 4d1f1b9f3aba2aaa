"""Positions of tokens in time, height and width, as Qwen2-VL counts them (arXiv:2409.12191).

    tokens    a b [0,0] [0,1] [0,2] [1,0] [1,1] [1,2] c d     # an image of 2 rows, 3 columns
    time      0 1   2     2     2     2     2     2   5 6
    height    0 1   2     2     2     3     3     3   5 6
    width     0 1   2     3     4     2     3     4   5 6

Text after an image goes on behind its longer side."""

from collections.abc import Sequence

import numpy as np

from grpo_megatron.types import PromptImage


def positions_of(num_tokens: int, images: Sequence[PromptImage]) -> np.ndarray:
    """Positions of a sample of T tokens, a prompt with these images and its completion: int64
    [3, T], in time, height and width. None is larger than T - 1."""
    parts = []
    place = 0
    position = 0
    for image in images:
        num_text = image.start - place
        parts.append(np.tile(np.arange(position, position + num_text), (3, 1)))
        position += num_text
        rows, columns = np.indices((image.rows, image.columns)).reshape(2, -1)
        parts.append(position + np.stack([np.zeros_like(rows), rows, columns]))
        position += max(image.rows, image.columns)
        place = image.start + image.num_tokens
    num_text = num_tokens - place
    parts.append(np.tile(np.arange(position, position + num_text), (3, 1)))
    return np.concatenate(parts, 1).astype(np.int64)
