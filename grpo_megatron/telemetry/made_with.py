"""Which code a run was made with: an event of every attempt that has got as far as to train."""

import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import grpo_megatron
from grpo_megatron.telemetry.events import append_event, read_events

_KIND = "code"
_SUFFIXES = (".py", ".toml", ".txt")
_DATA_OF_A_WHEEL = "_assets"
"""What a checkout has beside the package: recipes, presets and scripts, which are no code."""
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Code:
    """The library as it was installed.

    Attributes:
        version: Its version.
        digest: SHA-256 of its source, in hexadecimal; a comment is source too."""

    version: str
    digest: str

    def __str__(self) -> str:
        return f"{self.version}, code {self.digest[:_SHOWN]}"


@cache
def present_code() -> Code:
    """Return the code that runs here."""
    package = Path(grpo_megatron.__file__).parent
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*")):
        name = file.relative_to(package)
        if file.suffix not in _SUFFIXES or name.parts[0] == _DATA_OF_A_WHEEL:
            continue
        digest.update(name.as_posix().encode() + file.read_bytes())
    return Code(grpo_megatron.__version__, digest.hexdigest())


def record_code(events: Path) -> None:
    """Append an event that says which code runs here."""
    code = present_code()
    append_event(events, _KIND, version=code.version, digest=code.digest)


def recorded_codes(events: Path) -> list[Code]:
    """Return the codes that have made a run, each once, the first one first; empty where an
    earlier release did not record its code."""
    codes: dict[Code, None] = {}
    for event in read_events(events):
        if event["kind"] == _KIND:
            codes[Code(str(event.get("version")), str(event.get("digest")))] = None
    return list(codes)
