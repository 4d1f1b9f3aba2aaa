"""Says how far the check of a domain's rows is, where it takes long."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

from grpo_megatron.config.run import DomainConfig
from grpo_megatron.data.row_files import Rows, expected_rows, read_rows

_SILENT_S = 5.0
"""Seconds of a check that say nothing."""
_PAUSE_S = 10.0
"""Seconds between two lines after that."""


def checked_rows(
    domain: DomainConfig,
    path: Path,
    *,
    without: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Rows:
    """Return the rows of a domain's file or folder as `read_rows` does. While they are taken, a
    line on stderr says after some seconds, and then again and again, how many of how many it were.

    without: as of `read_rows`."""
    split = domain.arguments.get("split")
    began = clock()
    due = began + _SILENT_S
    of_all = None
    for number, row in enumerate(read_rows(path, split, without=without), start=1):
        yield row
        now = clock()
        if now < due:
            continue
        if of_all is None:
            of_all = _told_total(domain, path, split)
        print(
            f"checking the data of domain {domain.name!r}: {number:,} rows{of_all} in "
            f"{now - began:.0f} s ({path})",
            file=sys.stderr,
            flush=True,
        )
        due = now + _PAUSE_S


def _told_total(domain: DomainConfig, path: Path, split: str | None) -> str:
    """Return how many rows there are to check, in words; empty where nothing tells."""
    total = expected_rows(path, split)
    if total is None:
        return ""
    most = domain.num_problems
    takes_every_row = "domain_field" not in domain.arguments
    if takes_every_row and most is not None and most < total.num_rows:
        return f" of {most:,}"
    if total.is_exact:
        return f" of {total.num_rows:,}"
    rounded = float(f"{total.num_rows:.2g}")
    return f" of about {rounded:,.0f}"
