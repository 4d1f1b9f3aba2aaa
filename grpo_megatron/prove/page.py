"""The one page and the one JSON of `prove`."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import jinja2
import msgspec

from grpo_megatron.files import write_atomically
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.runner import Outcome

PAGE_FILE = "prove.html"
JSON_FILE = "prove.json"
_PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(
    Path(__file__).with_name("page.html").read_text(encoding="utf-8")
)
_WORDS = {"passed": "passed", "failed": "failed", "impossible": "not possible here"}


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that one `prove` found; `prove.json` is one of these."""

    version: str
    """Of this package."""
    host: str
    date: str
    conditions: Conditions
    outcomes: list[Outcome]

    @property
    def failed(self) -> list[str]:
        """Names of the parts that failed."""
        return [outcome.part for outcome in self.outcomes if outcome.status == "failed"]

    def counted(self) -> str:
        """`7 passed, 1 failed, 3 not possible here`."""
        counts = Counter(outcome.status for outcome in self.outcomes)
        return ", ".join(f"{counts[status]} {word}" for status, word in _WORDS.items())  # type: ignore[index]


def write_page(folder: Path, proof: Proof) -> None:
    """Write the page and the JSON into `folder`. Neither refers to anything outside of it."""
    write_atomically(folder / JSON_FILE, json.dumps(msgspec.to_builtins(proof), indent=2) + "\n")
    page = _PAGE.render(proof=proof, words=_WORDS, files=_files_of(folder, proof.outcomes))
    write_atomically(folder / PAGE_FILE, page)


def _files_of(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """Return files of each part that a reader may open, as paths below `folder`."""
    found = {}
    for outcome in outcomes:
        names = []
        for pattern in ("log.txt", "*.trace.json"):
            for path in sorted((folder / outcome.part).glob(pattern)):
                names.append(str(path.relative_to(folder)))
        found[outcome.part] = names
    return found
