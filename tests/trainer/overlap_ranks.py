"""Cases for worker processes: weights that the next forward gathers."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import distributed as ddp

from grpo_megatron.trainer.steps.optimizer_step import (
    apply_gradients,
    compute_gradients,
    logprob_pass,
)
from tests.trainer.trainer_ranks import Setup, loss_of, state_tensors

BUCKET_ELEMENTS = 1000
"""So that a tiny model has several buckets, which are gathered one after another."""


def step_without_gather(model: str, samples: str, layout: dict[str, Any]) -> dict[str, Any]:
    """One optimizer step whose weights nobody gathers, then two passes that look at them.

    `differing`: how many of this rank's tensors change when the rest of them is gathered;
    `passes`: log-probs of this rank's tokens before that and after it; `weights`: this rank's
    tensors after it, and those that were gathered at once."""
    passes: list[torch.Tensor] = []
    weights: list[list[np.ndarray]] = []
    in_buckets = partial(ddp.DistributedDataParallelConfig, bucket_size=BUCKET_ELEMENTS)
    for overlaps in (True, False):
        with mock.patch.object(ddp, "DistributedDataParallelConfig", in_buckets):
            setup = Setup(model, {**layout, "overlap_communication": overlaps})
        batch = setup.batch(samples)
        stats = compute_gradients(setup.policy, batch, loss_of(setup, samples))
        apply_gradients(setup.policy, stats, gather=not overlaps)
        if overlaps:
            stale = [tensor.clone() for tensor in state_tensors(setup.policy)]
            passes.append(_logprobs(setup, batch))
            setup.policy.gather_weights()
            whole = state_tensors(setup.policy)
            pairs = zip(stale, whole, strict=True)
            differing = sum(not torch.equal(before, after) for before, after in pairs)
            passes.append(_logprobs(setup, batch))
        weights.append([tensor.numpy().copy() for tensor in state_tensors(setup.policy)])
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, differing)
    return {
        "differing": everywhere,
        "passes": [tensor.numpy() for tensor in passes],
        "weights": weights,
    }


def _logprobs(setup: Setup, batch) -> torch.Tensor:
    return torch.cat([output[0] for output in logprob_pass(setup.policy, batch)])
