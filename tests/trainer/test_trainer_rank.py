"""A rank serves the world of its recipe, and no other."""

from __future__ import annotations

import pytest

from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import SetupError
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.trainer import trainer_rank


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 4), (2, 2)])
def test_ranks_of_another_world_are_refused(tmp_path, monkeypatch, rank, world_size):
    """Two trainers of one rank each would both train, and one of them for nothing."""
    run_dir = RunDir(tmp_path / "run", "1")
    run_dir.create()
    resolved = resolve("demo/gspo-moe-cpu")
    num_ranks = resolved.config.trainer.num_ranks
    assert (rank, world_size) != (0, num_ranks)
    write_resolved(run_dir.config, resolved)
    monkeypatch.setattr(trainer_rank, "bind_gloo", lambda address: None)
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    with pytest.raises(SetupError, match=f"rank {rank} of {world_size}.* {num_ranks} ranks"):
        trainer_rank.main(str(run_dir.root))
