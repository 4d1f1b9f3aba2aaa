"""The servers that tests of the engines and of publishing share: started once, in parallel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.rollout.engines import Server, make_checkpoint

# As in production: a server's first weights are those that the trainer publishes.
DUMMY = {"engine_arguments": ("--load-format", "dummy")}


@dataclass
class EngineCheckpoints:
    dense: Path
    moe: Path
    other_moe: Path


@dataclass
class Servers:
    """Each test brings the weights that it wants into them. The last test of `test_engine.py` ends
    `dense`: who needs a real server in another file takes another one."""

    dense: Server
    moe: Server  # records routes, deterministic, and may be asked for all log-probs
    moe_tp2: Server


def make_checkpoints(root: Path) -> EngineCheckpoints:
    return EngineCheckpoints(
        dense=make_checkpoint(root / "dense", moe=False, seed=2),
        moe=make_checkpoint(root / "moe", moe=True, seed=0),
        other_moe=make_checkpoint(root / "other", moe=True, seed=1),
    )


def start_servers(checkpoints: EngineCheckpoints, logs: Path) -> Iterator[Servers]:
    """Yields them once all are ready; ends them by process id."""
    all_logprobs = ("--max-logprobs", "-1")  # what truncated sampling asks for
    moe_options = {
        "record_routes": True,
        "deterministic": True,
        "engine_arguments": (*DUMMY["engine_arguments"], *all_logprobs),
    }
    started: list[Server] = []
    try:
        for name, checkpoint, options in (
            ("dense", checkpoints.dense, DUMMY),
            ("moe", checkpoints.moe, moe_options),
            ("moe-tp2", checkpoints.moe, DUMMY | {"tensor_parallel_size": 2}),
        ):
            started.append(Server.start(name, checkpoint, logs, **options))
        for server in started:
            server.wait()
        yield Servers(*started)
    finally:
        for server in started:
            server.stop()
