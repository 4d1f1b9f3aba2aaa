"""Model families: `families/<model_type>.toml` is all that is known of one (see `parts/base.toml`).

The tables drive import, export, publishing and digests (`weights.parameters`), the reading of
config.json (`plan.hf_config`) and Megatron's configuration (`trainer.megatron.model_config`)."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from grpo_megatron import assets
from grpo_megatron.config.suggest import did_you_mean, nearest
from grpo_megatron.config.toml_file import read_toml
from grpo_megatron.errors import ConfigError, raised_as

_FOLDER = Path(__file__).with_name("families")
NOT = "not "
DERIVED = ("num_key_value_heads", "head_dim", "moe_layers", "shared_expert_intermediate_size")
"""Fields that every model has, beside those of its config.json (`plan.hf_config.derived`)."""


class Fields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The inventory of config.json: every field that the family may have."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    present: tuple[str, ...] = ()  # also if null: transformers' own default is something else
    null: tuple[str, ...] = ()  # may be null only
    nullable: tuple[str, ...] = ()  # of those with a default: null is another value
    rope: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    default: dict[str, Any] = {}
    fixed: dict[str, list[Any]] = {}  # accepted values; `a.b` is field b of table a

    @property
    def known(self) -> set[str]:
        """Names of all fields that config.json may have, tables by their own name."""
        parts = (
            self.required,
            self.optional,
            self.present,
            self.null,
            self.rope,
            self.ignored,
            self.default,
            self.fixed,
        )
        names: set[str] = set()
        for part in parts:
            names.update(name.split(".")[0] for name in part)
        return names


class Stacked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of checkpoint files that holds matrices of all experts of a layer."""

    inputs: str  # the field of config.json that says how many the matrices have
    matrices: tuple[str, ...]  # those of one expert, by the names that they have elsewhere


class Reference(NamedTuple):
    """A field of config.json that a setting reads, and what stands before its `$`."""

    field: str
    negation: str  # "" or NOT

    def value(self, fields: Mapping[str, Any]) -> Any:
        """Return what the setting is, given all fields."""
        if self.negation == NOT:
            return not fields[self.field]
        return fields.get(self.field)


class Family(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file of `plan/families/` says of the models of one `model_type`."""

    name: str
    model: dict[str, str]
    layer: dict[str, str | list[str]]
    spellings: dict[str, str]
    aliases: dict[str, list[str]]
    fields: Fields
    rope: dict[str, dict[str, Any]]
    megatron: dict[str, Any]
    engine: dict[str, Any] = {}
    architecture: str = ""  # vLLM's name of it
    layer_prefix: str = "model.layers.{layer}."  # begins the names of a layer's tensors
    module_prefix: str = ""  # begins those of its modules in transformers, if not as its tensors'
    tower: str = ""  # of a model that sees: whose vision tower it has
    tower_prefix: str = "visual."  # begins the names of a vision tower's
    stacked: dict[str, Stacked] = {}  # by the tensor of a layer in files
    text_table: bool = False  # transformers reads the text's fields in a table `text_config` only
    classifies: bool = True  # transformers has its `…ForSequenceClassification`
    same_code_as: str = ""  # family with the same code, where transformers does not carry this one
    lacks: str = ""  # what Megatron-Core has no layer for; such a family is refused with it

    @property
    def architecture_of_scalars(self) -> str:
        """The class of a reward model, as transformers and vLLM name it."""
        return self.architecture.replace("ForCausalLM", "ForSequenceClassification")

    @property
    def file(self) -> str:
        """The file of its tables, for messages."""
        return assets.display(_FOLDER / f"{self.name}.toml")

    def module_of(self, tensor: str) -> str:
        """Return what transformers calls the tensor of a layer in its modules."""
        if not self.module_prefix:
            return tensor
        before, _, _ = self.layer_prefix.partition("{layer}")
        instead, _, _ = self.module_prefix.partition("{layer}")
        return instead + tensor.removeprefix(before)

    def reference(self, setting: str) -> Reference | None:
        """Return what a setting of `[megatron]` reads; None for a constant."""
        value = self.megatron[setting]
        if not isinstance(value, str) or "$" not in value:
            return None
        negation, _, field = value.partition("$")
        return Reference(field, negation)


def family_names() -> list[str]:
    """Return names of all families."""
    return sorted(path.stem for path in _FOLDER.glob("*.toml"))


@cache
def family_of(model_type: str | None) -> Family:
    """Return the family of a `model_type`. Raises ConfigError where there is none, or Megatron-Core
    cannot compute it."""
    known = family_names()
    if model_type not in known:
        computed = [name for name in known if not tables_of(name).get("lacks")]
        near = nearest(str(model_type), computed) or computed
        raise ConfigError(
            f"model_type {model_type!r} is not supported",
            where="config.json",
            remedy=f"known families: {', '.join(near)}",
        )
    file = assets.display(_FOLDER / f"{model_type}.toml")
    with raised_as(
        ConfigError,
        "not the tables of a model family",
        msgspec.ValidationError,
        where=file,
        remedy="plan/families/parts/base.toml says which tables there are, and what they hold",
    ):
        family = msgspec.convert({"name": model_type, **tables_of(model_type)}, Family)
    _refuse_unknown_references(family, file)
    others = [name for name in known if name != model_type]
    if family.same_code_as and family.same_code_as not in others:
        raise ConfigError(
            f"{family.name} has the same code as {family.same_code_as!r}, which is no other family",
            where=file,
            remedy=did_you_mean(family.same_code_as, others),
        )
    if family.lacks:
        raise ConfigError(
            f"model_type {model_type!r} is not supported: {family.lacks}", where="config.json"
        )
    return family


def _refuse_unknown_references(family: Family, file: str) -> None:
    """ConfigError where `[megatron]` reads a field of config.json that the family cannot have, or
    not as one is read."""
    known = family.fields.known | set(DERIVED)
    for name in family.megatron:
        reference = family.reference(name)
        if reference is None:
            continue
        if reference.negation not in ("", NOT):
            raise ConfigError(
                f"megatron.{name} reads {family.megatron[name]!r}",
                where=file,
                remedy='write "$field" or "not $field"',
            )
        if reference.field not in known:
            raise ConfigError(
                f"megatron.{name} reads ${reference.field}, which is no field of {family.name}",
                where=file,
                remedy=did_you_mean(reference.field, known),
            )


@cache
def tables_of(name: str) -> dict[str, Any]:
    """Return the tables of a family or a part: its own, over those of the parts that it extends, of
    which a later one overrides an earlier. Raises ConfigError where it extends what does not
    exist."""
    file = _FOLDER / f"{name}.toml"
    if not file.exists():
        file = _FOLDER / "parts" / f"{name}.toml"
    toml = read_toml(file)
    own = dict(toml.values)
    merged: dict[str, Any] = {}
    for part in own.pop("extends", ()):
        if part not in _extensible():
            raise ConfigError(
                f"{file.stem} extends {part!r}, which is no part and no family",
                where=toml.where(("extends",)),
                remedy=did_you_mean(part, _extensible()),
            )
        merged = _merge(merged, tables_of(part))
    whole: dict[str, Any] = _merge(merged, own)
    return whole


@cache
def numbered_pattern(name: str) -> re.Pattern[str]:
    """Return what matches the names that a table writes with `{layer}`, `{expert}`, ...: each is a
    number, and a group of that name."""
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d+)", re.escape(name)))


def _extensible() -> list[str]:
    """Return names of what the tables of a family may extend: parts, and other families."""
    return sorted(path.stem for path in _FOLDER.glob("parts/*.toml")) + family_names()


def _merge(below: Any, above: Any, path: tuple[str, ...] = ()) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        merged = dict(below)
        for key, value in above.items():
            if key in below:
                value = _merge(below[key], value, (*path, key))
            merged[key] = value
        return merged
    are_lists_of_names = path[:1] == ("fields",) and len(path) == 2
    if are_lists_of_names:
        return [*below, *above]
    return above
