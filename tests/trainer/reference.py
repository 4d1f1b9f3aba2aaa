"""What transformers computes for the samples that the trainer is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.batching.store import SampleTable


def reference_logprobs(
    model: str | Path, table: SampleTable, *, temperature: float = 1.0
) -> list[np.ndarray]:
    """fp32 log-probs of each sample's completion, one sample at a time."""
    found = []
    for row, logits in enumerate(reference_logits(model, table)):
        ids = torch.from_numpy(table.completion(row)[0].astype(np.int64))[:, None]
        found.append((logits / temperature).log_softmax(-1).gather(-1, ids)[:, 0].numpy())
    return found


def reference_logits(model: str | Path, table: SampleTable) -> Iterator[torch.Tensor]:
    """fp32, [completion length, vocabulary], of one sample after the other."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in range(len(table)):
        prompt, (completion, _) = table.prompt_ids(row), table.completion(row)
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        with torch.no_grad():
            yield policy(ids).logits[0, len(prompt) - 1 : -1]
