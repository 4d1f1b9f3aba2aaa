"""Which cases of a test `make test` runs, and which tier has the others."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

import pytest


def rest_in_matrix(names: Iterable[str], gate: Container[str]) -> list[Any]:
    """Parameters of a test: `names`, of which those that are not in `gate` are of the matrix."""
    found = []
    for name in names:
        marks = () if name in gate else (pytest.mark.matrix,)
        found.append(pytest.param(name, marks=marks))
    return found
