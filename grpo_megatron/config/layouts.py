"""Texts with places in braces, filled with whatever the values contain."""

import re
from collections.abc import Mapping

_PLACE = re.compile(r"\{([a-z_]+)\}")


def fill(layout: str, values: Mapping[str, str]) -> str:
    """`fill("{a} \\\\boxed{}", {"a": "{b}"})` gives `"{b} \\\\boxed{}"`: places whose names are no
    keys of `values` stay as they are, and so do braces inside of values."""

    def value_of(place: re.Match[str]) -> str:
        return values.get(place[1], place[0])

    return _PLACE.sub(value_of, layout)


def places_of(layout: str) -> set[str]:
    """Return names of the places of a layout."""
    return set(_PLACE.findall(layout))
