"""Words of `rollout.engine_arguments`, read as vLLM's parser reads them."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_NEGATIVE_NUMBER = re.compile(r"-(\d+|\d*\.\d+)")
_SECOND_NAMES = {"--device-memory-utilization": "--gpu-memory-utilization"}
"""Further names of options that this package looks for, with their first one."""


class EngineOption(NamedTuple):
    """An option as it is given."""

    name: str
    """The option's first one, with dashes, and without keys behind a dot
    (`--speculative-config.model`)."""
    value: str
    """What is joined by =, or else the next word; empty where there is nothing."""


def given_options(words: Sequence[str]) -> Iterator[EngineOption]:
    """Yield the options among words of a command line, in their order."""
    for place, word in enumerate(words):
        if not _is_option(word):
            continue
        name, is_joined, value = word.partition("=")
        following = words[place + 1 : place + 2]
        if not is_joined and following and not _is_option(following[0]):
            value = following[0]
        yield EngineOption(_plain_name(name), value)


def without_option(words: Sequence[str], name: str) -> list[str]:
    """Return the words without an option, which takes a value, and that value."""
    kept = []
    is_value = False
    for word in words:
        given, is_joined, _ = word.partition("=")
        if _is_option(word) and _plain_name(given) == name:
            is_value = not is_joined
            continue
        if not is_value or _is_option(word):
            kept.append(word)
        is_value = False
    return kept


def _is_option(word: str) -> bool:
    """Whether a word is no value; negative numbers and texts with blanks are values."""
    name = word.partition("=")[0]
    return name.startswith("-") and " " not in name and not _NEGATIVE_NUMBER.fullmatch(word)


def _plain_name(name: str) -> str:
    """Return the option's first name with dashes: vLLM takes underscores as well."""
    name = name.partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    return _SECOND_NAMES.get(name, name)
