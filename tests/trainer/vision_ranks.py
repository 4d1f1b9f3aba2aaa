"""What the worker groups execute for a policy that sees."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.parallel_state import is_pipeline_last_stage

from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.prefix_rows import SamplePaths, lay_out
from grpo_megatron.batching.row_images import row_images
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, train_step
from tests.trainer.trainer_ranks import OPTIMIZER, Setup, _by_row


def features(model: str, samples: str) -> np.ndarray:
    """What a bfloat16 tower makes of the images of a step's first three prompts, each once."""
    setup = Setup(model, {"precision": "bfloat16"})
    table = SampleTable(Path(samples))
    split = lay_out(SamplePaths.without_sharing(table.prompt_lengths + table.completion_lengths))
    images = row_images(table, np.arange(len(table)), split)
    [chunk] = setup.policy.models
    return chunk.image_features.of(images)[0].float().numpy()


def parity(model: str, samples: str, layout: dict[str, Any]) -> dict[str, Any] | None:
    """Log-probs by table row, and the tensors that come back other than they were; on rank 0."""
    setup = Setup(model, layout)
    own = {}
    batch = setup.batch(samples)
    if is_pipeline_last_stage(ignore_virtual=True):
        own = _by_row(setup.policy, batch)
    else:
        logprob_pass(setup.policy, batch)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    tensors = setup.gather(setup.shards)
    if tensors is None:
        return None
    by_row = {}
    for part in parts:
        for row, logprobs in part.items():
            by_row[row] = logprobs
    reader = HFReader(Path(model))
    wrong = []
    for name in sorted(reader.names() | tensors.keys()):
        is_known = name in tensors and name in reader.names()
        if not is_known or not np.array_equal(tensors[name], reader.tensor(name).numpy()):
            wrong.append(name)
    return {"logprobs": by_row, "wrong": wrong}


def likelihood_step(
    model: str,
    samples: str,
    layout: dict[str, Any],
    *,
    shards: bool = False,
    another: bool = False,
) -> dict[str, Any] | None:
    """One optimizer step on minus the sum of all log-probs; on rank 0: loss, pre-clip gradient
    norm, averaged gradients (with `shards`, where the optimizer is distributed, none), digests of
    the tower on every rank that has it, and for each rank of which of its micro-batches has
    images. another: take a second step after it, which Megatron holds to what it saw in the
    first."""
    setup = Setup(model, {**layout, "distributed_optimizer": shards})
    batch = setup.batch(samples)
    stats = train_step(setup.policy, batch, _minus_logprobs).result()
    scale = max(stats["grad/norm"] / OPTIMIZER.clip_grad, 1.0)  # undo the clipping
    gradients = []
    for shard in setup.shards:
        if hasattr(shard.tensor, "main_grad") and not shards:
            gradients.append(replace(shard, tensor=shard.tensor.main_grad * scale))
    everywhere: list[Any] = [None] * dist.get_world_size()
    seen = [microbatch.images is not None for microbatch in batch.microbatches]
    dist.all_gather_object(everywhere, (_digests_of_towers(setup.policy), seen))
    tensors = setup.gather(gradients)
    if another:
        train_step(setup.policy, batch, _minus_logprobs)
    if tensors is None:
        return None
    return {
        "losses": [stats["loss/value"]],
        "norms": [stats["grad/norm"]],
        "tensors": tensors,
        "towers": [digest for digests, _ in everywhere for digest in digests],
        "have_images": [seen for _, seen in everywhere],
    }


def _minus_logprobs(microbatch: Any, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
    return -output[0].sum(), Stats()


def _digests_of_towers(policy: Policy) -> list[str]:
    found = []
    for chunk in policy.models:
        if chunk.image_features is None:
            continue
        digest = hashlib.sha256()
        for parameter in chunk.visual.parameters():
            digest.update(parameter.detach().numpy().tobytes())
        found.append(digest.hexdigest())
    return found
