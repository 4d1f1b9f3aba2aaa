"""A graph killed at random moments: it goes on, and no finished stage is run again."""

from __future__ import annotations

import random
import subprocess

import pytest

from tests.e2e import runs
from tests.e2e.random_faults import SEED, share_of_kills, timeout_of

NUM_KILLS = share_of_kills(0.2)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.chaos,
    pytest.mark.timeout(timeout_of(NUM_KILLS)),
]

GRAPH = """
name = "graph"
runs_dir = "{root}"

[stages.base]
recipe = "{recipe}"
settings = ["kind=sft", "num_steps=4"]

[stages.left]
recipe = "{recipe}"
settings = ["num_steps=24"]
inputs = {{ "model.path" = "base" }}

[stages.right]
recipe = "{recipe}"
settings = ["num_steps=24", "seed=1"]
inputs = {{ "model.path" = "base" }}

[stages.soup]
merge = {{ left = 1, right = 1 }}
"""


def test_kill_9_at_random_moments(tmp_path):
    print(f"CHAOS_SEED={SEED}")  # shown when it fails
    chance, root = random.Random(SEED), tmp_path / "graph"
    file = tmp_path / "graph.toml"
    file.write_text(GRAPH.format(root=tmp_path, recipe=runs.RECIPE))
    finished: dict[str, int] = {}
    for number in range(NUM_KILLS + 1):
        process = runs.start("stages", "resume", str(file))
        try:
            process.wait(chance.uniform(2, 30) if number < NUM_KILLS else 1500)
            break
        except subprocess.TimeoutExpired:
            runs.kill(process.pid)
            print(f"killed {number + 1} times; finished: {sorted(finished)}")
            runs.finish(process)
        # none yet, where a busy machine was long about starting the command
        stages = [path.parent for path in root.glob("*/events.jsonl")]
        assert all(runs.no_survivors(path) for path in stages)
        stamps = {path.parent.name: path.stat().st_mtime_ns for path in root.glob("*/result.json")}
        assert finished.items() <= stamps.items()
        finished = stamps
    code, output = runs.finish(process)
    assert code == 0, output
    assert (
        finished.items()
        <= {
            path.parent.name: path.stat().st_mtime_ns for path in root.glob("*/result.json")
        }.items()
    )
    assert (root / "soup/export/model.safetensors").exists()
    for name in ("left", "right"):
        assert [r["step"] for r in runs.metrics(root / name)] == list(range(24))
