"""Values of options of the commands of environments, for argparse."""

import argparse
import contextlib
import json
import math
from collections.abc import Callable
from typing import Any


def keyword_arguments(text: str) -> dict[str, Any]:
    """Read keyword arguments. Raises ArgumentTypeError where they are no object of JSON."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is no object")
    return found


def seconds(text: str) -> float:
    """Read a number of seconds, which may be infinite. Raises ArgumentTypeError where it is none,
    or not above 0."""
    found = math.nan
    with contextlib.suppress(ValueError):
        found = float(text)
    if not found > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds above 0")
    return found


def finite_seconds(text: str) -> float:
    """Read a finite number of seconds. Raises ArgumentTypeError as `seconds` does."""
    found = seconds(text)
    if math.isinf(found):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number of seconds")
    return found


def whole_number(least: int) -> Callable[[str], int]:
    """Return what reads a whole number from `least` on, and raises ArgumentTypeError for any other
    text."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return int(text)

    return read
