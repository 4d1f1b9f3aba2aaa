"""What shipped rewards ask of the arguments that a recipe gives them, before anything starts.

Each function raises RewardError, with what was meant where that can be told."""

import math
import re
from typing import Any
from urllib.parse import urlsplit

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


def check_url(name: str, value: Any) -> None:
    """Refuse what is not the address of one server: a text, with http:// or https:// and a host."""
    remedy = f'set {name} to the address of a server, such as "http://HOST:8000"'
    if isinstance(value, str):
        if _is_address(value):
            return
        if "://" not in value and _is_address(f"http://{value}"):
            remedy = f'write {name} = "http://{value}"'
    elif isinstance(value, list | tuple):
        remedy += "; where several serve the same, to that of a proxy before them"
    raise RewardError(f"{name} = {value!r} is not the address of a server", remedy=remedy)


def _is_address(text: str) -> bool:
    """Return whether a text is an address of HTTP that names a host and, if any, a port."""
    if re.search(r"\s", text):
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0


def check_text(name: str, value: Any, *, may_be_empty: bool = False) -> None:
    """Refuse what is no text, or an empty one."""
    if isinstance(value, str) and (value or may_be_empty):
        return
    wanted = "a text"
    if not may_be_empty:
        wanted = "a text that is not empty"
    raise RewardError(f"{name} = {value!r}", remedy=f"set {name} to {wanted}")


def check_switch(name: str, value: Any) -> None:
    """Refuse what is neither true nor false."""
    if isinstance(value, bool):
        return
    raise RewardError(f"{name} = {value!r}", remedy=f"set {name} to true or false")


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
