"""What shipped rewards ask of the arguments that a recipe gives them, before anything starts.

Each function raises RewardError, with what was meant where that can be told."""

import math
import re
from typing import Any

from grpo_megatron.errors import RewardError

_TAGS = ("answer_tag", "think_tag")
_BARE_NAME = re.compile(r"[^\s<>/]+")


def check_tags(**arguments: object) -> None:
    """Refuse tags that are no bare name: of `<answer>…</answer>` it is "answer". Other arguments
    are let pass, and so is None, which stands for no tag."""
    for name in _TAGS:
        tag = arguments.get(name)
        if tag is None:
            continue
        if isinstance(tag, str) and _BARE_NAME.fullmatch(tag):
            continue
        meant = ""
        if isinstance(tag, str):
            meant = tag.strip("</> \n")
        raise RewardError(
            f"{name} = {tag!r} is not the bare name of a tag",
            remedy=f'write {name} = "{meant or "answer"}"',
        )


def check_number(
    name: str, value: Any, *, least: float = -math.inf, above: float = -math.inf
) -> None:
    """Refuse what is no finite number, less than `least`, or not more than `above`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and math.isfinite(value) and value >= least and value > above:
        return
    wanted = "a finite number"
    if least > -math.inf:
        wanted = f"a number of at least {least:g}"
    if above > -math.inf:
        wanted = f"a number above {above:g}"
    raise RewardError(f"{name} = {value!r}", remedy=f"set {name} to {wanted}")


def check_whole_number(name: str, value: Any, *, least: int) -> None:
    """Refuse what is no whole number, or less than `least`."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or value < least:
        raise RewardError(
            f"{name} = {value!r}", remedy=f"set {name} to a whole number of at least {least}"
        )
