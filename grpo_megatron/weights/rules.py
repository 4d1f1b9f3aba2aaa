"""Which Hugging Face tensors a Megatron parameter is made of, by the family's table.

Names are *global* (layer and expert numbers of the whole model). How a parameter is split over
ranks is not in the table: it is read from the parameter itself (`trainer.shards`).
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import unified

_LAYER, _HF_LAYER = "decoder.layers.{layer}.", "model.layers.{layer}."
_KINDS = {".linear_qkv.": "qkv", ".linear_fc1.": "gate_up", "word_embeddings.": "vocab",
          "output_layer.": "vocab"}


@dataclass(frozen=True, slots=True)
class Rule:
    """`pattern` fully matches the Megatron name; its groups fill `{layer}`, `{expert}` of `names`.

    Kinds: `copy` 1:1; `qkv` q, k, v interleaved by query group; `gate_up` gate above up;
    `vocab` 1:1 with padded vocabulary rows."""

    pattern: re.Pattern[str]
    names: tuple[str, ...]
    kind: str = "copy"


@cache
def rules_for(model_type: str) -> tuple[Rule, ...]:
    """The family's table, every parameter in both spellings: plain layers and fused ones.

    Raises ConfigError for an unknown family, or one that Megatron-Core cannot compute."""
    family = family_of(model_type)
    rules = [_rule(name, name, tensor) for name, tensor in family.model.items()]
    for name, tensors in family.layer.items():
        hf = [_HF_LAYER + t for t in ([tensors] if isinstance(tensors, str) else tensors)]
        spellings = [name, *(fused for fused, plain in family.spellings.items() if plain == name)]
        rules += [_rule(_LAYER + spelling, name, *hf) for spelling in spellings]
    return tuple(rules)


def _rule(spelling: str, name: str, *tensors: str) -> Rule:
    kind = next((kind for part, kind in _KINDS.items() if part in name), "copy")
    pattern = re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(spelling))
    return Rule(re.compile(pattern), tensors, kind)


def resolve(rules: tuple[Rule, ...], name: str) -> tuple[str, list[str]]:
    """(kind, Hugging Face names) of a global Megatron name. KeyError when no rule matches."""
    for rule in rules:
        match = rule.pattern.fullmatch(name)
        if match:
            return rule.kind, [template.format(**match.groupdict()) for template in rule.names]
    raise KeyError(f"no Hugging Face name for Megatron parameter {name!r}")


def carried_names(hf: Mapping[str, Any], names: Iterable[str]) -> set[str]:
    """Tensors among `names` that belong to a checkpoint, but to no parameter of the trainer.

    Multi-token-prediction layers (after the last layer) are not trained by an RL objective, and
    rotary frequencies are computed: export may carry both along unchanged, or drop them."""
    fields = unified(hf)
    first = fields["num_hidden_layers"]
    extra = range(first, first + (fields.get("num_nextn_predict_layers") or 0))
    layers = {name: re.match(r"model\.layers\.(\d+)\.", name) for name in names}
    return {name for name, layer in layers.items() if layer and (
        int(layer[1]) in extra or name.endswith(".rotary_emb.inv_freq"))}
