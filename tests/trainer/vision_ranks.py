"""What the worker groups execute for a policy that sees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from megatron.core.parallel_state import is_pipeline_last_stage

from grpo_megatron.batching.prefix_rows import SamplePaths, lay_out
from grpo_megatron.batching.row_images import row_images
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass
from tests.trainer.trainer_ranks import Setup, _by_row


def features(model: str, samples: str) -> np.ndarray:
    """What a bfloat16 tower makes of the images of a step's first three prompts, each once."""
    setup = Setup(model, {"precision": "bfloat16"})
    table = SampleTable(Path(samples))
    split = lay_out(SamplePaths.without_sharing(table.prompt_lengths + table.completion_lengths))
    images = row_images(table, np.arange(len(table)), split)
    [chunk] = setup.policy.models
    return chunk.image_features.of(images).float().numpy()


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
