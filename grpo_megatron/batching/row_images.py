"""The images of a packed row, and the positions of its tokens.

Tokens of images have positions in time, height and width, as Qwen2-VL counts them
(arXiv:2409.12191):

    tokens    a b [0,0] [0,1] [0,2] [1,0] [1,1] [1,2] c d     # an image of 2 rows, 3 columns
    time      0 1   2     2     2     2     2     2   5 6
    height    0 1   2     2     2     3     3     3   5 6
    width     0 1   2     3     4     2     3     4   5 6

Text after an image goes on behind its longer side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.batching.prefix_rows import RowTree
from grpo_megatron.batching.row_split import RowSplit
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.types import PromptImage


@dataclass(frozen=True)
class RowImages:
    """The images of a row, each once, and which tokens of the row are theirs; or of those that a
    context-parallel rank computes."""

    folder: ImageFolder
    images: tuple[PromptImage, ...]
    """Their features lie end to end; where they are in a prompt is not said here."""
    places: np.ndarray
    """Tokens of images in the row, int64 [m], ascending."""
    features: np.ndarray
    """The feature that is there, int64 [m]."""

    def of_rank(self, split: RowSplit, rank: int) -> RowImages | None:
        """Return the images with the places of a context-parallel rank's tokens of them among its
        own tokens; None where it has none."""
        if split.is_whole:
            return self
        is_own = split.owners[self.places] == rank
        if not is_own.any():
            return None
        return replace(
            self, places=split.places[self.places[is_own]], features=self.features[is_own]
        )


def row_images(table: SampleTable, table_rows: np.ndarray, tree: RowTree) -> RowImages | None:
    """Find the images of a row and the tokens that they are; None where it has none."""
    numbers: dict[PromptImage, int] = {}  # of images of one content and size
    starts: list[int] = []  # of their features
    num_features = 0
    places = [np.empty(0, np.int64)]
    features = [np.empty(0, np.int64)]
    for row, token_rows in zip(table_rows.tolist(), tree.token_rows, strict=True):
        for image in table.images(row):
            content = replace(image, start=0)
            if content not in numbers:
                numbers[content] = len(numbers)
                starts.append(num_features)
                num_features += image.num_tokens
            own = np.arange(image.num_tokens)
            places.append(token_rows[image.start + own])
            features.append(starts[numbers[content]] + own)
    if not numbers:
        return None
    # a token that several samples share is there once
    distinct, firsts = np.unique(np.concatenate(places), return_index=True)
    return RowImages(
        folder=table.image_folder,
        images=tuple(numbers),
        places=distinct,
        features=np.concatenate(features)[firsts],
    )


def positions_with_images(table: SampleTable, table_rows: np.ndarray, tree: RowTree) -> np.ndarray:
    """Positions in time, height and width of every token of a row, int64 [3, T]."""
    positions = np.tile(tree.positions, (3, 1))
    for row, token_rows in zip(table_rows.tolist(), tree.token_rows, strict=True):
        positions[:, token_rows] = positions_of(len(token_rows), table.images(row))
    return positions


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
