"""A Hugging Face checkpoint as the model of transformers, which may carry the code of its family
under another name (`same_code_as` of the family's table)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from grpo_megatron.plan.family import family_names
from grpo_megatron.plan.tensor_names import renamer, transformers_type


def load_config(directory: Path) -> Any:
    """Return transformers' configuration of a checkpoint. ValueError where it lacks the family."""
    from transformers import AutoConfig

    model_type, known_as = _types(directory)
    if model_type == known_as:
        return AutoConfig.from_pretrained(directory, local_files_only=True)
    fields = _fields(directory)
    for name in ("model_type", "auto_map"):
        fields.pop(name, None)
    return AutoConfig.for_model(known_as, **fields)


def load_model(kind: Any, directory: Path, config: Any, dtype: torch.dtype) -> Any:
    """Return transformers' model of a checkpoint with its weights. kind: a class such as
    AutoModelForCausalLM."""
    new_names = _new_names(directory)
    if all(name == new_name for name, new_name in new_names.items()):
        return kind.from_pretrained(
            directory, config=config, dtype=dtype, local_files_only=True, use_safetensors=True
        )
    tensors: dict[str, torch.Tensor] = {}
    for file in directory.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            tensors[new_names[name]] = tensor
    with torch.device("meta"):
        own_class = type(kind.from_config(config))
    return own_class.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype)


def rename_tensors(directory: Path, *, of: str, to: str) -> None:
    """Give the tensors of one file, `model.safetensors`, the names of another family."""
    if of == to:
        return
    file = directory / "model.safetensors"
    renamed = renamer(of, to)
    tensors = {renamed(name): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _new_names(directory: Path) -> dict[str, str]:
    """Return by the name of every tensor that of transformers' code."""
    model_type, known_as = _types(directory)
    if model_type == known_as:
        return {}
    renamed = renamer(model_type, known_as)
    found = {}
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no dict
                found[name] = renamed(name)
    return found


def _fields(directory: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return fields


def _types(directory: Path) -> tuple[str, str]:
    """Return the family of a checkpoint, and under which name transformers has its code."""
    model_type = _fields(directory).get("model_type", "")
    if model_type not in family_names():
        return model_type, model_type
    return model_type, transformers_type(model_type)
