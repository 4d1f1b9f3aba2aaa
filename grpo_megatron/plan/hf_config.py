"""One strict reading of `config.json`, whatever dialect wrote it: transformers 4 has `rope_theta`
and `rope_scaling`, transformers 5 `rope_parameters`; authors call the number of experts
`num_experts`, `num_local_experts` or `n_routed_experts`."""

import json
from collections.abc import Mapping
from typing import Any

from grpo_megatron.config.suggest import nearest
from grpo_megatron.errors import ConfigError
from grpo_megatron.plan.family import Family, family_names, family_of, tables_of
from grpo_megatron.plan.hf_values import (
    refuse_contradictions,
    refuse_wrong_types,
    refuse_wrong_values,
)
from grpo_megatron.plan.tower import refuse_deep_blocks, tower_settings


def model_fields(hf: Mapping[str, Any], *, where: str = "config.json") -> dict[str, Any]:
    """Return all fields that decide what the model computes, under one name each; beside the
    family's own: `num_key_value_heads`, `head_dim`, `moe_layers` (per layer: 1 with experts, 0
    dense), `shared_expert_intermediate_size` and `rope` (see `rope_fields`). Raises ConfigError for
    an unknown family, a field that is missing or unknown, or a value that the trainer does not
    compute."""
    family = family_of(hf.get("model_type"))
    try:
        fields = unified(hf)
        refuse_wrong_types(fields)
        _refuse_unknown(fields, family)
        _refuse_values(fields, family)
        _take_defaults(fields, family)
        for name in family.fields.required:
            if fields.get(name) is None:
                raise ConfigError(f"{name} is missing in the configuration of {family.name}")
        refuse_contradictions(fields)
        _refuse_one_expert(fields, family)
        fields["rope"] = rope_fields(fields, family)
        refuse_deep_blocks(fields)
        return fields | derived(fields)
    except ConfigError as error:
        raise ConfigError(error.message, where=where, remedy=error.remedy) from None


def _take_defaults(fields: dict[str, Any], family: Family) -> None:
    """Fill in fields that are missing. ConfigError for one that is null where transformers knows no
    null."""
    for name, value in family.fields.default.items():
        if name not in fields:
            fields[name] = value
        elif fields[name] is None and name not in family.fields.nullable:
            raise ConfigError(
                f"{name} = null is not supported for {family.name}",
                remedy=f"remove {name}, which is then {json.dumps(value)}",
            )


def _refuse_one_expert(fields: Mapping[str, Any], family: Family) -> None:
    """ConfigError where a token has one expert whose weight is divided by itself, and so always 1:
    Megatron-Core leaves a sigmoid score as it is then, and refuses a softmax."""
    if fields.get("num_experts_per_tok") != 1:
        return
    is_divided = not megatron_settings(family, fields).get("moe_router_pre_softmax")
    if is_divided:
        raise ConfigError(
            f"num_experts_per_tok = 1 is not supported for {family.name} where the weights of a "
            "token's experts are divided by their sum",
            remedy="supported: 2 and more",
        )


def computation(hf: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what weights of one and the same shape are computed with, in comparable form: rotary
    embedding, Megatron's settings, and those of a vision tower."""
    fields = model_fields(hf)
    settings = megatron_settings(family_of(hf["model_type"]), fields)
    return fields["rope"], settings, tower_settings(fields)


def other_computation(theirs: Mapping[str, Any], ours: Mapping[str, Any], owner: str) -> str:
    """Return the first in which `theirs` computes something else than `ours`, the config.json of
    `owner`, with weights of the same shapes; empty: nothing. ConfigError as of `model_fields`."""
    their_rope, their_settings, their_tower = computation(theirs)
    our_rope, our_settings, our_tower = computation(ours)
    if their_rope != our_rope:
        return f"its rotary embedding is {their_rope}, of {owner} {our_rope}"
    our_settings |= our_tower
    their_settings |= their_tower
    for name in our_settings | their_settings:
        found = their_settings.get(name)
        wanted = our_settings.get(name)
        if found != wanted:
            return f"{name} of its config.json is {found}, of {owner} {wanted}"
    return ""


def other_field(theirs: Mapping[str, Any], ours: Mapping[str, Any], owner: str) -> str:
    """Return the first field that may change what a model of any family computes, and that differs
    from that of `ours`, the config.json of `owner`; empty: none. First of all the family.

    A field that one of them lacks is taken for a default that another release wrote, unless the
    family's tables know another one: the weights are of the same names and shapes."""
    their_type = theirs.get("model_type")
    our_type = ours.get("model_type")
    if _code_of(their_type) != _code_of(our_type):
        return f"model_type of its config.json is {their_type!r}, of {owner} {our_type!r}"
    ignored = {*tables_of("base")["fields"]["ignored"], *_OF_USE}
    our_fields = _with_one_rope(unified(ours))
    their_fields = _with_one_rope(unified(theirs))
    for name in our_fields | their_fields:
        found = their_fields.get(name)
        wanted = our_fields.get(name)
        if name in ignored or (found is None and wanted is None):
            continue
        if wanted is None and not _is_as_without(our_type, name, found):
            return (
                f"{name} of its config.json is {found!r}, and {owner} has none, which computes "
                "something else"
            )
        if found is None and not _is_as_without(their_type, name, wanted):
            return (
                f"its config.json has no {name}, which computes something else than {wanted!r}, "
                f"that of {owner}"
            )
        is_told_by_both = found is not None and wanted is not None
        if is_told_by_both and _without_dtypes(found) != _without_dtypes(wanted):
            return f"{name} of its config.json is {found!r}, of {owner} {wanted!r}"
    return ""


def _code_of(model_type: Any) -> Any:
    """Return the family whose code computes a model, or of an unknown one its `model_type`."""
    if model_type not in family_names():
        return model_type
    return tables_of(model_type).get("same_code_as") or model_type


def _is_as_without(model_type: Any, name: str, value: Any) -> bool:
    """Whether a model computes the same where a field has this value and where config.json lacks
    it: of a family that is not known, or of a field whose default is not, yes."""
    if model_type not in family_names():
        return True
    tables = tables_of(model_type)["fields"]
    if name in tables.get("default", {}):
        return bool(value == tables["default"][name])
    if name in tables.get("null", ()) and name not in tables.get("present", ()):
        return False
    allowed = tables.get("fixed", {}).get(name)
    if allowed is None:
        return True
    values = [value]
    if isinstance(value, list) and not isinstance(allowed[0], list):
        values = value
    return all(one in allowed for one in values)


def _without_dtypes(value: Any) -> Any:
    """Return a value of a config.json; of a table, such as that of a tower, without the dtypes in
    which its weights are."""
    if not isinstance(value, Mapping):
        return value
    found = {}
    for name, part in value.items():
        if name not in ("dtype", "torch_dtype"):
            found[name] = _without_dtypes(part)
    return found


_OF_USE = ("attention_dropout", "max_position_embeddings", "quantization_config")
"""Fields of how a model is trained and served, not of what its weights compute."""


def _with_one_rope(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with theta in the table of rotary embeddings, as transformers 5 writes
    it, and the table under its newer name."""
    found = dict(fields)
    table = _rope_table(found, "rope_parameters") or _rope_table(found, "rope_scaling")
    found.pop("rope_scaling", None)
    theta = found.pop("rope_theta", None)
    found["rope_parameters"] = {"rope_type": "default", "rope_theta": theta, **table}
    return found


def megatron_settings(family: Family, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the family's `[megatron]` table with its references to fields replaced."""
    settings = {}
    for name, value in family.megatron.items():
        settings[name] = value
        reference = family.reference(name)
        if reference is not None:
            settings[name] = reference.value(fields)
    return settings


def engine_overrides(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of config.json as vLLM must read them to compute what transformers does: those
    that it asks for and transformers knows without, and no expert groups where the method ignores
    them. ConfigError as of `model_fields`."""
    fields = model_fields(hf)
    family = family_of(hf["model_type"])
    overrides = dict(family.engine)
    if not hf.get("architectures"):
        overrides["architectures"] = [family.architecture]
    if fields.get("topk_method") == "greedy":
        overrides |= {"n_group": 1, "topk_group": 1}
    return overrides


def unified(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same fields under one name each. Raises ConfigError where two names of one field
    disagree."""
    fields = flattened(hf)
    for name, others in tables_of("base")["aliases"].items():
        for other in others:
            value = fields.pop(other, None)
            if fields.get(name) is None and value is not None:
                fields[name] = value
            elif value is not None and fields[name] != value:
                raise ConfigError(f"{name} = {fields[name]!r} and {other} = {value!r} disagree")
    return fields


def flattened(hf: Mapping[str, Any], *, where: str = "config.json") -> dict[str, Any]:
    """Return the fields with those of `text_config` among them. Models that see have such a table
    where transformers 5 saved them; their authors wrote its fields beside `vision_config`.

    Raises ConfigError where a field of a known family is there twice, may change what the model
    computes, and differs: transformers reads the table, other programs what is beside it. Null is
    what transformers takes for it, not what stands beside the table."""
    fields = dict(hf)
    text = dict(fields.pop("text_config", None) or {})
    text.pop("model_type", None)
    if not text:
        return fields
    model_type = str(hf.get("model_type"))
    without_influence = set(text)
    if model_type in family_names():
        without_influence = {_TIED, *_ignored(model_type)}
        _tie_as_transformers(fields, text, has_table_alone="text_table" in tables_of(model_type))
    for name, value in text.items():
        if name in without_influence:
            fields.setdefault(name, value)
            continue
        if name in _OF_TABLE:
            if value is not None:
                fields[name] = value
            continue
        found = fields.get(name)
        if found is not None and not _is_same(name, found, value):
            raise ConfigError(
                f"{name} = {found!r} stands beside text_config, where it is {value!r}",
                where=where,
                remedy=f"remove {name} from beside text_config, which transformers reads",
            )
        fields[name] = value
    return fields


_TIED = "tie_word_embeddings"
_OF_TABLE = ("attention_dropout", "max_position_embeddings", "vocab_size")
"""Fields that may differ from those beside `text_config`, where the table's count: what reads them
reads the table, and a model whose embeddings were resized has their new number there alone."""


def _ignored(model_type: str) -> set[str]:
    """Return all names of the fields that do not change what a known family computes."""
    tables = tables_of(model_type)
    ignored = set(tables["fields"]["ignored"])
    for name, others in tables["aliases"].items():
        if name in ignored:
            ignored.update(others)
    return ignored


def _tie_as_transformers(
    fields: dict[str, Any], text: Mapping[str, Any], *, has_table_alone: bool
) -> None:
    """Leave in the fields of a model whether transformers ties its embeddings. It looks beside
    `text_config`; where a family was once written flat, also into it."""
    fields.setdefault(_TIED, False)
    if not has_table_alone and not fields[_TIED]:
        fields[_TIED] = text.get(_TIED, False)


def _is_same(name: str, one: Any, other: Any) -> bool:
    """Say whether two values of a field are one; of tables of rotary embeddings, in any spelling:
    transformers 4 calls the type of Qwen2.5-VL both mrope and default, and theta may be without."""
    are_tables = isinstance(one, Mapping) and isinstance(other, Mapping)
    if name not in ("rope_parameters", "rope_scaling") or not are_tables:
        return bool(one == other)
    tables = []
    for given in (one, other):
        table = _rope_table({name: given}, name)
        if table.get("rope_type") == "mrope":
            table["rope_type"] = "default"
        tables.append(table)
    first, second = tables
    if None in (first.get("rope_theta"), second.get("rope_theta")):
        first.pop("rope_theta", None)
        second.pop("rope_theta", None)
    return first == second


_BESIDE_TEXT = (
    "architectures",
    "dtype",
    "image_processor",
    "image_token_id",
    "model_type",
    "tie_word_embeddings",
    "torch_dtype",
    "video_token_id",
    "vision_config",
    "vision_end_token_id",
    "vision_start_token_id",
)
"""Fields of a model that sees which are not its text's."""


def as_transformers_reads(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields with those of the text in a table `text_config`, for a family that
    transformers reads that way only; others, and those that have the table, as they are. Inverts
    `flattened`. ConfigError for an unknown family."""
    if not family_of(fields.get("model_type")).text_table or "text_config" in fields:
        return dict(fields)
    beside = {name: value for name, value in fields.items() if name in _BESIDE_TEXT}
    text = {name: value for name, value in fields.items() if name not in _BESIDE_TEXT}
    text["model_type"] = f"{fields['model_type']}_text"
    return {**beside, "text_config": text}


def refuse_flat_text(hf: Mapping[str, Any], *, where: str) -> None:
    """Raise ConfigError for the config.json of a model whose text transformers reads from the table
    `text_config`, without one: it would take its own defaults."""
    model_type = hf.get("model_type")
    if model_type not in family_names() or not family_of(model_type).text_table:
        return
    if not hf.get("text_config"):
        raise ConfigError(
            f"{model_type} has its text's fields in a table text_config, which is missing",
            where=where,
            remedy="copy config.json of the original checkpoint",
        )


def derived(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields that follow from others, where config.json does not have them."""
    heads = fields["num_attention_heads"]
    num_shared = fields.get("n_shared_experts") or 0
    shared_width = num_shared * (fields.get("moe_intermediate_size") or 0)
    moe_layers = []
    if fields.get("num_experts"):
        moe_layers = _moe_layers(fields, fields["num_hidden_layers"])
    found = {
        "num_key_value_heads": fields.get("num_key_value_heads") or heads,
        "head_dim": fields.get("head_dim") or fields["hidden_size"] // heads,
        "moe_layers": moe_layers,
        "shared_expert_intermediate_size": fields.get("shared_expert_intermediate_size")
        or shared_width
        or None,
    }
    if fields.get("topk_method") == "greedy" or (fields.get("n_group") or 1) == 1:
        found |= {"n_group": None, "topk_group": None}
    return found


def _moe_layers(fields: Mapping[str, Any], num_layers: int) -> list[int]:
    """Return 1 for each layer with experts and 0 for the others, as each family's model code
    decides it."""
    frequency = fields.get("moe_layer_freq") or 1
    if isinstance(frequency, list):
        return [int(bool(has_experts)) for has_experts in frequency]
    step = fields.get("decoder_sparse_step") or 1
    dense = fields.get("mlp_only_layers") or ()
    first = fields.get("first_k_dense_replace") or 0
    pattern = []
    for layer in range(num_layers):
        is_due = (layer + 1) % step == 0 and layer % frequency == 0
        pattern.append(int(is_due and layer >= first and layer not in dense))
    return pattern


def rope_fields(fields: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """`type`, `theta`, `percent` (of the head that is rotated) and the type's own parameters;
    ConfigError without theta, for a type, or a parameter of it, that is not known, and for two
    tables that differ."""
    _refuse_two_ropes(fields)
    given = dict(fields.get("rope_parameters") or fields.get("rope_scaling") or {})
    refuse_wrong_values(given)
    old_kind = given.pop("type", None)
    kind = given.pop("rope_type", None)
    if kind is None:
        kind = old_kind
    if kind is None:
        kind = "default"
    theta = given.pop("rope_theta", None) or fields.get("rope_theta")
    percent = given.pop("partial_rotary_factor", None) or fields.get("partial_rotary_factor")
    found = {"type": kind, "theta": theta, "percent": percent or 1.0}
    if kind not in list(family.rope):
        raise ConfigError(
            f"rope type {kind!r} is not supported", remedy=f"supported: {', '.join(family.rope)}"
        )
    if found["percent"] != 1.0 and "partial_rotary_factor" not in family.fields.known:
        raise ConfigError(f"{family.name} rotates whole heads, not {found['percent']} of one")
    if found["theta"] is None:
        raise ConfigError("neither rope_theta nor rope_parameters.rope_theta is set")
    parameters = family.rope[kind]
    unknown = [name for name in given if name not in parameters]
    for name, default in parameters.items():
        found[name] = _rope_parameter(kind, name, default, given)
    if unknown:
        raise ConfigError(f"rope type {kind!r} has an unknown parameter: {', '.join(unknown)}")
    _refuse_sections(fields, found.get("mrope_section"))
    return found


def _rope_parameter(kind: str, name: str, default: Any, given: Mapping[str, Any]) -> Any:
    """Return the value of a rope type's parameter; ConfigError where it must be given and is
    not."""
    value = given.get(name)
    if value is None and default == "required":
        raise ConfigError(f"rope type {kind!r} needs {name}")
    if value is None:
        value = default
        if name in given and isinstance(default, bool):
            value = False  # as transformers reads a null
    if name == "original_max_position_embeddings":
        return int(value)
    return value


def _refuse_two_ropes(fields: Mapping[str, Any]) -> None:
    """ConfigError where the newer table of rotary embeddings and the older one say different
    things: transformers takes the older one, and then another theta than the newer one has."""
    newer = _rope_table(fields, "rope_parameters")
    older = _rope_table(fields, "rope_scaling")
    if not newer or not older or newer == older:
        return
    raise ConfigError(
        "rope_parameters and rope_scaling say different things: "
        f"{fields['rope_parameters']} and {fields['rope_scaling']}",
        remedy="write what is meant into rope_parameters, with rope_theta, and remove rope_scaling",
    )


def _rope_table(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a table of rotary embeddings with the newer names of its fields; empty where there is
    none."""
    table = dict(fields.get(name) or {})
    if not table:
        return table
    older_kind = table.pop("type", None)
    table.setdefault("rope_type", older_kind or "default")
    table.setdefault("rope_theta", fields.get("rope_theta"))
    return table


def _refuse_sections(fields: Mapping[str, Any], sections: Any) -> None:
    """ConfigError for sections that are not those of three positions, or not all of a head."""
    if sections is None:
        return
    head_dim = derived(fields)["head_dim"]
    are_three = isinstance(sections, list) and len(sections) == 3
    if not are_three or 2 * sum(sections) != head_dim:
        raise ConfigError(
            f"mrope_section = {sections} does not share out heads of {head_dim} features",
            remedy=f"three numbers whose sum is {head_dim // 2}",
        )


def _refuse_unknown(fields: Mapping[str, Any], family: Family) -> None:
    known = family.fields.known
    unknown = [name for name in fields if name not in known]
    if not unknown:
        return
    near = nearest(unknown[0], sorted(known))
    remedy = "remove it if it changes nothing"
    if near:
        remedy = f"did you mean {near[0]!r}?"
    raise ConfigError(
        f"{family.name} has no field {unknown[0]!r}; it may change what the model computes",
        remedy=remedy,
    )


def _field_at(fields: Mapping[str, Any], name: str) -> Any:
    """Return the value of `a.b`: field b of table a; None where there is none."""
    value: Any = fields
    for key in name.split("."):
        if not value:
            return None
        value = value.get(key)
    return value


def _refuse_values(fields: Mapping[str, Any], family: Family) -> None:
    for name, allowed in family.fields.fixed.items():
        found = _field_at(fields, name)
        values = [found]
        if isinstance(found, list) and not isinstance(allowed[0], list):
            values = found or [found]
        wrong = [value for value in values if value is not None and value not in allowed]
        if wrong:
            raise ConfigError(
                f"{name} = {wrong[0]!r} is not supported for {family.name}",
                remedy=f"supported: {', '.join(map(str, allowed))}",
            )
    for name in family.fields.null:
        if fields.get(name) is not None:
            raise ConfigError(
                f"{name} = {fields[name]!r} is not supported for {family.name}",
                remedy=f"supported: {name} = null",
            )
    for name in family.fields.present:
        if name not in fields:
            raise ConfigError(
                f"{name} is missing in the configuration of {family.name}",
                remedy=f"write it, as {name} = null if the model has none",
            )
