"""The `config.json` of a tiny model of the same family: layers keep every part (latent attention,
shared experts, expert groups, dense first layers, biases, RoPE scaling), sizes shrink."""

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from grpo_megatron.data.tiny_model import init_weights
from grpo_megatron.image_settings import token_pixels
from grpo_megatron.plan.family import family_of, tables_of
from grpo_megatron.plan.fp8_weights import BLOCK
from grpo_megatron.plan.hf_config import as_transformers_reads, flattened
from grpo_megatron.plan.tensor_names import transformers_type

HEAD_DIM = 32
"""The smallest head that vLLM's CPU attention knows."""
_HIDDEN_SIZE = 64
_DENSE_WIDTH = 128
_EXPERT_WIDTH = 64
_LATENT_SIZES = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
_KV_HEADS_OF_BLOCKS = 8
"""With heads of `HEAD_DIM` columns, two blocks."""
_SIZES_OF_BLOCKS = {
    "hidden_size": BLOCK,
    "intermediate_size": 2 * BLOCK,
    "moe_intermediate_size": 2 * BLOCK,
    "shared_expert_intermediate_size": 2 * BLOCK,
    "q_lora_rank": BLOCK,
    "kv_lora_rank": BLOCK,
    "qk_rope_head_dim": 32,
}
_NUM_EXPERTS = 8
_NUM_GROUPS = 4
_MOST_EXPERTS_PER_TOKEN = 4
_MOST_QUERIES_PER_KEY = 4
_NUM_KV_HEADS = 2
_ORIGINAL_POSITIONS = 256
"""Positions that a model with scaled RoPE was made for: below the lengths of a rehearsal, so that
the scaling is in effect."""
_MOST_IMAGE_TOKENS = 16
_SMALL_TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"fullatt_block_indexes": [1]},
    "qwen3_vl": {"deepstack_visual_indexes": [0], "num_position_embeddings": 64},
}
"""What a tower of two blocks has beside its sizes."""
_VISION_MARKERS = {
    "vision_start_token_id": "<|vision_start|>",
    "image_token_id": "<|image_pad|>",
    "vision_end_token_id": "<|vision_end|>",
    "video_token_id": "<|video_pad|>",
}
"""Of Qwen's models that see: the field of config.json, and the token that it is the id of."""
_NOT_CARRIED = ("quantization_config", "auto_map", "transformers_version")
"""Block-quantised weights and remote code of the release; a random model has neither."""


def tiny_config(
    hf: Mapping[str, Any], num_layers: int, *, fills_blocks: bool = False
) -> dict[str, Any]:
    """Return the configuration `hf` (any dialect of config.json) with tiny sizes and `num_layers`
    layers, fields of a text beside those of its tower.

    fills_blocks: sizes of which two ranks have whole blocks of FP8 each (`plan.fp8_weights`).
    Vocabulary and special tokens are not set: they come from the tokenizer."""
    config = flattened(hf)
    for name in _NOT_CARRIED:
        config.pop(name, None)
    for name in ("num_nextn_predict_layers", "num_mtp_modules"):
        if config.get(name):
            config[name] = 0
    _shrink_layers(config, num_layers)
    _shrink_heads(config)
    _shrink_experts(config)
    _shrink_positions(config)
    _shrink_tower(config)
    if fills_blocks:
        _fill_blocks(config)
    return config


def _shrink_layers(config: dict[str, Any], num_layers: int) -> None:
    before = config["num_hidden_layers"]
    config["num_hidden_layers"] = num_layers
    if config.get("first_k_dense_replace"):
        config["first_k_dense_replace"] = 1
    if config.get("mlp_only_layers"):
        config["mlp_only_layers"] = [n for n in config["mlp_only_layers"] if n < num_layers]
    if config.get("max_window_layers"):
        config["max_window_layers"] = num_layers
    for name, value in config.items():
        has_one_per_layer = isinstance(value, list) and len(value) == before
        if has_one_per_layer:
            config[name] = value[:num_layers]


def _shrink_heads(config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    queries_per_key = min(heads // kv_heads, _MOST_QUERIES_PER_KEY)
    config["num_attention_heads"] = _NUM_KV_HEADS * queries_per_key
    if queries_per_key == 1:
        config["num_attention_heads"] = 4
    if config.get("num_key_value_heads"):
        config["num_key_value_heads"] = config["num_attention_heads"] // queries_per_key
    if config.get("kv_lora_rank"):
        for name, size in _LATENT_SIZES.items():
            if config.get(name) is not None:
                config[name] = size
        config["hidden_size"] = _HIDDEN_SIZE
    elif config.get("head_dim"):
        config["head_dim"] = HEAD_DIM
        config["hidden_size"] = _HIDDEN_SIZE
    else:
        config["hidden_size"] = HEAD_DIM * config["num_attention_heads"]
    if config.get("intermediate_size"):
        config["intermediate_size"] = _DENSE_WIDTH
    if config.get("initializer_range") is not None:
        config["initializer_range"] = 0.05


def _fill_blocks(config: dict[str, Any]) -> None:
    """Widen what `rollout.fp8` rounds."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    config["num_attention_heads"] = heads // kv_heads * _KV_HEADS_OF_BLOCKS
    if config.get("num_key_value_heads"):
        config["num_key_value_heads"] = _KV_HEADS_OF_BLOCKS
    for name, size in _SIZES_OF_BLOCKS.items():
        if config.get(name):
            config[name] = size
    has_head_dim = config.get("kv_lora_rank") or config.get("head_dim")
    if not has_head_dim:
        config["hidden_size"] = HEAD_DIM * config["num_attention_heads"]


def _shrink_experts(config: dict[str, Any]) -> None:
    names = ["num_experts", *tables_of("base")["aliases"]["num_experts"]]
    present = [name for name in names if config.get(name)]
    if not present:
        return
    for name in present:
        config[name] = min(config[name], _NUM_EXPERTS)
    selectable = config[present[0]]
    if (config.get("n_group") or 1) > 1:
        config["n_group"] = _NUM_GROUPS
        config["topk_group"] = min(config["topk_group"], _NUM_GROUPS // 2)
        selectable = selectable // _NUM_GROUPS * config["topk_group"]
    for name in ("num_experts_per_tok", "num_experts_per_token"):
        if config.get(name):
            config[name] = min(config[name], _MOST_EXPERTS_PER_TOKEN, selectable)
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if config.get(name):
            config[name] = _EXPERT_WIDTH


def _shrink_positions(config: dict[str, Any]) -> None:
    """Scaled RoPE keeps its factor, of a shorter original length."""
    longest = min(config.get("max_position_embeddings") or 4096, 4096)
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name)
        if scaling and scaling.get("original_max_position_embeddings"):
            factor = scaling.get("factor") or 1
            config[name] = {**scaling, "original_max_position_embeddings": _ORIGINAL_POSITIONS}
            longest = int(_ORIGINAL_POSITIONS * factor)
    config["max_position_embeddings"] = longest


def _shrink_tower(config: dict[str, Any]) -> None:
    """Two blocks, of which the last attends to all of an image, and images of few tokens. Features
    of the first one go to the first layer, where those of some blocks go to layers."""
    if "vision_config" not in config:
        return
    config["vision_config"] = {
        **config["vision_config"],
        **_SMALL_TOWERS[family_of(config["model_type"]).tower],
        "depth": 2,
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _DENSE_WIDTH,
        "num_heads": 2,
        "out_hidden_size": config["hidden_size"],
    }
    for name in ("rope_scaling", "rope_parameters"):
        rope = config.get(name)
        if rope and rope.get("mrope_section"):
            config[name] = {**rope, "mrope_section": _sections(rope["mrope_section"])}
    processor = dict(config["image_processor"])
    processor.pop("size", None)  # pixels under other names
    of_token = token_pixels(config) ** 2
    few_pixels = {"min_pixels": of_token, "max_pixels": of_token * _MOST_IMAGE_TOKENS}
    config["image_processor"] = processor | few_pixels


def _sections(released: Sequence[int]) -> list[int]:
    """Share out the angles of a tiny head as those of a released one are."""
    angles = HEAD_DIM // 2
    rest = [number * angles // sum(released) for number in released[1:]]
    return [angles - sum(rest), *rest]


# --- tokenizer and weights

_PAD = "<|pad|>"
_END = "<|endoftext|>"
_VOCABULARY_MULTIPLE = 64
_NEVER_IN_TEXT = (0xC0, 0xC1, *range(0xF5, 0x100))
"""Bytes that UTF-8 does not use. They end a completion too, so that a model that knows nothing ends
some of its completions within a few dozen tokens."""
_TEXT_FILES = (".json", ".jinja", ".model", ".txt")
"""Of a checkpoint, beside its weights: tokenizer, templates, configuration."""
# Tools by name and parameters only, which are few bytes; calls as Qwen3 writes them.
_CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n"
    "{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})\n"
    "{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
    "\n</tool_call>"
    "{% endfor %}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_checkpoint(
    directory: Path,
    config: Mapping[str, Any],
    special_tokens: Sequence[str],
    seed: int,
) -> None:
    """Write a random Hugging Face checkpoint of `config` with one token a byte.

    special_tokens: what the recipe's templates use beside text, one token each. Raises DataError
    where transformers cannot build the model."""
    directory.mkdir(parents=True, exist_ok=True)
    sees_images = "vision_config" in config
    markers: list[str] = []
    if sees_images:
        markers = list(_VISION_MARKERS.values())
    special = [_PAD, _END, "<|im_start|>", "<|im_end|>", *markers, *special_tokens]
    special = list(dict.fromkeys(special))
    tokenizer = _byte_tokenizer(special)
    tokenizer.save(str(directory / "tokenizer.json"))
    end = tokenizer.token_to_id(_END)
    pad = tokenizer.token_to_id(_PAD)
    stops = [end, tokenizer.token_to_id("<|im_end|>")]
    # a byte that Latin-1 prints has that character in the byte-level alphabet
    stops += [tokenizer.token_to_id(chr(byte)) for byte in _NEVER_IN_TEXT]
    files: dict[str, dict[str, Any]] = {
        "config": {
            **config,
            "vocab_size": tokenizer.get_vocab_size(),
            "bos_token_id": None,
            "eos_token_id": end,
            "pad_token_id": pad,
        },
        "generation_config": {"eos_token_id": stops, "pad_token_id": pad, "do_sample": True},
        "tokenizer_config": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": _PAD,
            "eos_token": _END,
            "clean_up_tokenization_spaces": False,
            "chat_template": _CHAT_TEMPLATE,
        },
    }
    if sees_images:
        files["preprocessor_config"] = files["config"].pop("image_processor")
        for field, marker in _VISION_MARKERS.items():
            files["config"][field] = tokenizer.token_to_id(marker)
    files["config"] = as_transformers_reads(files["config"])
    for name, content in files.items():
        _write_json(directory / f"{name}.json", content)
    _write_weights(directory, files["config"], seed)


def write_tiny_relative(
    directory: Path,
    source: Path,
    num_layers: int,
    seed: int,
) -> None:
    """Write a random checkpoint of the family of `source`, with its vocabulary and tokenizer.

    Raises DataError where transformers cannot build the model."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        is_of_weights = file.name.endswith(".index.json")
        if file.suffix in _TEXT_FILES and not is_of_weights:
            shutil.copy(file, directory / file.name)
    config = tiny_config(json.loads((source / "config.json").read_text("utf-8")), num_layers)
    config = as_transformers_reads(config)
    _write_json(directory / "config.json", config)
    _write_weights(directory, config, seed)


def _write_weights(directory: Path, config: Mapping[str, Any], seed: int) -> None:
    """Initialise the model of config.json, which is `config`: by the code of another family, where
    transformers does not carry this one."""
    model_type = config["model_type"]
    known_as = transformers_type(model_type)
    if known_as == model_type:
        init_weights(directory, seed)
        return
    from grpo_megatron.weights.transformers_model import rename_tensors  # torch takes seconds

    _write_json(directory / "config.json", {**config, "model_type": known_as})
    init_weights(directory, seed)
    rename_tensors(directory, of=known_as, to=model_type)
    _write_json(directory / "config.json", config)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8")


def _byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_fillers = -(len(alphabet) + len(special)) % _VOCABULARY_MULTIPLE
    special = [*special, *(f"<|unused_{number}|>" for number in range(num_fillers))]
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer
