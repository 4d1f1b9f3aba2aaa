"""Log-probs of a probe text by Megatron and by transformers, both in fp32."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tokenizers import Tokenizer

from grpo_megatron.checkpoints.distributed import load_model
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.platform import device
from grpo_megatron.trainer.megatron.policy import Policy, build_models
from grpo_megatron.trainer.routing.router_replay import RouteReplay
from grpo_megatron.trainer.steps.microbatch import UpdateBatch, build_microbatch
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass
from grpo_megatron.weights.gather import all_gathered

TOLERANCE = 1e-3
"""fp32 rounding is 1e-5 on small models and grows with depth; a wrong tensor is off by 0.1."""
_TEXT = (
    "A checkpoint that was converted right continues this sentence exactly as the original "
    "does: 2 + 2 = 4, le chat dort, and def f(x): return x."
)
_MAX_TOKENS = 64


def why_not(hf: dict[str, Any], num_elements: int, layout: TrainerConfig) -> str | None:
    """Why the comparison cannot be made here; None: it can."""
    if hf.get("quantization_config"):
        return "transformers needs a GPU for block-fp8 weights"
    copies = max(
        1, layout.num_ranks // (layout.tensor_parallel_size * layout.pipeline_parallel_size)
    )
    needed = num_elements * 4 * copies * 1.2
    free = psutil.virtual_memory().available
    if needed > free:
        return f"it takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free"
    return None


def largest_difference(
    hf: dict[str, Any],
    hf_directory: Path,
    weights: Path,
    layout: TrainerConfig,
    dtype: torch.dtype | None,
) -> float:
    """Max |log-prob difference| of both checkpoints at `layout`; collective. dtype: of rounding."""
    ids = _probe_ids(hf, hf_directory)
    expected = [_by_transformers(hf_directory, ids, dtype) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(expected)
    found = _by_megatron(hf, weights, layout, ids, dtype)
    found = next(part for part in all_gathered(found) if part is not None)
    return float((found - expected[0]).abs().max())


def _probe_ids(hf: dict[str, Any], directory: Path) -> list[int]:
    """Tokens of the probe text; without a tokenizer, numbers spread over the vocabulary."""
    ids = [(i * 7919 + 13) % hf["vocab_size"] for i in range(_MAX_TOKENS)]
    if (directory / "tokenizer.json").exists():
        text = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(_TEXT).ids
        ids = text[:_MAX_TOKENS] if len(text) > 1 else ids
    return ids


def _by_transformers(directory: Path, ids: list[int], dtype: torch.dtype | None) -> torch.Tensor:
    name = str(dtype or torch.float32).removeprefix("torch.")
    module = "grpo_megatron.trainer.checks.transformers_logprobs"
    command = [sys.executable, "-m", module, str(directory), name]
    done = subprocess.run(
        command, input=json.dumps(ids), capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise MismatchError(
            "transformers cannot compute with the checkpoint: "
            + (done.stderr.strip().splitlines() or ["it died"])[-1],
            where=str(directory),
            remedy="convert with --no-probe",
        )
    return torch.tensor(json.loads(done.stdout))


def _by_megatron(
    hf: dict[str, Any],
    weights: Path,
    layout: TrainerConfig,
    ids: list[int],
    dtype: torch.dtype | None,
) -> torch.Tensor | None:
    """On the last pipeline stage, elsewhere None."""
    config = transformer_config(hf, layout)
    models = build_models(config, hf, layout)
    policy = Policy(hf, config, models, None, RouteReplay(models, config))
    load_model(weights, policy.chunks)
    if dtype is not None:
        for tensor in (t for model in policy.models for t in model.parameters()):
            tensor.data.copy_(tensor.data.to(dtype))
    table = SimpleNamespace(
        prompt_ids=lambda row: np.array(ids[:1]),
        kept=lambda row: None,
        completion=lambda row: (np.array(ids[1:]), np.zeros(len(ids) - 1)),
    )
    row = np.zeros(1, np.int64)
    parts = layout.tensor_parallel_size
    many = tuple(
        build_microbatch(i, table, row, device=device(), pad_to=parts)
        for i in range(layout.pipeline_parallel_size)
    )
    found = logprob_pass(policy, UpdateBatch(torch.from_numpy(row), many, len(ids)))[0][0]
    return found.cpu() if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else None
