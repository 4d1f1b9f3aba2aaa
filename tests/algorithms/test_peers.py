"""Other libraries' released functions on fixed inputs: the same numbers, or a difference that
docs/differences.md names."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.algorithms.evaluation import evaluated, flat, same

ROOT = Path(__file__).parents[2]
PEERS = json.loads((ROOT / "tests" / "golden" / "peers.json").read_text())
DIFFERENCES = {
    line.split("|")[1].strip()
    for line in (ROOT / "docs" / "differences.md").read_text().splitlines()
    if line[:2] == "| "
}


@pytest.mark.parametrize(
    "row", PEERS["rows"], ids=lambda row: f"{row['peer']}: {row['preset']}, {row['settings']}"
)
def test_peers(row):
    case = dict(PEERS["inputs"])
    if row["preset"] != "gdpo":
        case.pop("components")
    found = evaluated(row["preset"], row["overrides"], **case)
    lengths = [len(tokens) for tokens in case["logprobs"]]
    advantages = [
        a if isinstance(a, list) else [a] * n
        for a, n in zip(found["advantages"], lengths, strict=True)
    ]
    pairs = [
        (advantages, row["advantages"]),
        (found["loss"], row["loss"]),
        (found["grad_logprobs"], row["grad_logprobs"]),
    ]
    if "differs" not in row:
        for ours, theirs in pairs:
            same(ours, theirs)
        return
    assert row["differs"] in DIFFERENCES
    gaps = [np.abs(np.subtract(flat(ours), flat(theirs))).max() for ours, theirs in pairs]
    assert 1e-9 < max(gaps) < 1e-3  # small on these inputs, and real
