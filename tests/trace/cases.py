"""Traces of small models, inside of a worker; some with a fault that has to be found out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

from grpo_megatron.trace.recipe import trace_config  # isort: skip  # before Megatron
import torch
import torch.distributed as dist
from megatron.core import distributed as ddp
from megatron.core import parallel_state
from megatron.core.transformer.transformer_layer import TransformerLayer

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.trace.values import DEVICE

_SETTINGS = [
    "model.preset=null",
    "batch.num_prompts=256",
    "batch.num_samples_per_prompt=8",
    "batch.updates_per_rollout=1",
    "rollout.segment_tokens=null",
    "rollout.num_replicas=1",
    "rollout.tensor_parallel_size=1",
]
_ONE_RANK: dict[str, Any] = {
    "num_ranks": 1,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "recompute": "none",
}
_NUM_GPUS = 8
FAULT_BYTES = 5 * 10**9


def compared(
    folder: str,
    preset: str,
    trainer: dict[str, Any],
    *,
    hf: dict[str, Any] | None = None,
    on_gpu: bool = True,
    tokens: int = 4096,
    settings: tuple[str, ...] = (),
    fault: str = "",
) -> dict[str, Any]:
    """Trace a few layers of a preset: what differs from the plan, by rank; how many numbers were
    compared; the moving bytes of both sides."""
    config = _config(folder, preset, trainer, hf or {}, on_gpu, tokens, settings)
    with _FAULTS[fault]():
        found = trace_config(config, say=_nobody)
    differences = {}
    peaks = {}
    for trace, rows in zip(found.traces, found.compared, strict=True):
        differences[trace.rank] = [row.what for row in rows if not row.agrees]
        static = sum(trace.static.parts.values())
        [peak] = [row for row in rows if row.what == "peak"]
        peaks[trace.rank] = (peak.planned - static, peak.traced - static)
    return {
        "differences": differences,
        "num_numbers": sum(len(rows) for rows in found.compared),
        "peaks": peaks,
        "places": [trace.peak.place for trace in found.traces],
    }


def _nobody(text: str) -> None:
    """Hear of a rank, and say nothing."""


def _config(
    folder: str,
    preset: str,
    trainer: dict[str, Any],
    hf: dict[str, Any],
    on_gpu: bool,
    tokens: int,
    settings: tuple[str, ...],
) -> RunConfig:
    model = {**load_preset(preset).hf, "num_hidden_layers": 4, "vocab_size": 1000, **hf}
    path = Path(folder) / "model"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(model))
    layout = {**_ONE_RANK, "max_tokens_per_microbatch": tokens, **trainer}
    overrides = [*_SETTINGS, f"model.path={path}", "placement.gpus_per_node=0"]
    overrides += [f"rollout.max_model_len={tokens}", f"rollout.max_new_tokens={tokens - 100}"]
    overrides += [f"trainer.{name}={json.dumps(value)}" for name, value in layout.items()]
    config = resolve("dense/qwen3-8b", [*overrides, *settings]).config
    if not on_gpu:
        return config
    placement = config.placement.model_copy(update={"gpus_per_node": _NUM_GPUS})
    return config.model_copy(update={"placement": placement})


# --- faults


@contextmanager
def _greedy_layer() -> Iterator[None]:
    """Every layer takes five gigabytes more while it computes."""
    forward = TransformerLayer.forward

    def greedy(self: Any, *args: Any, **kwargs: Any) -> Any:
        held = torch.empty(FAULT_BYTES // 4, dtype=torch.float32, device=DEVICE)
        found = forward(self, *args, **kwargs)
        del held
        return found

    with mock.patch.object(TransformerLayer, "forward", greedy):
        yield


@contextmanager
def _half_gradients() -> Iterator[None]:
    """Gradients are reduced in the weights' type."""
    make = ddp.DistributedDataParallelConfig

    def changed(**settings: Any) -> Any:
        return make(**{**settings, "grad_reduce_in_fp32": False})

    with mock.patch.object(ddp, "DistributedDataParallelConfig", changed):
        yield


@contextmanager
def _one_more_collective() -> Iterator[None]:
    """Every layer adds up its output once more."""
    forward = TransformerLayer.forward

    def chatty(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        dist.all_reduce(found[0].detach(), group=parallel_state.get_tensor_model_parallel_group())
        return found

    with mock.patch.object(TransformerLayer, "forward", chatty):
        yield


_FAULTS = {
    "": nullcontext,
    "greedy layer": _greedy_layer,
    "half gradients": _half_gradients,
    "one more collective": _one_more_collective,
}


def compared_recipe(recipe: str, overrides: list[str]) -> dict[str, Any]:
    """Trace a recipe: what differs from its plan, by rank; the passes of each rank's step, and the
    numbers of what holds them."""
    found = trace_config(resolve(recipe, overrides).config, say=_nobody)
    differences = {}
    for trace, rows in zip(found.traces, found.compared, strict=True):
        differences[trace.rank] = [row for row in rows if not row.agrees]
    first = found.traces[0]
    return {
        "differences": differences,
        "passes": [(one.phase, one.num_microbatches) for one in first.passes],
        "samples": first.load.samples_per_microbatch,
        "policy_tokens": first.load.policy_tokens,
    }
