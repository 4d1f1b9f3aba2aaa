"""`slurm/prove.sbatch` on two nodes of a real Slurm, with GPUs that only pretend."""

import json

import pytest

from tests.slurm.jobs import ROOT, SITE, Cluster

pytestmark = pytest.mark.slurm


def test_two_nodes_prove_themselves_and_each_other(cluster: Cluster):
    job = cluster.run(
        "sbatch",
        "--parsable",
        "--output=prove.out",
        str(ROOT / "slurm/prove.sbatch"),
        "proved",
        "--pretend",
        "--only",
        "machine",
        SITE=SITE,
    ).stdout.strip()
    state = cluster.wait(job)
    log = (cluster.shared / "prove.out").read_text()
    assert state["ExitCode"] == "0:0", log
    folder = cluster.shared / "proved"
    found = {}
    for page in folder.glob("*/prove.json"):
        [outcome] = json.loads(page.read_text())["outcomes"]
        found[page.parent.name] = (outcome["part"], outcome["status"])
    passed_alone = ("machine", "passed")
    assert found == {"node1": passed_alone, "node2": passed_alone, "nodes": ("nodes", "passed")}
