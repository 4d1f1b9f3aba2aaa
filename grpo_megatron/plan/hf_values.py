"""Whether the values in a `config.json` can be those of a model: types, ranges, what divides what.

Fields have the names that `hf_config.unified` gives them; one that is null, or not there, is left
to its default."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from grpo_megatron.errors import ConfigError

_TABLES = ("rope_scaling", "rope_parameters", "quantization_config", "vision_config")
_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "kv_lora_rank",
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "decoder_sparse_step",
    "num_experts",
)
"""At least 1."""
_COUNTS = (
    "intermediate_size",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "num_experts_per_tok",
    "n_shared_experts",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
    "n_group",
    "topk_group",
)
"""At least 0, which says of some that the model has none."""
_FLAGS = (
    "attention_bias",
    "mlp_bias",
    "norm_topk_prob",
    "tie_word_embeddings",
    "truncate",
    "use_qk_norm",
    "use_sliding_window",
)
_POSITIVE_NUMBERS = (
    "rope_theta",
    "rms_norm_eps",
    "factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "low_freq_factor",
    "high_freq_factor",
    "routed_scaling_factor",
)
_NUMBERS = ("mscale", "mscale_all_dim")
_LISTS_OF_LAYERS = ("layer_types", "moe_layer_freq")


def refuse_wrong_types(fields: Mapping[str, Any]) -> None:
    """ConfigError for a table, a flag or a list of layers that is none, and for a size or a number
    that is no such or out of its range."""
    for name in _TABLES:
        value = fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {value!r} is no table", remedy="write a table, or null")
    refuse_wrong_values(fields)
    _refuse_other_layers(fields.get("mlp_only_layers"))
    quantisation = fields.get("quantization_config")
    if quantisation is not None and quantisation.get("quant_method") is None:
        raise ConfigError(
            f"quantization_config = {quantisation} has no quant_method",
            remedy="copy it from the original checkpoint, or write null where weights are not "
            "quantised",
        )


def refuse_wrong_values(fields: Mapping[str, Any]) -> None:
    """ConfigError for a flag of a `config.json`, or of its table of rotary embeddings, that is
    none, and for a size or a number that is no such or out of its range."""
    for name in _FLAGS:
        value = fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise ConfigError(f"{name} = {value!r} is neither true nor false", remedy="write one")
    for name in _SIZES:
        _refuse_fewer(fields, name, 1)
    for name in _COUNTS:
        _refuse_fewer(fields, name, 0)
    for name in _POSITIVE_NUMBERS:
        _refuse_outside(fields, name, lambda value: 0 < value < math.inf, "number above 0")
    for name in _NUMBERS:
        _refuse_outside(fields, name, math.isfinite, "finite number")
    _refuse_outside(
        fields,
        "original_max_position_embeddings",  # which authors write as 4096.0, too
        lambda value: value >= 1 and value % 1 == 0,
        "whole number of at least 1",
    )
    _refuse_outside(
        fields,
        "partial_rotary_factor",
        lambda value: 0 < value <= 1,
        "number above 0 and at most 1",
    )
    _refuse_crossed_frequencies(fields)


def _refuse_outside(
    fields: Mapping[str, Any], name: str, is_allowed: Callable[[float], bool], allowed: str
) -> None:
    value = fields.get(name)
    if value is None or (_is_number(value) and is_allowed(value)):
        return
    raise ConfigError(
        f"{name} = {value!r} is no {allowed}", remedy="copy it from the original checkpoint"
    )


def _refuse_crossed_frequencies(rope: Mapping[str, Any]) -> None:
    """ConfigError where Llama 3's scaling has no frequencies between its low and its high ones.
    Their types are checked."""
    low = rope.get("low_freq_factor")
    high = rope.get("high_freq_factor")
    if low is not None and high is not None and high <= low:
        raise ConfigError(
            f"high_freq_factor = {high} is not above low_freq_factor = {low}",
            remedy="copy both from the original checkpoint",
        )


def _refuse_other_layers(layers: Any) -> None:
    """ConfigError for a list of layers without experts that is none."""
    if layers is None:
        return
    are_layers = isinstance(layers, list)
    if are_layers:
        are_layers = all(_is_whole(layer) and layer >= 0 for layer in layers)
    if not are_layers:
        raise ConfigError(
            f"mlp_only_layers = {layers!r} is no list of layers",
            remedy="write their numbers, from 0, for example [0, 1], or [] for none",
        )


def refuse_contradictions(fields: Mapping[str, Any]) -> None:
    """ConfigError for sizes that do not fit each other. Their types are checked."""
    heads = fields["num_attention_heads"]
    kv_heads = fields.get("num_key_value_heads") or heads
    is_latent = fields.get("kv_lora_rank") is not None  # which has no heads of keys
    if heads % kv_heads and not is_latent:
        raise ConfigError(
            f"num_key_value_heads = {kv_heads} does not divide num_attention_heads = {heads}",
            remedy="every key-value head serves equally many attention heads",
        )
    num_layers = fields["num_hidden_layers"]
    for name in _LISTS_OF_LAYERS:
        value = fields.get(name)
        if isinstance(value, list) and len(value) != num_layers:
            raise ConfigError(
                f"{name} has {len(value)} entries, and num_hidden_layers is {num_layers}",
                remedy="it has one for each layer",
            )
    if fields.get("num_experts"):
        _refuse_experts(fields, fields["num_experts"])


def _refuse_experts(fields: Mapping[str, Any], num_experts: int) -> None:
    chosen = fields.get("num_experts_per_tok")
    if chosen is not None and not 1 <= chosen <= num_experts:
        raise ConfigError(
            f"num_experts_per_tok = {chosen} of {num_experts} experts",
            remedy=f"1 to {num_experts}",
        )
    groups = fields.get("n_group") or 1
    if num_experts % groups:
        raise ConfigError(
            f"n_group = {groups} does not divide the {num_experts} experts",
            remedy="groups of experts are of one size",
        )
    kept = fields.get("topk_group")
    if kept is None:
        kept = 1
    if not 1 <= kept <= groups:
        raise ConfigError(
            f"topk_group = {kept} of n_group = {groups} groups", remedy=f"1 to {groups}"
        )
    num_left = kept * (num_experts // groups)
    are_limited = fields.get("topk_method") != "greedy"
    if chosen is not None and are_limited and chosen > num_left:
        raise ConfigError(
            f"num_experts_per_tok = {chosen} experts, and the topk_group = {kept} groups that a "
            f"token may take them from have {num_left}",
            remedy=f"num_experts_per_tok = 1 to {num_left}, or a larger topk_group",
        )


def _refuse_fewer(fields: Mapping[str, Any], name: str, least: int) -> None:
    value = fields.get(name)
    if value is None:
        return
    if not _is_whole(value) or value < least:
        raise ConfigError(
            f"{name} = {value!r} is no whole number of at least {least}",
            remedy="copy it from the original checkpoint",
        )


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
