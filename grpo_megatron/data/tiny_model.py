"""A tiny model from a preset: configuration, tokenizer and random weights as a checkpoint."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from grpo_megatron.config.base import Strict
from grpo_megatron.config.presets import ModelPreset
from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.plan.hf_config import as_transformers_reads

_SPECIAL = {"pad_token": "<|pad|>", "eos_token": "<|endoftext|>"}  # ids 0 and 1
_ENDS = {"eos_token_id": 1, "pad_token_id": 0}
_TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    **_SPECIAL,
    "clean_up_tokenization_spaces": False,
}
_VISION_MARKERS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
"""Fields of config.json, and the markers of a tokenizer whose ids they are."""
_CONTENTS_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Contents one after the other: a text model without roles has no tokens to mark turns with."""


class CharacterTokenizerConfig(Strict):
    """`[tokenizer]` of a tiny model's preset."""

    kind: Literal["characters"]
    """One token per character."""
    alphabet: str = Field(min_length=1)
    """Every character that a prompt or an answer may hold, once each."""
    markers: tuple[str, ...] = ()
    """Texts of the chat template with a special token each, which decoding leaves out."""
    end_of_turn: str | None = None
    """The marker that ends an answer, beside the end of text."""
    phrases: tuple[str, ...] = ()
    """Texts that are one token wherever they stand, and decoded like any other."""
    chat_template: str = _CONTENTS_ONLY
    """Jinja, as in tokenizer_config.json."""
    pad_to_multiple: int = Field(32, ge=1)
    """The vocabulary is filled up to a multiple of this."""

    @model_validator(mode="after")
    def _end_of_turn_is_a_marker(self) -> Self:
        if self.end_of_turn is not None and self.end_of_turn not in self.markers:
            raise ValueError(f"end_of_turn {self.end_of_turn!r} is not among the markers")
        return self


def write_tiny_model(directory: Path, preset: ModelPreset) -> None:
    """Write config.json, generation_config.json and the tokenizer (no weights). config.json is
    `[hf]` as it stands, but for a table `text_config` where transformers wants one, not what
    transformers would make of it: export copies it byte for byte.

    Raises DataError for a preset of a released checkpoint, and for a tokenizer table that is
    wrong."""
    if preset.checkpoint:
        raise DataError(
            f"{preset.name} is a released checkpoint, not a model to start at random",
            where=preset.file.display,
            remedy="download "
            f"{preset.checkpoint['repository']} and set model.path to its directory",
        )
    try:
        settings = CharacterTokenizerConfig.model_validate(preset.tokenizer)
    except ValidationError as error:
        first = error.errors()[0]
        where = preset.file.display
        key = ".".join(("tokenizer", *map(str, first["loc"])))
        raise DataError(f"model preset: {key}: {first['msg']}", where=where) from error
    tokenizer = _character_tokenizer(settings)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {**preset.hf, "vocab_size": tokenizer.get_vocab_size(), **_ENDS}
    processor = config.pop("image_processor", None)
    if processor is not None:
        for name, marker in _VISION_MARKERS.items():
            config[name] = tokenizer.token_to_id(marker)
        _write_json(directory / "preprocessor_config.json", processor)
    config = as_transformers_reads(config)
    generation: dict[str, Any] = {**_ENDS, "do_sample": True}
    if settings.end_of_turn is not None:
        ends = [_ENDS["eos_token_id"], tokenizer.token_to_id(settings.end_of_turn)]
        generation["eos_token_id"] = ends
    for name, content in (
        ("tokenizer_config", {**_TOKENIZER_CONFIG, "chat_template": settings.chat_template}),
        ("config", config),
        ("generation_config", generation),
    ):
        _write_json(directory / f"{name}.json", content)


def _write_json(file: Path, content: Any) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", "utf-8")


def init_weights(directory: Path, seed: int) -> None:
    """Write random fp32 weights beside config.json, named as in released checkpoints. They
    depend on config.json and `seed` only; files get their final names once complete."""
    # Imported here: torch takes seconds, and most users of this package never need it.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.utils import logging as transformers_logging

    with raised_as(
        DataError,
        "transformers cannot build the model",
        (OSError, ValueError, KeyError, TypeError),
        where=directory / "config.json",
    ):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            kind = AutoModelForCausalLM
            if hasattr(config, "vision_config"):
                kind = AutoModelForImageTextToText
            model = kind.from_config(config, dtype=torch.float32)
            embedding = model.get_input_embeddings()
            # transformers zeroes the padding token's. A policy can sample it, and the gradient of
            # RMSNorm at zero is 1 / sqrt(eps): one sample made the gradient norm 160, not 1.5.
            if embedding.padding_idx is not None:
                spread = config.get_text_config().initializer_range
                embedding.weight.data[embedding.padding_idx].normal_(0.0, spread)
    # save_pretrained also rewrites config.json in its own words; keep ours.
    partial = directory / ".weights.partial"
    shutil.rmtree(partial, ignore_errors=True)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(partial)
    for file in sorted(partial.glob("*.safetensors*")):
        file.replace(directory / file.name)
    shutil.rmtree(partial)


def _character_tokenizer(settings: CharacterTokenizerConfig) -> Tokenizer:
    """Padding, end of text, the alphabet, markers and phrases, then visible fillers: an untrained
    policy samples these too, and they must show in the decoded text instead of vanishing from a
    wrong answer."""
    for name, texts in (
        ("characters of the alphabet", settings.alphabet),
        ("markers and phrases", [*_SPECIAL.values(), *settings.markers, *settings.phrases]),
    ):
        for text, count in Counter(texts).items():
            if count > 1:
                raise DataError(
                    f"the {name} hold {text!r} more than once",
                    where="[tokenizer]",
                    remedy="remove the repetition",
                )
    tokens = [*_SPECIAL.values(), *settings.alphabet, *settings.markers, *settings.phrases]
    tokens += [f"<|unused_{i}|>" for i in range(-len(tokens) % settings.pad_to_multiple)]
    vocabulary = dict(zip(tokens, range(len(tokens)), strict=True))
    # No unknown token: the library then raises on a character outside of the alphabet.
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(
        [_added(token, special=True) for token in (*_SPECIAL.values(), *settings.markers)]
    )
    tokenizer.add_tokens([_added(phrase, special=False) for phrase in settings.phrases])
    return tokenizer


def _added(text: str, *, special: bool) -> AddedToken:
    return AddedToken(text, special=special, normalized=False)
