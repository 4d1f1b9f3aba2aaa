"""vLLM's own model of a checkpoint, as one worker of a parallel engine has it, without the others.

Layers and loaders only look at the size of the group and at their rank in it, so a group that does
nothing is enough to make any worker of any layout, one after the other, in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist

from grpo_megatron.checkpoints.hf_import import HFReader
from grpo_megatron.config.run import RolloutConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.rollout.plugin.kept_boxes import record_kept_boxes
from grpo_megatron.rollout.plugin.received_parts import loadable
from grpo_megatron.weights.boxes import Box, whole_box
from grpo_megatron.weights.fp8_blocks import quantise, scale_name
from grpo_megatron.weights.tensor_entry import TensorEntry, entry_of

Weights = dict[str, torch.Tensor]


@contextmanager
def worker_model(
    checkpoint: Path,
    *,
    tensor_parallel_size: int = 1,
    rank: int = 0,
    expert_parallel: bool = False,
    fp8: Literal["none", "blockwise"] = "none",
) -> Iterator[tuple[Any, torch.nn.Module]]:
    """vLLM's configuration and model of worker `rank`, with random weights."""
    os.environ["VLLM_PLUGINS"] = "grpo_megatron"
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model
    from vllm.plugins import load_general_plugins

    from grpo_megatron.plan.fp8_weights import published_weights
    from grpo_megatron.plan.hf_config import engine_overrides
    from grpo_megatron.rollout.replica import _hf_config

    load_general_plugins()
    hf = _hf_config(checkpoint)
    overrides = engine_overrides(hf) | published_weights(RolloutConfig(fp8=fp8), hf)
    attention_backend = None
    if hf.get("kv_lora_rank") is not None:
        attention_backend = "CPU_MLA"  # as a replica's, whatever CPU this is
    config = EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        hf_overrides=overrides,
        attention_backend=attention_backend,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=expert_parallel,
        distributed_executor_backend="mp",
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        max_model_len=128,
        block_size=32,
    ).create_engine_config()
    with _idle_group(parallel_state, tensor_parallel_size, rank), set_current_vllm_config(config):
        parallel_state.init_distributed_environment(
            world_size=tensor_parallel_size, rank=rank, local_rank=rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel_size)
        try:
            yield config, get_model(vllm_config=config)
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


@contextmanager
def _idle_group(parallel_state: Any, world_size: int, rank: int) -> Iterator[None]:
    """torch's fake process group, of which vLLM makes all of its groups."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    new_group = dist.new_group
    init_group = parallel_state.init_model_parallel_group

    def new_fake_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new_group(ranks, backend="fake")

    def init_idle_group(*arguments: Any, **options: Any) -> Any:
        options |= {"use_message_queue_broadcaster": False, "use_device_communicator": False}
        return init_group(*arguments, **options)

    def all_on_this_node(*_: Any, **__: Any) -> list[bool]:
        return [True] * world_size

    try:
        with (
            mock.patch.object(dist, "new_group", new_fake_group),
            mock.patch.object(torch.distributed, "new_group", new_fake_group),
            mock.patch.object(parallel_state, "init_model_parallel_group", init_idle_group),
            mock.patch.object(parallel_state, "in_the_same_node_as", all_on_this_node),
        ):
            yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def load(config: Any, model: torch.nn.Module, tensors: Any) -> dict[str, bytes]:
    """Load weights as an update does, layer by layer; returns `state_of` the model.

    Linear layers of the CPU build keep a packed copy that nobody can look at, and leave their
    parameter as it was: what they packed is noted before."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    packed: dict[torch.nn.Module, bytes] = {}
    process = UnquantizedLinearMethod.process_weights_after_loading

    def note_and_process(method: Any, layer: torch.nn.Module) -> None:
        packed[layer] = _bytes(layer.weight)
        process(method, layer)

    with (
        torch.no_grad(),
        mock.patch.object(
            UnquantizedLinearMethod, "process_weights_after_loading", note_and_process
        ),
    ):
        initialize_layerwise_reload(model)
        model.load_weights(tensors)
        finalize_layerwise_reload(model, config.model_config)
    state = state_of(model)
    for name, layer in model.named_modules():
        if layer in packed:
            state[f"{name}.weight"] = packed[layer]
    return state


def state_of(model: torch.nn.Module) -> dict[str, bytes]:
    """The bytes of all parameters and buffers, in the engine's layout."""
    state = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        state[name] = _bytes(tensor)
    return state


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def compare_sliced_load(
    checkpoint: str,
    tensor_parallel_size: int,
    rank: int,
    expert_parallel: bool,
    fp8: Literal["none", "blockwise"] = "none",
) -> dict[str, Any]:
    """Load a checkpoint as a whole, then other numbers, then the kept parts of the checkpoint.

    Tensors have the names under which they are published. fp8: as `rollout.fp8`; the tensors of the
    checkpoint are then rounded as a publish does.
    Returns `different` names of parameters between the first and the last, `unchanged` by the
    second, the bytes kept and those of the whole checkpoint, and tensors that are taken `whole`."""
    reader = HFReader(Path(checkpoint))
    weights: Weights = {}
    for name in reader.shapes():
        weights[name] = reader.tensor(name).contiguous()
    if fp8 == "blockwise":
        weights = in_fp8(weights)
    entries = [entry_of(name, tensor) for name, tensor in weights.items()]
    with worker_model(
        Path(checkpoint),
        tensor_parallel_size=tensor_parallel_size,
        rank=rank,
        expert_parallel=expert_parallel,
        fp8=fp8,
    ) as (config, model):
        before = state_of(model)
        boxes, whole = record_kept_boxes(model, entries)
        assert state_of(model) == before, "recording changed parameters"
        expected = load(config, model, weights.items())
        others = ((name, _changed(tensor)) for name, tensor in weights.items())
        scrambled = load(config, model, others)
        found = load(config, model, loadable(_kept(entries, weights, boxes)))
    kept_bytes = 0
    for entry in entries:
        for box in boxes.get(entry.name, ()):
            kept_bytes += box.num_elements * entry.torch_dtype.itemsize
    return {
        "different": [name for name in expected if expected[name] != found[name]],
        "unchanged": [name for name in expected if expected[name] == scrambled[name]],
        "kept_bytes": kept_bytes,
        "all_bytes": sum(entry.num_bytes for entry in entries),
        "parameter_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "whole": whole,
    }


def compare_stacked_load(checkpoint: str) -> list[str]:
    """Load a checkpoint's files, in which experts are stacked, then other numbers, then its tensors
    by the names under which they are published; the parameters that differ."""
    from safetensors.torch import load_file

    in_files = load_file(Path(checkpoint) / "model.safetensors")
    reader = HFReader(Path(checkpoint))
    published = {name: reader.tensor(name).contiguous() for name in reader.shapes()}
    with worker_model(Path(checkpoint)) as (config, model):
        expected = load(config, model, in_files.items())
        load(config, model, ((name, _changed(tensor)) for name, tensor in published.items()))
        found = load(config, model, published.items())
    return [name for name in expected if expected[name] != found[name]]


MATRICES = ("proj.weight", "_with_mqa.weight", ".w1.weight", ".w2.weight", ".w3.weight")
"""End the names of the tensors that `rollout.fp8` is of."""


def in_fp8(weights: Weights) -> Weights:
    """Return numbers and scales of matrices, in the order of the tensors, and the rest as it is."""
    found: Weights = {}
    for name, tensor in weights.items():
        found[name] = tensor
        if name.endswith(MATRICES):
            found[name], found[scale_name(name)] = quantise(tensor)
    return found


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """Return other numbers of the same type."""
    if tensor.dtype == torch.float8_e4m3fn:
        return (-tensor.float()).to(tensor.dtype)
    return tensor + 1


def record_in_another_precision(checkpoint: str) -> str:
    """Ask a worker that keeps FP8 what it keeps of a checkpoint that has none; the error."""
    from safetensors.torch import load_file

    weights = load_file(Path(checkpoint) / "model.safetensors")
    entries = [entry_of(name, tensor) for name, tensor in weights.items()]
    with worker_model(Path(checkpoint), fp8="blockwise") as (_, model):
        try:
            record_kept_boxes(model, entries)
        except MismatchError as error:
            return error.message
    return ""


def load_less_than_planned(checkpoint: str, name: str) -> str:
    """Load a part of `name` that lacks its last row; the error of the loader."""
    from safetensors.torch import load_file

    weights = load_file(Path(checkpoint) / "model.safetensors")
    entries = [entry_of(key, tensor) for key, tensor in weights.items()]
    with worker_model(Path(checkpoint)) as (config, model):
        boxes, _ = record_kept_boxes(model, entries)
        [box] = boxes[name]
        boxes[name] = [Box(box.start, (box.shape[0] - 1, *box.shape[1:]))]
        try:
            load(config, model, loadable(_kept(entries, weights, boxes)))
        except MismatchError as error:
            return error.message
    return ""


def _kept(
    entries: list[TensorEntry], weights: Weights, boxes: dict[str, list[Box]]
) -> Iterator[tuple[TensorEntry, dict[Box, torch.Tensor]]]:
    for entry in entries:
        parts = {}
        for box in boxes.get(entry.name, ()):
            view = box.view_in(whole_box(entry.shape), weights[entry.name])
            parts[box] = view.clone(memory_format=torch.contiguous_format)
        if parts:
            yield entry, parts
