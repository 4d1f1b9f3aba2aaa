"""Adapters as PEFT keeps them: adapter_config.json and adapter_model.safetensors.

Every expert has tensors of its own there. An adapter that experts share is written for each of
them, and read where all are equal."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from grpo_megatron.checkpoints import durable
from grpo_megatron.checkpoints.casts import cast
from grpo_megatron.checkpoints.hf_import import refuse_unfit
from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import CheckpointError
from grpo_megatron.files import empty_directory
from grpo_megatron.plan.adapter_files import CONFIG, NOTE, WEIGHTS, note_of, refuse_other_adapters
from grpo_megatron.plan.family import family_of
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.weights.gather import Shard, ShardedModel, on_rank_0
from grpo_megatron.weights.parameters import Parameter

_PREFIX = "base_model.model."
_SHARED = re.compile(r"\.experts\.(?=[a-z])")
"""In the name of an adapter that experts share: what the number of one follows."""
_OF_TOWER = r"(.*\.)?visual\..*"
"""Modules of a vision tower, whose layers may have the names of the text's."""


@dataclass(frozen=True, slots=True)
class AdapterMap:
    """Says of adapters what `TensorMap` does of weights: each parameter is one tensor."""

    tied_embeddings: bool = False

    def parameter(self, name: str, shape: tuple[int, ...]) -> Parameter:
        """Return the parameter of that name."""
        return Parameter(name, shape, ((name, shape),))


def adapter_model(policy: Policy) -> ShardedModel:
    """Return all adapters, spread over ranks as they are."""
    shards: list[Shard] = []
    for adapter in policy.adapters:
        for _, shard in adapter.shards():
            shards.append(shard)
    return ShardedModel(AdapterMap(), shards)


def export_adapters(policy: Policy, directory: Path, base_model: str) -> None:
    """Write the adapters of all ranks. base_model: what PEFT calls base_model_name_or_path. Where
    PEFT would compute something else with them, a note beside them says so.

    Rank 0 brings them together in host memory. Raises SetupError when the disk is full. Collective.
    """
    model = adapter_model(policy)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.stream(model.entries, [0] * len(model.entries)):
        for of_layer in _names_in_file(policy, name):
            tensors[of_layer] = tensor.cpu().clone().contiguous()
    assert policy.lora is not None  # there are adapters
    sees_images = "vision_config" in policy.hf
    config = _peft_config(policy.lora, sorted(tensors), base_model, sees_images=sees_images)
    has_experts = bool(policy.config.num_moe_experts)
    note = note_of(config["target_modules"], has_experts=has_experts)
    on_rank_0(_write, directory, tensors, config, note)


def _write(
    directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any], note: str
) -> None:
    """Write the files of adapters. note: what a reader must know of them, if anything."""
    working = durable.working_directory(directory)
    empty_directory(working)
    with durable.disk_errors(working):
        save_file(tensors, working / WEIGHTS, metadata={"format": "pt"})
        if note:
            (working / NOTE).write_text(note, encoding="utf-8")
    durable.write_json(working / CONFIG, config)
    durable.commit(working, directory)


def _peft_config(
    lora: LoraConfig, names: list[str], base_model: str, *, sees_images: bool
) -> dict[str, Any]:
    """Return adapter_config.json, of which PEFT takes defaults for the rest."""
    modules = set()
    for name in names:
        path = re.sub(r"^.*\.layers\.\d+\.", "", name)
        modules.add(re.sub(r"\.lora_([AB]\.weight|magnitude_vector)$", "", path))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha_value,
        "lora_dropout": 0.0,
        "use_rslora": lora.rank_stabilised,
        "use_dora": lora.dora,
        "bias": "none",
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    if sees_images:  # only then: older releases of PEFT know no such key
        config["exclude_modules"] = _OF_TOWER
    return config


def _names_in_file(policy: Policy, name: str) -> Iterator[str]:
    """Yield the names of a parameter in PEFT's file: several where experts share it."""
    in_file = _PREFIX + family_of(policy.hf["model_type"]).module_of(name)
    if not _SHARED.search(name) or ".shared_experts." in name:
        yield in_file
        return
    for expert in range(policy.config.num_moe_experts or 0):
        yield _SHARED.sub(f".experts.{expert}.", in_file)


def import_adapters(policy: Policy, directory: Path) -> None:
    """Fill the adapters from PEFT's files; each rank takes the parts that it has. Collective.

    Raises CheckpointError where they are of another rank, scale, kind or model than the policy's,
    or have numbers that are not finite, or would not be in the policy's dtype.
    """
    assert policy.lora is not None  # there are adapters
    refuse_other_adapters(policy.lora, directory)
    model = adapter_model(policy)
    wanted: dict[str, tuple[int, ...]] = {}
    for entry in model.entries:
        for name in _names_in_file(policy, entry.parameter.name):
            wanted[name] = entry.parameter.shape
    with (
        durable.explained(f"cannot read {WEIGHTS}", directory),
        safe_open(directory / WEIGHTS, "pt") as file,
    ):
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        refuse_unfit(
            directory,
            found,
            wanted,
            "[lora] for this model",
            "do rank, targets and experts of [lora] say how the adapters were made?",
        )
        for shard in model.shards:
            names = list(_names_in_file(policy, shard.name))
            whole = file.get_tensor(names[0])
            for name in names[1:]:
                if not torch.equal(file.get_tensor(name), whole):
                    raise CheckpointError(
                        f"{name} differs from {names[0]}, and lora.experts is 'shared'",
                        where=str(directory),
                        remedy="lora.experts='each'",
                    )
            whole = _as_weights(names[0], whole, shard.tensor.dtype, directory)
            if shard.dim is not None:
                whole = whole.chunk(shard.size, shard.dim)[shard.rank]
            shard.tensor.data.copy_(whole)
    dist.barrier()


def _as_weights(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, directory: Path
) -> torch.Tensor:
    """Return a tensor of any floating-point type as `dtype`. Raises CheckpointError where a number
    is not finite, or would not be."""
    exact = tensor.double()  # of 8-bit types torch computes little
    if not torch.isfinite(exact).all():
        raise CheckpointError(
            f"{name} of {WEIGHTS} has numbers that are not finite",
            where=str(directory),
            remedy="give adapters from before the training that spoilt them",
        )
    return cast(name, exact, dtype, str(directory), remedy="give adapters with smaller numbers")
