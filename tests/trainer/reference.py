"""What transformers computes for the samples that the trainer is given."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from grpo_megatron.batching.store import SampleTable


def reference_logprobs(model: str | Path, table: SampleTable, *,
                       temperature: float = 1.0) -> list[np.ndarray]:
    """fp32 log-probs of each sample's completion, one sample at a time."""
    from transformers import AutoModelForCausalLM

    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = []
    for row in range(len(table)):
        prompt, (completion, _) = table.prompt_ids(row), table.completion(row)
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1] / temperature
        logprobs = logits.log_softmax(-1).gather(-1, ids[0, len(prompt):, None])[:, 0]
        found.append(logprobs.numpy())
    return found
