"""What would make the host wait for a GPU, with file and line.

A GPU works through a queue while the host goes on. Some calls make the host wait until the queue is
empty: a number read from a tensor, a result whose shape depends on values, a copy from or to memory
that is not pinned. Each one here would be a warning of `torch.cuda.set_sync_debug_mode`, or is a
copy of pageable memory, for which CUDA waits by itself."""

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from grpo_megatron.pretended_cuda import in_flight

READ = "number read"
SHAPE = "shape depends on values"
TO_HOST = "copy to the host"
FROM_HOST = "copy from memory that is not pinned"
WAIT = "explicit wait"

OURS = "grpo_megatron"
MEGATRON = "megatron"
TESTS = "tests"
TORCH = "torch"
_ROOT = Path(__file__).parents[2]
_PASS_IT_ON = (f"{_ROOT / OURS / 'pretended_cuda'}/", f"{_ROOT / OURS / 'device_copies.py'}")
"""Files that are not asked about: whoever calls them is."""


@dataclass(frozen=True, order=True)
class Site:
    """A line that made the host wait."""

    owner: str  # "grpo_megatron", "megatron", "tests", or "torch": in no frame of the others
    file: str  # from the owner's package on
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.kind})"


@dataclass
class Record:
    """How often each line made the host wait."""

    counts: Counter[Site] = field(default_factory=Counter)

    def of(self, owner: str) -> Counter[Site]:
        """Select the lines of one owner."""
        return Counter({site: count for site, count in self.counts.items() if site.owner == owner})

    def lines(self, owner: str) -> list[str]:
        """List the lines of one owner, the most frequent first: `COUNT FILE:LINE (KIND)`."""
        return [f"{count:6d} {site}" for site, count in self.of(owner).most_common()]


_records: list[Record] = []


@contextmanager
def recorded() -> Iterator[Record]:
    """Record what happens inside the block, in every thread of this process."""
    record = Record()
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def note(kind: str) -> None:
    """Count a synchronisation for the innermost frame that is ours, Megatron's or a test's.

    Copies to the host that were queued before are done then."""
    if kind != FROM_HOST:
        in_flight.finish()
    if not _records:
        return
    site = _site(sys._getframe(1), kind)
    for record in _records:
        record.counts[site] += 1


def _site(frame: FrameType | None, kind: str) -> Site:
    """Find the line that asked: lines of torch only pass it on."""
    while frame is not None:
        path = frame.f_code.co_filename
        for owner, start in _starts(path):
            return Site(owner, path[start:], frame.f_lineno, kind)
        frame = frame.f_back
    return Site(TORCH, "a backward of torch's own", 0, kind)


@functools.cache
def _starts(path: str) -> list[tuple[str, int]]:
    """Say whose a source file is, and where its name begins in the path; nothing for others."""
    if path.startswith(_PASS_IT_ON):
        return []
    for owner in (OURS, TESTS):
        if path.startswith(f"{_ROOT / owner}/"):
            return [(owner, len(f"{_ROOT}/"))]
    if "/megatron/core/" in path:
        return [(MEGATRON, path.index("/megatron/core/") + 1)]
    return []
