"""Log-probs of a probe text by Megatron and by transformers, both in fp32."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import psutil
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from tokenizers import Tokenizer

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.distributed import (
    Part,
    load_checkpoint,
    load_model,
    read_state,
)
from grpo_megatron.checkpoints.retention import ADAPTERS_FOLDER
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.plan.reward_labels import labels_of
from grpo_megatron.trainer.megatron.context_parallel import ContextRank
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.platform import device
from grpo_megatron.trainer.megatron.policy import Policy, add_adapters, build_models
from grpo_megatron.trainer.routing.router_replay import RouteReplay
from grpo_megatron.trainer.steps.microbatch import UpdateBatch, build_microbatch
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass
from grpo_megatron.weights.gather import all_gathered
from grpo_megatron.weights.low_rank import exact_sum

TOLERANCE = 1e-3
"""fp32 rounding is 1e-5 on small models and grows with depth; a wrong tensor is off by 0.1."""
_TEXT = (
    "A checkpoint that was converted right continues this sentence exactly as the original "
    "does: 2 + 2 = 4, le chat dort, and def f(x): return x."
)
_MAX_TOKENS = 64


def why_not(hf: dict[str, Any], num_elements: int, layout: TrainerConfig) -> str | None:
    """Say why the comparison cannot be made here; None: it can.

    `num_elements` are those of the model, which Megatron and transformers hold in fp32."""
    if hf.get("quantization_config"):
        return "transformers needs a GPU for block-fp8 weights"
    if labels_of(hf):
        return "a reward model has none"
    ranks_of_a_copy = layout.tensor_parallel_size * layout.pipeline_parallel_size
    copies = max(1, layout.num_ranks // ranks_of_a_copy)
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
    *,
    domain: str,
    stored: Mapping[str, torch.dtype],
) -> float:
    """Return the largest |log-prob difference| of both checkpoints, in nats. Collective.

    weights: Megatron's files, read at `layout`; dtype: to which weights are rounded first, None:
    they stay as they are, and sums with adapters have the dtype of their weight; domain: whose
    adapters are in the sums, where domains have adapters of their own; stored: the dtypes of a
    run's checkpoint, by the names of Megatron's parameters. Raises MismatchError where transformers
    cannot compute with the checkpoint."""
    ids = _probe_ids(hf, hf_directory)
    box: list[torch.Tensor | None] = [None]
    if dist.get_rank() == 0:
        box = [_by_transformers(hf_directory, ids, dtype)]
    dist.broadcast_object_list(box)
    [expected] = box
    parts = all_gathered(_by_megatron(hf, weights, layout, ids, dtype, domain, stored))
    found = next(part for part in parts if part is not None)
    return float((found - expected).abs().max())


def _probe_ids(hf: dict[str, Any], directory: Path) -> list[int]:
    """Tokenise the probe text; without a tokenizer, spread numbers over the vocabulary."""
    file = directory / "tokenizer.json"
    if file.exists():
        ids: list[int] = Tokenizer.from_file(str(file)).encode(_TEXT).ids
        if len(ids) > 1:
            return ids[:_MAX_TOKENS]
    return [(i * 7919 + 13) % hf["vocab_size"] for i in range(_MAX_TOKENS)]


def _by_transformers(directory: Path, ids: list[int], dtype: torch.dtype | None) -> torch.Tensor:
    """Compute log-probs of all ids but the first, fp32 [len(ids) - 1], in a process of its own."""
    name = str(dtype or torch.float32).removeprefix("torch.")
    module = "grpo_megatron.trainer.checks.transformers_logprobs"
    command = [sys.executable, "-m", module, str(directory), name]
    done = subprocess.run(
        command, input=json.dumps(ids), capture_output=True, text=True, check=False
    )
    if done.returncode:
        lines = ["it died", *done.stderr.strip().splitlines()]
        raise MismatchError(
            f"transformers cannot compute with the checkpoint: {lines[-1]}",
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
    domain: str,
    stored: Mapping[str, torch.dtype],
) -> torch.Tensor | None:
    """Compute the same on the last pipeline stage; elsewhere None. Collective."""
    config = transformer_config(hf, layout)
    models = build_models(config, hf, layout)
    policy = Policy(hf, config, models, None, RouteReplay(models, config))
    lora = read_state(weights.parent).get("lora")
    if lora is not None:
        for model in models:
            add_adapters(model, hf, config, LoraConfig(**lora), 0)
    load_model(weights, policy.chunks, weights_alone=bool(domain))
    if domain:
        adapters = Part(f"{ADAPTERS_FOLDER}/{domain}", policy.chunks, holds="adapters")
        load_checkpoint(weights.parent, adapters)
    if lora is not None:  # what was written is the sum
        _merge(policy, stored, rounded=dtype is None)
    if dtype is not None:
        for model in policy.models:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.to(dtype))
    table = cast(SampleTable, _ProbeTable(ids))
    row = np.zeros(1, np.int64)
    microbatches = []
    for index in range(layout.pipeline_parallel_size):  # the schedule wants one a stage
        microbatch = build_microbatch(
            index,
            table,
            row,
            pad_to=layout.token_multiple,
            device=device(),
            context=ContextRank.of_this_process(),
        )
        microbatches.append(microbatch)
    batch = UpdateBatch(torch.from_numpy(row), tuple(microbatches), len(ids))
    logprobs = logprob_pass(policy, batch)[0][0]
    if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
        return logprobs.cpu()
    return None


def _merge(policy: Policy, stored: Mapping[str, torch.dtype], *, rounded: bool) -> None:
    """Put the adapters into the weights, and themselves aside.

    stored: the dtypes in which the weights were trained, and so that of DoRA's norms; rounded:
    whether the sums have them, too. Collective."""
    adapted = [shard for shard in policy.sharded.shards if shard.addend is not None]
    for shard in adapted:
        shard.tensor.data = shard.tensor.data.to(stored[shard.name])
    policy.sharded.prepare()
    for shard in adapted:
        assert shard.addend is not None  # chosen by it
        value = exact_sum(shard.tensor, shard.addend())
        if rounded:
            value = value.to(stored[shard.name])
        shard.tensor.data = value.float()
    for model in policy.models:
        assert model.adapters is not None  # they were added
        model.adapters.enabled = False


class _ProbeTable:
    """What `build_microbatch` reads of a recorded step: one sample, its prompt the first token."""

    def __init__(self, ids: list[int]):
        self._ids = ids
        self.episode = np.zeros(1, np.int64)

    def prompt_ids(self, row: int) -> np.ndarray:
        return np.array(self._ids[:1])

    def completion(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        completion = np.array(self._ids[1:])
        return completion, np.zeros(len(completion))

    def policy_places(self, row: int) -> np.ndarray:
        return np.arange(len(self._ids) - 1)

    def kept(self, row: int) -> None:
        return None

    def images(self, row: int) -> tuple[()]:
        return ()
