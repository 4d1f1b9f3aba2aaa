"""What the worker groups execute for the checkpoint tests."""

from __future__ import annotations

import resource
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.checkpoints.distributed import (
    Part,
    PendingCheckpoint,
    corrupt_files,
    load_checkpoint,
    load_model,
    read_state,
)
from grpo_megatron.checkpoints.hf_export import export_model
from grpo_megatron.checkpoints.hf_import import import_weights
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig
from grpo_megatron.errors import CheckpointError, GrpoMegatronError
from grpo_megatron.trainer.conversion_worker import ConversionJob, run
from grpo_megatron.trainer.megatron.process_groups import RankInfo
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.trainer.requests import (
    LoadCheckpoint,
    SaveCheckpoint,
    SnapshotReference,
    Train,
    TrainReport,
)
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, train_step
from tests.integration import trainer_side
from tests.trainer.trainer_ranks import Setup, _earlier, loss_of, release
from tests.trainer.worker_group import fresh_store


def _train(setup: Setup, samples: str, steps: int) -> list[dict[str, float]]:
    batch = setup.batch(samples)
    return [train_step(setup.policy, batch, loss_of(setup, samples)).result() for _ in range(steps)]


def _begin(setup: Setup, directory: str, steps: int) -> PendingCheckpoint:
    return PendingCheckpoint(Path(directory), [_part(setup)], {"step": steps})


def _part(setup: Setup) -> Part:
    return Part("weights", setup.policy.chunks, setup.policy.optimizer)


def _load(setup: Setup, directory: str) -> dict[str, Any]:
    create_adam_state(setup.policy.optimizer)
    load_checkpoint(Path(directory), _part(setup))
    return read_state(Path(directory))


def save_after(
    model: str, samples: str, layout: dict[str, Any], directory: str, steps: int
) -> dict[str, Any]:
    """Train, save, train on while files are written: what a resumed run must repeat."""
    setup = Setup(model, layout)
    _train(setup, samples, steps)
    create_adam_state(setup.policy.optimizer)
    saved = setup.gather(setup.shards)
    pending = _begin(setup, directory, steps)
    metrics = _train(setup, samples, 3)
    assert not Path(directory).exists()
    pending.finish()
    return {"saved": saved, "metrics": metrics, "tensors": setup.gather(setup.shards)}


def failed_save(
    model: str, layout: dict[str, Any], directory: str, full_rank: int
) -> tuple[str, int]:
    """Save where one rank may write no file; returns text and exit code of the error."""
    setup = Setup(model, layout)
    create_adam_state(setup.policy.optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        _begin(setup, directory, 1).finish()
    except GrpoMegatronError as error:
        return str(error), error.exit_code
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    raise AssertionError("it was saved")


def resume_from(model: str, samples: str, layout: dict[str, Any], directory: str) -> dict[str, Any]:
    """Load into a model that was trained elsewhere in the meantime."""
    setup = Setup(model, layout)
    _train(setup, samples, 1)
    state = _load(setup, directory)
    loaded = setup.gather(setup.shards)
    metrics = _train(setup, samples, 3)
    return {
        "state": state,
        "saved": loaded,
        "metrics": metrics,
        "tensors": setup.gather(setup.shards),
    }


def resume_fresh(
    model: str, samples: str, layout: dict[str, Any], directory: str
) -> dict[str, Any]:
    """As a resumed run does: into an optimizer that has not stepped yet."""
    setup = Setup(model, layout)
    _load(setup, directory)
    return {"metrics": _train(setup, samples, 3), "tensors": setup.gather(setup.shards)}


def load_refusal(model: str, directory: str) -> str | None:
    """What loading a distributed checkpoint is refused with."""
    setup = Setup(model, {})
    try:
        _load(setup, directory)
    except CheckpointError as error:
        return str(error)
    return None


def damaged_files(directory: str) -> list[str]:
    """Which files of a checkpoint are not as they were written."""
    return corrupt_files(Path(directory))


def import_refusal(model: str, directory: str) -> str | None:
    """What importing `directory` into the model of `model` is refused with."""
    setup = Setup(model, {})
    try:
        import_weights(setup.policy.sharded, Path(directory))
    except CheckpointError as error:
        return str(error)
    return None


def convert(
    job: dict[str, Any], file_limit: int | None = None, free_bytes: int | None = None
) -> tuple[str, int, str] | None:
    """Run one conversion; returns the class, exit code and text of its error.

    Args:
        file_limit: largest file that this process may write, as if the disk were full.
        free_bytes: what the disk is said to have.
    """
    while _earlier:
        release(_earlier.pop())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit or limits[0], limits[1]))
    usage = shutil.disk_usage
    if free_bytes is not None:
        shutil.disk_usage = lambda path: usage(path)._replace(free=free_bytes)
    try:
        run(msgspec.convert(job, ConversionJob), RankInfo.from_environment(), fresh_store())
    except GrpoMegatronError as error:
        return type(error).__name__, error.exit_code, str(error)
    finally:
        shutil.disk_usage = usage
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return None


def imported(model: str, layout: dict[str, Any]) -> dict[str, np.ndarray] | None:
    """All tensors of a model that was read at `layout`."""
    setup = Setup(model, layout)
    return setup.gather(setup.shards)


def loaded(model: str, layout: dict[str, Any], directory: str) -> dict[str, np.ndarray] | None:
    """All tensors of a model that was loaded from a converted checkpoint at `layout`."""
    setup = Setup(model, layout)
    for part in setup.shards:
        part.tensor.data.fill_(torch.nan)
    load_model(Path(directory) / "weights", setup.policy.chunks)
    return setup.gather(setup.shards)


def export_after_training(
    model: str, samples: str, layout: dict[str, Any], directory: str, shard_bytes: int
) -> dict[int, np.ndarray]:
    """Train two steps and export; returns the policy's log-probs by row of `samples`."""
    setup = Setup(model, layout)
    _train(setup, samples, 2)
    export_model(setup.policy.sharded, Path(directory), Path(model), shard_bytes)
    batch, mine = setup.batch(samples), {}
    for microbatch, found in zip(
        batch.microbatches, logprob_pass(setup.policy, batch), strict=True
    ):
        if len(found[0]):
            counts = torch.bincount(microbatch.sample, minlength=len(microbatch.table_rows))
            parts = torch.split(found[0], counts.tolist())
            mine.update(
                zip(microbatch.table_rows.tolist(), (p.numpy() for p in parts), strict=True)
            )
    world: list = [None] * dist.get_world_size()
    dist.all_gather_object(world, mine)
    return {row: logprobs for part in world for row, logprobs in part.items()}


def resume_with_reference(
    model: str,
    samples: str,
    layout: dict[str, Any],
    root: str,
    interval: int,
    precision: str = "float32",
) -> dict[str, Any]:
    """Train, save twice, train on; then load the second checkpoint in a fresh trainer and save."""
    config = RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "optimizer": {"lr": 1e-3},
            "trainer": {"precision": precision, "num_threads": 1, **layout},
            "objective": {
                "preset": "grpo",
                "kl": "k3",
                "kl_beta": 0.1,
                "reference_interval": interval,
                "reference_ema": 0.5 if interval else None,
            },
            "domains": [
                {"name": name, "source": "file", "path": "x", "rewards": [{"function": "a:b"}]}
                for name in ("even", "odd")
            ],
        }
    )
    training = Train(directory=Path(samples), first_update=0, num_updates=9, state={})
    state = {"step": 1, "sampler": {}}

    def timeless(report: TrainReport) -> dict[str, float]:
        return {
            name: value
            for name, value in report.metrics.items()
            if name != "trainer/peak_memory_gib"
        }

    def directory(step: int) -> Path:
        return Path(root) / f"step_{step:06d}"

    def save(step: int) -> None:
        trainer_side.execute(SaveCheckpoint(directory=directory(step), state=state))

    trainer_side.start(config, model)
    trainer_side.execute(SnapshotReference())
    trainer_side.execute(training)
    save(1)
    trainer_side.execute(training)
    save(2)
    expected = timeless(trainer_side.execute(training))
    trainer_side.start(config, model)
    loaded = trainer_side.execute(LoadCheckpoint(directory(2)))
    save(3)
    found = timeless(trainer_side.execute(training))
    return {
        "files": sorted(path.name for path in Path(root).iterdir()),
        "loaded": loaded,
        "state": state,
        "found": found,
        "expected": expected,
    }


def saves_after_a_checkpoint(model: str, root: str) -> tuple[list[str], dict[str, Any]]:
    """Save a run that began with the checkpoint of another one; returns the files of it that are
    not as written, and what a trainer that loads it is told."""
    config = RunConfig.model_validate(
        {
            "name": "case",
            "model": {"preset": "tiny-qwen3-moe"},
            "trainer": {"precision": "float32", "num_threads": 1},
            "objective": {"preset": "gspo"},
            "domains": [
                {"name": "even", "source": "file", "path": "x", "rewards": [{"function": "a:b"}]}
            ],
        }
    )
    start = model
    for name in ("first", "second"):
        directory = Path(root) / name / "step_000001"
        trainer_side.start(config, start)
        trainer_side.execute(SaveCheckpoint(directory=directory, state={"step": 1}))
        start = str(directory)
    return corrupt_files(directory), trainer_side.execute(LoadCheckpoint(directory))


def load_with_other_settings(
    model: str, samples: str, layout: dict[str, Any], directory: str
) -> dict[str, Any]:
    """Save an optimizer, and load it into one that was made with other settings."""
    setup = Setup(model, layout)
    _train(setup, samples, 1)
    create_adam_state(setup.policy.optimizer)
    _begin(setup, directory, 1).finish()
    expected = _moments(setup)
    other = OptimizerConfig(lr=5e-4, weight_decay=0.02, beta1=0.8, beta2=0.9, eps=1e-6)
    setup = Setup(model, layout, optimizer=other)
    create_adam_state(setup.policy.optimizer)
    load_checkpoint(Path(directory), _part(setup))
    setup.policy.apply_settings()
    pairs = zip(_moments(setup), expected, strict=True)
    settings = []
    for group in setup.policy.optimizer.param_groups:
        settings.append((group["wd_mult"], group["weight_decay"], group["betas"], group["eps"]))
    return {
        "is_equal": all(torch.equal(one, two) for one, two in pairs),
        "num_moments": len(expected),
        "settings": settings,
    }


def _moments(setup: Setup) -> list[torch.Tensor]:
    """Copies of all moments of this rank."""
    found = []
    optimizers = getattr(setup.policy.optimizer, "chained_optimizers", [setup.policy.optimizer])
    for part in optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                state = part.optimizer.state[parameter]
                found += [state["exp_avg"].clone(), state["exp_avg_sq"].clone()]
    return found
