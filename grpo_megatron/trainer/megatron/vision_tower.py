"""The vision tower of a policy: transformers' own module, whole on every rank of the first pipeline
stage. What it makes of an image takes the place of the embeddings of its tokens.

The patches are normalised here, in float32, as engines do it (`vllm.model_executor.layers.fusion`),
and rounded to the tower's type after that.

Where it is trained, tensor-parallel ranks have the same tower and images, and each differentiates a
share: with sequence parallelism that of its own tokens, else an equal part. `sum_tower_gradients`
adds the shares, so that the gradient is the same on all of them, whatever kernels round."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.parallel_state import get_tensor_model_parallel_group

from grpo_megatron.batching.row_images import RowImages
from grpo_megatron.device_copies import to_device
from grpo_megatron.errors import ConfigError, TrainerError
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of
from grpo_megatron.plan.family import family_of
from grpo_megatron.trainer.megatron.platform import device


def build_tower(
    hf: dict[str, Any], dtype: torch.dtype, *, trains: bool = False, recomputes: bool = False
) -> torch.nn.Module:
    """Make the tower with random weights of a type.

    trains: its weights have gradients; recomputes: its blocks are then computed a second time in
    the backward, and keep their inputs only. Its rotary frequencies are no weights: no change of
    type or device reaches them (Megatron's Float16Module would round them)."""
    tower = _tower_of(hf)
    for module in tower.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            frequencies = buffer.detach().clone()
            if not frequencies.is_meta:  # a model that is only described
                frequencies = frequencies.to(device())
            delattr(module, name)
            setattr(module, name, frequencies)  # an attribute as any other
    tower = tower.to(dtype).requires_grad_(trains).eval()
    if trains and recomputes:
        recomputing: Any = tower
        recomputing.gradient_checkpointing_enable({"use_reentrant": False})
    return tower


def _tower_of(hf: dict[str, Any]) -> torch.nn.Module:
    """Return transformers' module of the model's family. Raises ConfigError for a family that has
    none here."""
    config_class: Any
    tower_class: Any
    tower_name = family_of(hf["model_type"]).tower
    if tower_name == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl  # takes seconds

        config_class = modeling_qwen2_5_vl.Qwen2_5_VLVisionConfig
        tower_class = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel
    elif tower_name == "qwen3_vl":
        from transformers.models.qwen3_vl import modeling_qwen3_vl

        config_class = modeling_qwen3_vl.Qwen3VLVisionConfig
        tower_class = modeling_qwen3_vl.Qwen3VLVisionModel
    else:
        raise ConfigError(
            f"no vision tower is known for model_type {hf['model_type']!r}", where="config.json"
        )
    # a config.json may call the type of its tower otherwise than this release of transformers
    config = config_class(**{**hf["vision_config"], "model_type": config_class.model_type})
    config._attn_implementation = "sdpa"
    tower: torch.nn.Module = tower_class(config)
    return tower


def sum_tower_gradients(towers: Iterable[torch.nn.Module]) -> None:
    """Add the shares of a trained tower's gradient over tensor-parallel ranks, in Megatron's
    buffers, where data-parallel ranks have met already. Collective."""
    group = get_tensor_model_parallel_group()
    if group.size() == 1:
        return
    for tower in towers:
        for parameter in tower.parameters():
            if parameter.requires_grad:
                described: Any = parameter  # Megatron's attribute
                dist.all_reduce(described.main_grad, group=group)


class _Touch(torch.autograd.Function):
    """Passes a tensor on, and gives weights that had no part in it a gradient of zeros: reductions
    that overlap with the backward wait for the gradient of every weight."""

    @staticmethod
    def forward(ctx: Any, passed: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*weights)
        return passed.view_as(passed)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        zeros = [weight.new_zeros(()).expand_as(weight) for weight in ctx.saved_tensors]
        return (gradients[0], *zeros)


class ImageFeatures:
    """What a tower makes of the images of a row."""

    def __init__(
        self, tower: torch.nn.Module, settings: ImageSettings, *, splits_sequences: bool = False
    ):
        """splits_sequences: tensor-parallel ranks have tokens of their own (sequence parallelism),
        instead of the same ones."""
        self._tower = tower
        self._splits_sequences = splits_sequences
        self._settings = settings
        mean = torch.tensor(settings.mean)
        std = torch.tensor(settings.std)
        self._scale = settings.rescale_factor / std
        self._shift = -mean / std

    def without_images(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of a row that has no images; a trained tower takes part in its
        backward, with a gradient of zeros."""
        trained = [weight for weight in self._tower.parameters() if weight.requires_grad]
        if not trained or not torch.is_grad_enabled():
            return embedded
        touched: torch.Tensor = _Touch.apply(  # type: ignore[no-untyped-call]  # torch's
            embedded, *trained
        )
        return touched

    def of(self, images: RowImages) -> list[torch.Tensor]:
        """Return the features of the row's images, end to end: [features, H], first those that
        take the place of embeddings, then those to be added after each of the first layers. Of
        their gradient this rank takes its share, see above.

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
        output = self._tower(normalised, grid_thw=places)
        levels: list[torch.Tensor] = [output.pooler_output]
        levels += getattr(output, "deepstack_features", None) or ()
        num_tokens = sum(image.num_tokens for image in images.images)
        if len(levels[0]) != num_tokens:
            raise TrainerError(
                f"the vision tower makes {len(levels[0])} features of {num_tokens} image tokens",
                where="vision_config",
                remedy="is config.json of this checkpoint? spatial_merge_size and patch_size "
                "decide how many there are",
            )
        num_with_same_tokens = get_tensor_model_parallel_group().size()
        for features in levels:
            if features.requires_grad and num_with_same_tokens > 1 and not self._splits_sequences:
                features.register_hook(lambda gradient: gradient / num_with_same_tokens)
        return levels

    def _normalised(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scale and shift colours, uint8 [P, D] to fp32 [P, D]."""
        by_colour = pixels.reshape(len(pixels), len(self._scale), -1)
        scale = self._scale.to(pixels.device)[:, None]
        shift = self._shift.to(pixels.device)[:, None]
        return (by_colour * scale + shift).reshape(pixels.shape)
