"""A graph as jobs: branches side by side, a closed gate stops what builds on it, nothing twice."""

import json
import re
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.slurm.jobs import NODES, SITE, Cluster, all_gone

pytestmark = pytest.mark.slurm

GRAPH = """
name = "graph"
runs_dir = "{runs}"
settings = [{nodes}]

[stages.base]
recipe = "{recipe}"
settings = ["kind=sft", "num_steps=2"]

[stages.left]
recipe = "{recipe}"
settings = ["num_steps=2"]
inputs = {{ "model.path" = "base" }}
gates = ["seconds <= 0"]

[stages.right]
recipe = "{recipe}"
settings = ["num_steps=2", "seed=1"]
inputs = {{ "model.path" = "base" }}

[stages.soup]
merge = {{ base = 1, right = 1 }}

[stages.never]
export = "left"
"""


def test_a_graph_is_a_set_of_jobs(cluster: Cluster):
    file, root = cluster.shared / "graph.toml", cluster.shared / "runs/graph"
    file.write_text(
        GRAPH.format(
            runs=root.parent, recipe=runs.RECIPE, nodes=", ".join(f'"{node}"' for node in NODES)
        )
    )
    done = cluster.command("stages", "submit", str(file), "--site", SITE)
    assert done.returncode == 0, done.stderr
    jobs = dict(re.findall(r"^(\w+): job (\d+)", done.stdout, re.M))
    assert next(iter(jobs)) == "base" and len(jobs) == 5
    states = {name: cluster.wait(job) for name, job in jobs.items()}
    said = "".join(cluster.output(root / name) for name in jobs)
    assert {name: state["JobState"] for name, state in states.items()} == {
        "base": "COMPLETED",
        "left": "FAILED",
        "right": "COMPLETED",
        "soup": "COMPLETED",
        "never": "CANCELLED",
    }, said
    assert states["left"]["ExitCode"] == "11:0"
    assert (root / "soup/export/model.safetensors").exists()
    assert not (root / "never/export").exists()
    assert not any(all_gone(root / name) for name in jobs)
    stamps = {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    again = cluster.command("stages", "submit", str(file), "--site", SITE)
    assert again.stdout.count("done and unchanged") == 3 and "never: not run" in again.stdout
    assert "seconds <= 0 (seen: " in again.stdout
    assert stamps == {path: path.stat().st_mtime_ns for path in root.rglob("result.json")}
    status = cluster.command("stages", "status", str(file)).stdout
    assert "gate closed" in status and "waiting" in status
    assert json.loads((root / "right/result.json").read_text())["steps"] == 2
    assert Path(root / "base/slurm/job").read_text().strip() == jobs["base"]
