"""The table of faults in docs/faults.md names tests that exist, in the tiers that it says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROW = re.compile(
    r"^\|(?P<fault>[^|]+)\|.*\|"
    r" `(?P<file>tests/[\w/]+\.py)::(?P<test>\w+)`(?: \((?P<tier>\w+)\))? \|$"
)
TIERS = {"chaos", "slurm", "learning", "families", "matrix", "recipes", "contract", "device"}
NAMED = (
    "engine killed",
    "engine hung",
    "engine out of memory",
    "engine returns NaN",
    "too few tokens",
    "wrong weights",
    "trainer rank killed",
    "trainer rank hung",
    "loss or gradient is NaN",
    "controller killed",
    "reward hung or crashed",
    "reward prints without end",
    "environment prints without end",
    "environment returns more than memory holds",
    "environment writes garbage",
    "judge gone or slow",
    "teacher gone",
    "teacher slow",
    "disk full",
    "files stall",
    "checkpoint truncated or half deleted",
    "flipped bit",
    "store shard corrupt",
    "clock jumps",
    "node crashed",
    "node drained",
    "node rebooted",
    "preempted twice",
    "parted for a while",
    "stay parted",
    "stopped in any phase",
    "two jobs for one run",
    "cold start longer than the time limit",
)


def rows() -> list[re.Match[str]]:
    text = (ROOT / "docs" / "faults.md").read_text()
    table = text.partition("## Every fault by name")[2].partition("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("|")]
    found = [ROW.match(line) for line in lines[2:]]
    for line, row in zip(lines[2:], found, strict=True):
        assert row is not None, f"a row names a test at its end: {line}"
    return [row for row in found if row is not None]


def marks_of(tree: ast.Module, function: ast.FunctionDef) -> set[str]:
    """Names of the marks on a test, and of those on all of its file."""
    places: list[ast.AST] = []
    for decorator in function.decorator_list:
        if "parametrize" not in ast.unparse(decorator):  # marks of some of its cases
            places.append(decorator)
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            places.append(node.value)
    text = " ".join(ast.unparse(place) for place in places)
    return set(re.findall(r"pytest\.mark\.(\w+)", text))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["test"])
def test_a_fault_has_its_test(row):
    path = ROOT / row["file"]
    assert path.exists(), f"{row['fault'].strip()}: no {row['file']}"
    tree = ast.parse(path.read_text())
    found = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert row["test"] in found, f"{row['fault'].strip()}: no {row['test']} in {row['file']}"
    tiers = marks_of(tree, found[row["test"]]) & TIERS
    assert (row["tier"] or "") in (tiers or {""}), f"{row['test']} is of {tiers}"


@pytest.mark.parametrize("fault", NAMED)
def test_the_table_has_every_fault(fault):
    assert any(fault in row["fault"] for row in rows())
