"""The vision tower of a policy: transformers' own module, whole on every rank of the first pipeline
stage, and frozen. What it makes of an image takes the place of the embeddings of its tokens.

The patches are normalised here, in float32, as engines do it (`vllm.model_executor.layers.fusion`),
and rounded to the tower's type after that."""

from typing import Any

import numpy as np
import torch

from grpo_megatron.batching.row_images import RowImages
from grpo_megatron.device_copies import to_device
from grpo_megatron.errors import TrainerError
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of
from grpo_megatron.trainer.megatron.platform import device


def build_tower(hf: dict[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Make the tower with random weights of a type; it is not trained.

    Its rotary frequencies are no weights: no change of type or device reaches them
    (Megatron's Float16Module would round them)."""
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (  # takes seconds
        Qwen2_5_VisionTransformerPretrainedModel,
        Qwen2_5_VLVisionConfig,
    )

    vision = Qwen2_5_VLVisionConfig(**hf["vision_config"])
    vision._attn_implementation = "sdpa"
    tower: torch.nn.Module = Qwen2_5_VisionTransformerPretrainedModel(vision)
    for module in tower.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            frequencies = buffer.detach().clone()
            if not frequencies.is_meta:  # a model that is only described
                frequencies = frequencies.to(device())
            delattr(module, name)
            setattr(module, name, frequencies)  # an attribute as any other
    return tower.to(dtype).requires_grad_(False).eval()


class ImageFeatures:
    """What a tower makes of the images of a row."""

    def __init__(self, tower: torch.nn.Module, settings: ImageSettings):
        self._tower = tower
        self._settings = settings
        mean = torch.tensor(settings.mean)
        std = torch.tensor(settings.std)
        self._scale = settings.rescale_factor / std
        self._shift = -mean / std

    @torch.no_grad()
    def of(self, images: RowImages) -> torch.Tensor:
        """Return the features of the row's images, end to end: [features, H].

        Raises DataError where an image cannot be read, TrainerError where the tower makes another
        number of features than prompts have tokens for them."""
        parameter = next(self._tower.parameters())
        merge = self._settings.merge_size
        patches = []
        grid = []
        for image in images.images:
            content = images.folder.read(image.digest)
            patches.append(patches_of(content, image.rows, image.columns, self._settings))
            grid.append([1, image.rows * merge, image.columns * merge])
        pixels = to_device(torch.from_numpy(np.concatenate(patches)), parameter.device)
        normalised = self._normalised(pixels).to(parameter.dtype)
        places = to_device(torch.tensor(grid), parameter.device)
        features: torch.Tensor = self._tower(normalised, grid_thw=places).pooler_output
        num_tokens = sum(image.num_tokens for image in images.images)
        if len(features) != num_tokens:
            raise TrainerError(
                f"the vision tower makes {len(features)} features of {num_tokens} image tokens",
                where="vision_config",
                remedy="is config.json of this checkpoint? spatial_merge_size and patch_size "
                "decide how many there are",
            )
        return features

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale and shift colours, uint8 [P, D] to fp32 [P, D]."""
        by_colour = pixels.reshape(len(pixels), len(self._scale), -1)
        scale = self._scale.to(pixels.device)[:, None]
        shift = self._shift.to(pixels.device)[:, None]
        return (by_colour * scale + shift).reshape(pixels.shape)
