"""Tiny models that see, recorded samples with images, and what transformers computes for them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from grpo_megatron.batching.image_folder import IMAGES, ImageFolder
from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.data.tiny_model import init_weights
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.images import patches_of
from grpo_megatron.plan.model_facts import read_config
from grpo_megatron.types import Completion, Prompt, PromptImage, RolloutGroup, VersionSpan

VOCAB = 96
IMAGE_TOKEN = 90
VISION: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "vision_config": {
        "model_type": "qwen2_5_vl",
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 128,
        "fullatt_block_indexes": [1],
        "window_size": 112,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.1,
    },
}
"""As the authors of Qwen2.5-VL wrote it: the text's fields beside `vision_config`."""
DEEP_VISION: dict[str, Any] = {
    "model_type": "qwen3_vl",
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "tie_word_embeddings": False,
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 91,
    "vision_start_token_id": 92,
    "vision_end_token_id": 93,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": VOCAB,
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "default",
            "mrope_interleaved": True,
            "mrope_section": [6, 5, 5],
        },
        "initializer_range": 0.1,
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 3,
        "hidden_size": 64,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "num_position_embeddings": 49,
        "deepstack_visual_indexes": [0, 1],
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.1,
    },
}
"""As the authors of Qwen3-VL wrote it: features of two blocks go to the first two layers."""
SPARSE_VISION: dict[str, Any] = {
    **DEEP_VISION,
    "model_type": "qwen3_vl_moe",
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "text_config": {
        **DEEP_VISION["text_config"],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [2],
    },
    "vision_config": {**DEEP_VISION["vision_config"], "model_type": "qwen3_vl_moe"},
}
"""As the authors of Qwen3-VL with experts wrote it; the third layer has none."""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 28 * 28,
    "max_pixels": 28 * 28 * 64,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
DEEP_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 49},
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS = {
    "qwen2_5_vl": PROCESSOR,
    "qwen3_vl": DEEP_PROCESSOR,
    "qwen3_vl_moe": DEEP_PROCESSOR,
}
TOWERS = {"qwen2_5_vl": "visual.", "qwen3_vl": "model.visual.", "qwen3_vl_moe": "model.visual."}
"""How names of the tensors of a checkpoint's tower begin."""
SIZES = [[(40, 30)], [], [(100, 60), (28, 140)], [(200, 190)], [(40, 30)], [(40, 30)]]
"""Widths and heights of the images of each prompt, in pixels."""


def write_vision_model(directory: Path, seed: int = 0, hf: dict[str, Any] = VISION) -> str:
    """Write a random checkpoint; biases and norms are not those of a fresh model, either."""
    from safetensors.torch import load_file, save_file

    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(hf))
    processor = PROCESSORS[hf["model_type"]]
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    _write_tokenizer(directory)
    init_weights(directory, seed)
    tensors = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for tensor in tensors.values():
        if tensor.dim() == 1:
            tensor += 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return str(directory)


def _write_tokenizer(directory: Path) -> None:
    """Write one whose only texts are numbers and marks; engines load it, and do not use it."""
    from tokenizers import Tokenizer, models

    vocabulary = {f"t{number}": number for number in range(VOCAB)}
    for mark, number in (
        ("<|image_pad|>", IMAGE_TOKEN),
        ("<|video_pad|>", 91),
        ("<|vision_start|>", 92),
        ("<|vision_end|>", 93),
    ):
        del vocabulary[f"t{number}"]
        vocabulary[mark] = number
    Tokenizer(models.WordLevel(vocabulary)).save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t1"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


def png(width: int, height: int, seed: int) -> bytes:
    """Draw noise, which no scaling leaves as it is."""
    rng = np.random.default_rng(seed)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return file.getvalue()


def write_vision_samples(
    directory: Path,
    model: str,
    num_samples: int = 3,
    sizes_of_prompts: Sequence[Sequence[tuple[int, int]]] = SIZES,
) -> str:
    """Record ragged samples of prompts with images of these sizes, 0 to 2 of them each. The fifth
    prompt has the tokens of the first, and another image; the sixth has its tokens and image."""
    rng = np.random.default_rng(0)
    settings = ImageSettings.of_model(read_config(Path(model)))
    working = begin_step(directory)
    folder = ImageFolder(working / IMAGES)
    groups = []
    for number, sizes in enumerate(sizes_of_prompts):
        text = np.random.default_rng(0 if number in (0, 4, 5) else number)
        ids = text.integers(0, IMAGE_TOKEN, 3).tolist()
        images = []
        for place, (width, height) in enumerate(sizes):
            seed = 0 if number in (0, 5) else 10 * number + place
            rows, columns = settings.tokens_of(width, height)
            digest = folder.keep(png(width, height, seed))
            ids.append(92)
            images.append(PromptImage(digest, len(ids), rows, columns))
            ids += [IMAGE_TOKEN] * (rows * columns)
            ids += [93, *text.integers(0, IMAGE_TOKEN, 2).tolist()]
        completions = []
        for _ in range(num_samples):
            count = int(rng.integers(1, 9))
            tokens = rng.integers(0, IMAGE_TOKEN, count).astype(np.int32)
            logprobs = -rng.exponential(3.0, count).astype(np.float32)
            completions.append(
                Completion(tokens, logprobs, (VersionSpan(0, 0, count),), "stop", "")
            )
        prompt = Prompt(str(number), "d", "", tuple(ids), "", images=tuple(images))
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
    rows = []
    for row in range(len(sizes_of_prompts) * num_samples):
        rows.append(SampleRow(0, row, row // num_samples, 0, float(rng.normal())))
    shard = write_shard(working / "rollout-0.safetensors", groups)
    components = {"first": rng.normal(size=len(rows)), "second": rng.normal(size=len(rows))}
    finish_step(directory, [shard], rows, StepFacts(), components)
    return str(directory)


def reference_features(model: str, samples: str, dtype: torch.dtype) -> np.ndarray:
    """Compute what transformers' tower makes of each image of a step, in the order in which they
    appear; fp32 [features, H]. Colours are normalised as engines do it, which is as its processor
    does but for the last bit."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    policy = _policy(model, dtype)
    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    table = SampleTable(Path(samples))
    settings = ImageSettings.of_model(read_config(Path(model)))
    scale = settings.rescale_factor / torch.tensor(settings.std)
    shift = -torch.tensor(settings.mean) / torch.tensor(settings.std)
    pictures = {}
    normalised = []
    for image in (image for row in range(len(table)) for image in table.images(row)):
        if image.digest in pictures:
            continue
        content = table.image_folder.read(image.digest)
        pictures[image.digest] = Image.open(io.BytesIO(content))
        patches = torch.from_numpy(patches_of(content, image.rows, image.columns, settings))
        by_colour = patches.reshape(len(patches), 3, -1) * scale[:, None] + shift[:, None]
        normalised.append(by_colour.reshape(patches.shape))
    pixels = torch.cat(normalised)
    seen = processor(list(pictures.values()), return_tensors="pt")
    torch.testing.assert_close(pixels, seen["pixel_values"], rtol=0, atol=1e-6)
    with torch.no_grad():
        found = policy.model.visual(pixels.to(dtype), grid_thw=seen["image_grid_thw"])
    return found.pooler_output.float().numpy()


def reference_logprobs(model: str, samples: str) -> list[np.ndarray]:
    """Compute the log-probs of every sample's completion by transformers alone, fp32: pixels, too,
    are those of its own image processor."""
    policy = _policy(model, torch.float32)
    with torch.no_grad():
        return [logprobs.numpy() for logprobs in _logprobs(policy, model, samples)]


def reference_gradients(model: str, samples: str) -> tuple[dict[str, np.ndarray], float]:
    """Differentiate minus the sum of these log-probs by transformers alone: the tower's gradients
    under the names of its tensors, fp32, and the norm of the gradients of all weights."""
    policy = _policy(model, torch.float32)
    for logprobs in _logprobs(policy, model, samples):
        (-logprobs.sum()).backward()
    of_tower = {}
    squares = 0.0
    for name, parameter in policy.named_parameters():
        squares += float(parameter.grad.double().square().sum())
        if name.startswith("model.visual."):
            name = TOWERS[policy.config.model_type] + name.removeprefix("model.visual.")
            of_tower[name] = parameter.grad.numpy()
    return of_tower, squares**0.5


def _policy(model: str, dtype: torch.dtype) -> Any:
    """Load a checkpoint with transformers' class of its family."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).eval()


def _logprobs(policy: Any, model: str, samples: str) -> Iterator[torch.Tensor]:
    """Yield the log-probs of every sample's completion, fp32 [n]."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    processor = Qwen2VLImageProcessorPil.from_pretrained(model)
    table = SampleTable(Path(samples))
    for row in range(len(table)):
        completion, _ = table.completion(row)
        ids = np.concatenate([table.prompt_ids(row), completion]).astype(np.int64)
        tokens = torch.from_numpy(ids)[None]
        seen = {}
        images = [
            Image.open(io.BytesIO(table.image_folder.read(image.digest)))
            for image in table.images(row)
        ]
        if images:
            seen = dict(processor(images, return_tensors="pt"))
            seen["mm_token_type_ids"] = (tokens == IMAGE_TOKEN).long()
        logits = policy(input_ids=tokens, **seen).logits[0]
        of_completion = logits[-len(completion) - 1 : -1].log_softmax(-1)
        places = torch.from_numpy(completion.astype(np.int64))[:, None]
        yield of_completion.gather(-1, places)[:, 0]
