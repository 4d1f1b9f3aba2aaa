"""What a part of `prove` shows: checks, figures and notes, written to a file as they are found."""

from pathlib import Path
from typing import Literal

import msgspec

from grpo_megatron.errors import DataError, raised_as
from grpo_megatron.files import write_atomically

Standing = Literal["holds", "fails", "impossible"]
EVIDENCE_FILE = "evidence.json"


class Check(msgspec.Struct, frozen=True):
    """One thing that a part was to show: `Check("losses agree", "holds", "at most 2e-7 apart")`."""

    what: str
    standing: Standing
    detail: str = ""


class Figure(msgspec.Struct, frozen=True):
    """One number or fact: `Figure("forward", "41000", "tokens/s", "30000 to 60000")`."""

    what: str
    value: str
    unit: str = ""
    expected: str = ""
    """What somebody should expect to see; empty: nothing is known."""


class Evidence(msgspec.Struct):
    """All that a part has shown so far."""

    checks: list[Check] = []
    figures: list[Figure] = []
    notes: list[str] = []
    impossible: str = ""
    """Why the part cannot be shown here at all; empty: it can."""
    error: str = ""
    """What ended the part before it was through."""
    finished: bool = False
    """Whether the part came to its end; a crash leaves it False."""

    @property
    def failed(self) -> list[Check]:
        """Checks that do not hold."""
        return [check for check in self.checks if check.standing == "fails"]


class Recorder:
    """Collects evidence and writes it to `path` after each find, so that a crash loses nothing."""

    def __init__(self, path: Path):
        self._path = path
        self.evidence = Evidence()

    def check(self, what: str, holds: bool, detail: str = "") -> None:
        """Record whether something holds. A check that does not hold fails the part."""
        standing: Standing = "fails"
        if holds:
            standing = "holds"
        self._add(Check(what, standing, detail))

    def impossible(self, what: str, why: str) -> None:
        """Record that one thing of several cannot be shown here; the part can pass without it."""
        self._add(Check(what, "impossible", why))

    def figure(self, what: str, value: object, unit: str = "", expected: str = "") -> None:
        """Record a number, with three digits, or a fact."""
        self.evidence.figures.append(Figure(what, figure_text(value), unit, expected))
        self.save()

    def note(self, text: str) -> None:
        """Record a sentence that a reader of the figures must know."""
        self.evidence.notes.append(text)
        self.save()

    def _add(self, check: Check) -> None:
        self.evidence.checks.append(check)
        self.save()

    def save(self) -> None:
        """Write everything so far."""
        write_atomically(self._path, msgspec.json.encode(self.evidence).decode())


def figure_text(value: object) -> str:
    """Three significant digits of a float; anything else as it is printed."""
    if not isinstance(value, float):
        return str(value)
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def read_evidence(path: Path) -> Evidence:
    """Read what a part wrote; empty where it wrote nothing. Raises DataError for garbage."""
    if not path.exists():
        return Evidence()
    with raised_as(
        DataError, "what the part wrote cannot be read", (OSError, msgspec.MsgspecError), where=path
    ):
        return msgspec.json.decode(path.read_bytes(), type=Evidence)
