"""Tensors of a family under the names that another family has for them."""

import re
from collections.abc import Callable, Mapping

from grpo_megatron.plan.family import Family, family_of

_NUMBER = re.compile(r"\\\{(\w+)\\\}")
"""`{layer}` in an escaped name."""


def transformers_type(model_type: str) -> str:
    """Return the `model_type` under which transformers has the code of a family."""
    return family_of(model_type).same_code_as or model_type


def renamer(model_type: str, other: str) -> Callable[[str], str]:
    """Return what gives the name of a tensor of one family in another one: that of the same part
    of the same Megatron parameter. A tensor of no parameter keeps its name."""
    theirs = _templates(family_of(other))
    patterns = []
    for parameter, names in _templates(family_of(model_type)).items():
        for name, wanted in zip(names, theirs.get(parameter, ()), strict=False):
            pattern = _NUMBER.sub(r"(?P<\1>\\d+)", re.escape(name))
            patterns.append((re.compile(pattern), wanted))

    def renamed(tensor: str) -> str:
        for pattern, wanted in patterns:
            match = pattern.fullmatch(tensor)
            if match is not None:
                return wanted.format(**match.groupdict())
        return tensor

    return renamed


def _templates(family: Family) -> Mapping[str, list[str]]:
    """Return the names of tensors by Megatron parameter, whole, with `{layer}` and `{expert}`."""
    found = {parameter: [name] for parameter, name in family.model.items()}
    for parameter, names in family.layer.items():
        if isinstance(names, str):
            names = [names]
        found[parameter] = [family.layer_prefix + name for name in names]
    return found
