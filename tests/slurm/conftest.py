"""A cluster for the session, and a directory that its nodes share."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.jobs import CLUSTER, Cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """Four nodes; CLUSTER_KEEP=1 leaves it running."""
    shared = tmp_path_factory.mktemp("shared")
    visible = [str(p) for p in (shared, Path.cwd()) if str(p).startswith("/tmp/")]
    os.environ["CLUSTER_SHARED"] = ":".join(visible)
    up = subprocess.run([CLUSTER, "up"], stdout=subprocess.PIPE, text=True, check=True)
    os.environ["SLURM_CONF"] = up.stdout.strip().removeprefix("SLURM_CONF=")
    yield Cluster(shared)
    if not os.environ.get("CLUSTER_KEEP"):
        subprocess.run([CLUSTER, "down"], check=True)


@pytest.fixture(autouse=True)
def _idle(cluster: Cluster) -> None:
    """Every test begins with four nodes that have nothing to do."""
    cluster.make_idle()
