"""A tiny model from a preset: configuration, tokenizer and random weights as a checkpoint."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from grpo_megatron.config.presets import ModelPreset
from grpo_megatron.data.character_tokenizer import (
    EOS_TOKEN_ID,
    PAD_TOKEN_ID,
    CharacterTokenizerConfig,
    write_character_tokenizer,
)
from grpo_megatron.errors import DataError


def write_tiny_model(directory: Path, preset: ModelPreset) -> None:
    """Write config.json, generation_config.json and the tokenizer (no weights).

    config.json is `[hf]` as it stands, not what transformers would make of it, so that export
    can copy it byte for byte.

    Raises:
        DataError: The preset describes no tokenizer that can be made.
    """
    if preset.checkpoint:
        raise DataError(f"{preset.name} is a released checkpoint, not a model to start at random",
                        where=str(preset.path), remedy="download "
                        f"{preset.checkpoint['repository']} and set model.path to its directory")
    try:
        tokenizer = CharacterTokenizerConfig.model_validate(preset.tokenizer)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(("tokenizer", *map(str, first["loc"])))
        raise DataError(f"model preset: {key}: {first['msg']}", where=str(preset.path)) from error
    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_character_tokenizer(directory, tokenizer)
    ends = {"eos_token_id": EOS_TOKEN_ID, "pad_token_id": PAD_TOKEN_ID}
    _write_json(directory / "config.json", {**preset.hf, "vocab_size": vocab_size, **ends})
    _write_json(directory / "generation_config.json", {**ends, "do_sample": True})


def init_weights(directory: Path, seed: int) -> None:
    """Write random fp32 weights beside config.json, with Hugging Face's per-expert names.

    The weights depend on config.json and `seed` only; the caller's random state is kept. Files
    appear under their final names once complete.

    Raises:
        DataError: transformers refuses the configuration.
    """
    # Imported here: torch takes seconds, and most users of this package never need it.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            _fill_padding_row(model)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"transformers cannot build the model: {error}",
                        where=str(directory / "config.json")) from error
    # save_pretrained also rewrites config.json in its own words; keep ours.
    partial = directory / ".weights.partial"
    shutil.rmtree(partial, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(partial)
    for file in sorted(partial.glob("*.safetensors*")):
        file.replace(directory / file.name)
    shutil.rmtree(partial)


def _fill_padding_row(model: Any) -> None:
    """transformers zeroes the embedding of the padding token. A policy can sample that token,
    and the gradient of RMSNorm at zero is 1 / sqrt(eps): one such sample in a batch made the
    gradient norm 160 instead of 1.5."""
    embedding = model.get_input_embeddings()
    if embedding.padding_idx is not None:
        embedding.weight.data[embedding.padding_idx].normal_(0.0, model.config.initializer_range)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
