"""One declarative table per family: which Hugging Face tensors a Megatron parameter is made of.

A rule maps a *global* Megatron name (layer and expert numbers of the whole model) to Hugging
Face names. How a parameter is split over ranks is not in the table: it is read from the
parameter itself (`weights.shards`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from grpo_megatron.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern` fully matches the Megatron name; its groups fill `{0}`, `{1}` … of `names`.

    Kinds: `copy` 1:1; `qkv` q, k, v interleaved by query group; `gate_up` gate above up;
    `vocab` 1:1 with padded vocabulary rows.
    """

    pattern: str
    names: tuple[str, ...]
    kind: str = "copy"


_LAYER, _HF = r"decoder\.layers\.(\d+)\.", "model.layers.{0}."

# Each Megatron name in both spellings: local layers and Transformer Engine's fused ones.
_COMMON = (
    Rule(r"embedding\.word_embeddings\.weight", ("model.embed_tokens.weight",), "vocab"),
    Rule(r"output_layer\.weight", ("lm_head.weight",), "vocab"),
    Rule(r"decoder\.final_layernorm\.weight", ("model.norm.weight",)),
    Rule(_LAYER + r"(?:input_layernorm\.weight|self_attention\.linear_qkv\.layer_norm_weight)",
         (_HF + "input_layernorm.weight",)),
    Rule(_LAYER + r"(?:pre_mlp_layernorm\.weight|mlp\.linear_fc1\.layer_norm_weight)",
         (_HF + "post_attention_layernorm.weight",)),
    Rule(_LAYER + r"self_attention\.linear_proj\.weight", (_HF + "self_attn.o_proj.weight",)),
    Rule(_LAYER + r"mlp\.linear_fc1\.weight",
         (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), "gate_up"),
    Rule(_LAYER + r"mlp\.linear_fc2\.weight", (_HF + "mlp.down_proj.weight",)),
)

_GROUPED_QUERY_ATTENTION = (
    Rule(_LAYER + r"self_attention\.linear_qkv\.(weight|bias)",
         tuple(_HF + f"self_attn.{x}_proj.{{1}}" for x in "qkv"), "qkv"),
    Rule(_LAYER + r"self_attention\.([qk])_layernorm\.weight",
         (_HF + "self_attn.{1}_norm.weight",)),
)

_EXPERT = (r"mlp\.experts\.(?:local_experts\.(\d+)\.linear_fc{fc}\.weight"
           r"|linear_fc{fc}\.weight(\d+))")

_EXPERTS = (
    Rule(_LAYER + r"mlp\.router\.weight", (_HF + "mlp.gate.weight",)),
    Rule(_LAYER + _EXPERT.format(fc=1), (_HF + "mlp.experts.{1}.gate_proj.weight",
                                         _HF + "mlp.experts.{1}.up_proj.weight"), "gate_up"),
    Rule(_LAYER + _EXPERT.format(fc=2), (_HF + "mlp.experts.{1}.down_proj.weight",)),
)

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "qwen3": _COMMON + _GROUPED_QUERY_ATTENTION,
    "qwen3_moe": _COMMON + _GROUPED_QUERY_ATTENTION + _EXPERTS,
}


def rules_for(model_type: str) -> tuple[Rule, ...]:
    """Raises ConfigError for a family without a table."""
    if model_type not in FAMILIES:
        raise ConfigError(f"no weight table for model_type {model_type!r}; "
                          f"known: {sorted(FAMILIES)}", where="config.json")
    return FAMILIES[model_type]


def resolve(rules: tuple[Rule, ...], name: str) -> tuple[str, list[str]]:
    """(kind, Hugging Face names) of a global Megatron name. KeyError when no rule matches."""
    for rule in rules:
        match = re.fullmatch(rule.pattern, name)
        if match:
            groups = [group for group in match.groups() if group is not None]
            return rule.kind, [template.format(*groups) for template in rule.names]
    raise KeyError(f"no Hugging Face name for Megatron parameter {name!r}")
