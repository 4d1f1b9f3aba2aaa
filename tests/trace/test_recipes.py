"""Whole recipes, traced through the real command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.trace


def traced(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "grpo_megatron.cli.main", "plan", *arguments]
    done = subprocess.run(
        [*command, "--trace", "--json"], capture_output=True, text=True, check=False
    )
    assert done.returncode in (0, 7), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_static_bytes_of_the_demo_are_exact():
    [rank] = traced("demo/gspo-moe-cpu")["ranks"]
    compared = {row["what"]: row for row in rank["compared"]}
    for part in ("weights", "gradients", "optimizer", "buffers"):
        assert compared[part]["planned"] == compared[part]["traced"] == rank["static"][part]
