"""Adapters in PEFT's format: whether their configuration, and the header of their tensors, are what
[lora] describes, and what PEFT does not compute with them. The numbers are read by the trainer
(`trainer.lora.peft_format`)."""

import json
import reprlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.errors import CheckpointError, raised_as

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
NOTE = "README.md"
_NOT_FOR_PEFT = """\
# Not for PEFT

PEFT computes something else with these adapters than was trained, with a warning at most. The
model has experts, which are no modules of transformers 5, and PEFT (0.21.2) takes every layer that
is called `gate_proj`, `up_proj` or `down_proj` for tensors of all experts, also those of shared
experts and of dense layers.

For PEFT train adapters of the attention alone, `lora.targets = ["self_attn"]`, or use the
checkpoint in `export/`, which has these adapters merged into its weights.
"""
_LARGEST_HEADER = 100_000_000
"""Bytes; safetensors reads no longer one either."""
_DTYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_HARMLESS = frozenset(
    {
        # where adapters are, which the names of their tensors say too, and those are compared
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
        # of training by PEFT
        "lora_dropout",
        "inference_mode",
        "eva_config",
        "lora_dtype",
        "lorap_lr_ratio",
        "lorap_emb_lr",
        "runtime_config",
        # how adapters began, which init_lora_weights says, too, where it matters
        "loftq_config",
        "corda_config",
        # for finding classes and files
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "peft_version",
        "megatron_core",
        # without use_qalora, which is refused, nothing reads it; it is never 0
        "qalora_group_size",
    }
)
"""Keys that change nothing in what the tensors mean, whatever their values. Every other key may."""
_ALLOWED: dict[str, tuple[Any, ...]] = {
    # the others (pissa, olora, corda, loftq, ...) change the base weights when adapters begin
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
    "task_type": ("CAUSAL_LM",),
}
"""Values with which a key changes nothing; so it does with null, false and what is empty."""


class _Tensor(msgspec.Struct, frozen=True):
    """What the header of a safetensors file says of a tensor."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def refuse_other_adapters(lora: LoraConfig, directory: Path) -> None:
    """Raise CheckpointError where the adapters in a directory are of another rank, scale or kind
    than [lora] says, or a file of theirs is missing, damaged or without floating-point numbers."""
    config = _read_config(directory)
    _refuse_other_settings(lora, config, directory)
    _refuse_other_kinds(lora, config, directory)
    _refuse_other_tensors(lora, _read_header(directory / WEIGHTS), directory)


def _read_config(directory: Path) -> dict[str, Any]:
    with raised_as(
        CheckpointError,
        f"cannot read {CONFIG}",
        (OSError, ValueError),
        where=directory,
        remedy=f"give a directory with {CONFIG} and {WEIGHTS}, as PEFT saves adapters",
    ):
        config = json.loads((directory / CONFIG).read_text(encoding="utf-8-sig"))
    if not isinstance(config, dict):
        raise CheckpointError(
            f"{CONFIG} has {type(config).__name__}, expected a table",
            where=str(directory),
            remedy="let PEFT save the adapters again",
        )
    return config


def _refuse_other_settings(lora: LoraConfig, config: dict[str, Any], directory: Path) -> None:
    """Raise CheckpointError where an adapter_config.json says something else than [lora]."""
    wanted = _settings_of(lora)
    for key, (value, default) in wanted.items():
        found = config.get(key, default)
        if found != value and not (not found and not value):
            raise CheckpointError(
                f"{key} of {CONFIG} is {found!r}, and [lora] needs {value!r}",
                where=str(directory),
                remedy="set rank, alpha, rank_stabilised and dora of [lora] as the adapters were "
                "made; other kinds of adapters are not supported",
            )


def _settings_of(lora: LoraConfig) -> dict[str, tuple[Any, Any]]:
    """Return what keys of an adapter_config.json must be, and what PEFT takes without them."""
    return {
        "peft_type": ("LORA", "LORA"),
        "r": (lora.rank, 8),
        "lora_alpha": (lora.alpha_value, 8),
        "use_rslora": (lora.rank_stabilised, False),
        "use_dora": (lora.dora, False),
        "fan_in_fan_out": (False, False),
        "bias": ("none", "none"),
        "rank_pattern": ({}, {}),
        "alpha_pattern": ({}, {}),
    }


def _refuse_other_kinds(lora: LoraConfig, config: dict[str, Any], directory: Path) -> None:
    """Raise CheckpointError for the first key by which equal tensors may mean something else."""
    compared = _settings_of(lora)
    for key, value in config.items():
        if key in compared or key in _HARMLESS or not value:
            continue
        if value in _ALLOWED.get(key, ()):
            continue
        remedy = "train plain adapters; remove the key only if it changes nothing in these"
        if key == "init_lora_weights":
            remedy = (
                "let PEFT write them for the weights as they were: "
                "save_pretrained(..., path_initial_model_for_weight_conversion=...)"
            )
        raise CheckpointError(
            f"{key} of {CONFIG} is {reprlib.repr(value)}, with which the adapters may mean "
            "something else than those of [lora]",
            where=str(directory),
            remedy=remedy,
        )


def _read_header(file: Path) -> dict[str, _Tensor]:
    """Return what a safetensors file says of its tensors, by name. Raises CheckpointError where it
    is missing, no such file, or cut."""
    with raised_as(
        CheckpointError,
        f"cannot read {WEIGHTS}",
        (OSError, ValueError, msgspec.ValidationError),
        where=file.parent,
        remedy=f"give a directory with {CONFIG} and {WEIGHTS}, as PEFT saves adapters",
    ):
        with file.open("rb") as opened:
            num_header_bytes = int.from_bytes(opened.read(8), "little")
            if num_header_bytes > _LARGEST_HEADER:
                raise ValueError("it is no safetensors file")
            header = json.loads(opened.read(num_header_bytes))
        if isinstance(header, dict):
            header.pop("__metadata__", None)
        tensors = msgspec.convert(header, dict[str, _Tensor])
        num_bytes = 8 + num_header_bytes
        num_bytes += max((tensor.data_offsets[1] for tensor in tensors.values()), default=0)
        found = file.stat().st_size
        if found != num_bytes:
            raise ValueError(f"it has {found} bytes, and by its header {num_bytes}")
    return tensors


def _refuse_other_tensors(lora: LoraConfig, tensors: dict[str, _Tensor], directory: Path) -> None:
    """Raise CheckpointError for a tensor of another dtype or rank than adapters may have."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} of {WEIGHTS} is {tensor.dtype}; adapters are {', '.join(_DTYPES)}",
                where=str(directory),
                remedy="let PEFT save the adapters again, in float32",
            )
        rank = _rank_of(name, tensor.shape)
        if rank is None:
            continue
        if rank != lora.rank:
            raise CheckpointError(
                f"{name} of {WEIGHTS} has rank {rank}, and lora.rank is {lora.rank}",
                where=str(directory),
                remedy=f"are {CONFIG} and {WEIGHTS} of the same adapters?",
            )


def _rank_of(name: str, shape: tuple[int, ...]) -> int | None:
    """Return the rank of an A [rank, in] or a B [out, rank]; None of anything else."""
    if len(shape) != 2:
        return None
    if name.endswith(".lora_A.weight"):
        return shape[0]
    if name.endswith(".lora_B.weight"):
        return shape[1]
    return None


def note_of(modules: Iterable[str], *, has_experts: bool) -> str:
    """Return what stands beside adapters with which PEFT computes something else than was trained;
    empty: nothing. modules: those with adapters, such as `self_attn.q_proj`; has_experts: whether
    the model has any."""
    are_of_attention = all(module.startswith("self_attn.") for module in modules)
    if are_of_attention or not has_experts:
        return ""
    return _NOT_FOR_PEFT
