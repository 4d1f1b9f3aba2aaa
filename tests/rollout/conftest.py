"""Real servers, started once in parallel and ended by process id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.rollout.engines import Server, make_checkpoint


@dataclass
class Checkpoints:
    moe: Path
    other_moe: Path
    dense: Path


@dataclass
class Servers:
    moe: Server
    moe_tp2: Server
    dense: Server


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Checkpoints:
    root = tmp_path_factory.mktemp("checkpoints")
    return Checkpoints(
        make_checkpoint(root / "moe", moe=True, seed=0),
        make_checkpoint(root / "other", moe=True, seed=1),
        make_checkpoint(root / "dense", moe=False, seed=2),
    )


@pytest.fixture(scope="session")
def servers(checkpoints, tmp_path_factory):
    """A Mixture-of-Experts server that records routes, the same at TP 2, and a dense one."""
    logs = tmp_path_factory.mktemp("logs")
    started: list[Server] = []
    try:
        for name, checkpoint, options in (
            ("moe", checkpoints.moe, {"record_routes": True, "deterministic": True}),
            ("moe-tp2", checkpoints.moe, {"tensor_parallel_size": 2}),
            ("dense", checkpoints.dense, {}),
        ):
            started.append(Server.start(name, checkpoint, logs, **options))
        for server in started:
            server.wait()
        yield Servers(*started)
    finally:
        for server in started:
            server.stop()
