"""Sources of the pages are as easy to read as the code around them."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
SUFFIXES = (".html", ".css", ".js")


def page_sources() -> list[Path]:
    """Return the files that pages of runs, of `mismatch` and of `prove` are made of."""
    return sorted(file for file in (ROOT / "grpo_megatron").rglob("*") if file.suffix in SUFFIXES)


def test_the_sources_are_found():
    names = {file.name for file in page_sources()}
    assert {"page.html", "style.css", "chart.js", "gap_page.html"} <= names


def test_lines_are_no_longer_than_those_of_code():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    longest = project["tool"]["ruff"]["line-length"]
    too_long = []
    for file in page_sources():
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if len(line) > longest:
                where = f"{file.relative_to(ROOT)}:{number}"
                too_long.append(f"{where}: {len(line)} characters, at most {longest}")
    assert not too_long, "\n".join(too_long)
