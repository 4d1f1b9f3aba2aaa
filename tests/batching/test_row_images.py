"""Positions in time, height and width; which tokens of a row are images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.image_folder import ImageFolder
from grpo_megatron.batching.prefix_rows import SamplePaths, lay_out
from grpo_megatron.batching.row_images import RowImages, positions_of
from grpo_megatron.batching.row_split import split_row
from grpo_megatron.errors import DataError
from grpo_megatron.types import PromptImage


def test_the_example_of_the_module():
    found = positions_of(10, [PromptImage("", 2, 2, 3)])
    assert found.tolist() == [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6],
    ]


def test_context_parallel_ranks_have_the_tokens_of_images_between_them():
    """Among each one's own tokens, and every one once."""
    lengths = np.array([23, 9], np.int64)
    split = split_row(lay_out(SamplePaths.without_sharing(lengths)), 2, 2)
    places = np.array([3, 4, 5, 6, 25, 26])
    features = np.array([0, 1, 2, 3, 0, 1])
    whole = RowImages(ImageFolder(Path()), (PromptImage("a", 0, 2, 2),), places, features)
    found = {}
    for rank in range(2):
        part = whole.of_rank(split, rank)
        assert part.images == whole.images
        rows = split.own(rank)[part.places]
        found |= dict(zip(rows.tolist(), part.features.tolist(), strict=True))
    assert found == dict(zip(places.tolist(), features.tolist(), strict=True))
    alone = split_row(lay_out(SamplePaths.without_sharing(lengths)), 1, 2)
    assert whole.of_rank(alone, 0) is whole
    first = RowImages(whole.folder, whole.images, split.own(0)[:2], features[:2])
    assert first.of_rank(split, 1) is None


def test_text_alone_has_one_position_three_times():
    assert positions_of(3, []).tolist() == [[0, 1, 2]] * 3


def test_positions_are_those_of_transformers():
    """Of two images with text before, between and behind them, and of one at the very start."""
    import torch
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 8,
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "bos_token_id": 0,
            "eos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]},
        },
        vision_config={"depth": 1, "hidden_size": 8, "num_heads": 1, "out_hidden_size": 8},
    )
    model = Qwen2_5_VLForConditionalGeneration(config).model
    for images, num_tokens in (
        ([PromptImage("", 3, 2, 3), PromptImage("", 11, 4, 1)], 18),
        ([PromptImage("", 0, 1, 2)], 4),
    ):
        is_image = torch.zeros(1, num_tokens, dtype=torch.long)
        for image in images:
            is_image[0, image.start : image.start + image.num_tokens] = 1
        grid = torch.tensor([[1, 2 * image.rows, 2 * image.columns] for image in images])
        expected, _ = model.get_rope_index(
            torch.zeros_like(is_image), mm_token_type_ids=is_image, image_grid_thw=grid
        )
        np.testing.assert_array_equal(positions_of(num_tokens, images), expected[:, 0])


def test_a_folder_notices_other_bytes(tmp_path):
    folder = ImageFolder(tmp_path / "images")
    digest = folder.keep(b"some bytes")
    assert folder.keep(b"some bytes") == digest
    assert folder.read(digest) == b"some bytes"
    step = ImageFolder(tmp_path / "step" / "images")
    folder.link_to(step, [digest, digest])
    assert step.read(digest) == b"some bytes"
    (tmp_path / "images" / digest).write_bytes(b"other bytes")
    with pytest.raises(DataError, match="not the one of its name"):
        folder.read(digest)
    with pytest.raises(DataError, match="is not there"):
        folder.link_to(ImageFolder(tmp_path / "other"), ["0" * 64])


def test_a_run_that_begins_anew_mends_its_images(tmp_path):
    """Else each step that is deleted and sampled anew has the damaged image again."""
    digest = ImageFolder(tmp_path).keep(b"some bytes")
    (tmp_path / digest).write_bytes(b"10 as well")
    anew = ImageFolder(tmp_path)
    assert anew.keep(b"some bytes") == digest
    assert anew.read(digest) == b"some bytes"
