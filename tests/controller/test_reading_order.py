"""docs/architecture.md leads a reader through one RL step: files and names that are there."""

import ast
import re
from pathlib import Path

import grpo_megatron

PACKAGE = Path(grpo_megatron.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs/architecture.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| `([\w/.]+)` \| `([\w.]+)` \|", PAGE, re.MULTILINE)


def definitions(file: Path) -> set[str]:
    """Classes, functions, and methods as `Class.method`."""
    names = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(f"{node.name}.{member.name}")
    return names


def test_one_step_in_twenty_files():
    assert [int(number) for number, _, _ in ROWS] == list(range(1, 21))


def test_every_file_has_the_name_beside_it():
    missing = [(file, name) for _, file, name in ROWS if name not in definitions(PACKAGE / file)]
    assert not missing
