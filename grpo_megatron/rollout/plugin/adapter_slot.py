"""The policy's adapter in vLLM's LoRA machinery, brought there in memory (docs/lora.md).

A server that is started with `lora.publish = "adapter"` has one slot, and in it the adapter
`ENGINE_ADAPTER`, which adds nothing at first. A publish replaces it. vLLM itself takes adapters
from files only: the path that the server was told is none, and is answered here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.tensor_entry import TensorEntry, digest_tensor, entry_of

if TYPE_CHECKING:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

PATH = "grpo_megatron:published"
"""What a server is told in place of a directory."""
_NUMBER = 1  # vLLM's, of the first adapter that a server is started with
_RANK_OF_ZEROS = 8  # of the adapter of zeros; any one is right
_PUBLISHED = "published_adapter"
"""Attribute of the engine's model."""


def apply() -> None:
    """Let a worker take the adapter that was published where vLLM would read files, zeros before
    the first, and keep it: vLLM empties all slots after every update (gpu_worker.py:1604)."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    original = WorkerLoRAManager._load_adapter
    reset = LoRAModelRunnerMixin.reset_lora_state

    def _load_adapter(self: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        if request.lora_path != PATH:
            from_files: LoRAModel = original(self, request)
            return from_files
        model = self._adapter_manager.model
        if _PUBLISHED in model.__dict__:
            return _lora_model(model)
        rank = min(self.lora_config.max_lora_rank, _RANK_OF_ZEROS)
        zeros: LoRAModel = self._adapter_manager.create_dummy_lora(
            request.lora_int_id,
            self.get_dummy_lora_warmup_rank(rank),
            self.embedding_modules,
        )
        return zeros

    def reset_lora_state(self: LoRAModelRunnerMixin) -> None:
        reset(self)
        _fill_slot(self.get_model())

    WorkerLoRAManager._load_adapter = _load_adapter
    LoRAModelRunnerMixin.reset_lora_state = reset_lora_state


@contextmanager
def without_wrappers(model: Any) -> Iterator[None]:
    """Within, the layers have the names that the model's weight loaders know.

    vLLM puts each layer into one with slots, so `o_proj.weight` is `o_proj.base_layer.weight`
    (0.32.0, lora/model_manager.py:570), which the loaders do not find."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        yield
        return
    wrappers: dict[str, BaseLayerWithLoRA] = dict(manager.modules)
    for name, wrapper in wrappers.items():
        _put(model, name, wrapper.base_layer)
    try:
        yield
    finally:
        for name, wrapper in wrappers.items():
            _put(model, name, wrapper)


def _put(model: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    owner, _, attribute = name.rpartition(".")
    setattr(model.get_submodule(owner), attribute, layer)


def refusals(model: Any, tensors: Sequence[TensorEntry]) -> dict[str, str]:
    """Say of each tensor of an adapter, by its name, why this engine cannot take it; those that it
    can are left out.

    tensors: A [rank, in] and B [out, rank], by PEFT's names without a prefix."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return {tensor.name: "the engine was started without adapters" for tensor in tensors}
    places = _places(manager)
    found = {}
    for tensor in tensors:
        module, is_a = _parsed(model, tensor.name)
        if module not in places:
            found[tensor.name] = "the engine has no layer of that name that takes adapters"
            continue
        wrapper, part = places[module]
        why = _misfit(wrapper, part, tensor.shape, manager.lora_config.max_lora_rank, is_a=is_a)
        if why:
            found[tensor.name] = why
    return found


def _parsed(model: Any, name: str) -> tuple[str, bool]:
    """Return the engine's name of the layer that a tensor belongs to, and whether it is A."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None:
        mapper = mapper.get_rename_mapper()
    module, is_a = parse_fine_tuned_lora_name(f"base_model.model.{name}", mapper)
    return module, is_a


def _places(manager: LoRAModelManager) -> dict[str, tuple[BaseLayerWithLoRA, int]]:
    """Return where adapters go: for each layer of a checkpoint that takes them, the engine's layer,
    and which part of it that is (q, k and v are parts of one)."""
    places = {}
    for name, wrapper in manager.modules.items():
        parts = manager.packed_modules.get(name) or [name]
        for number, part in enumerate(parts):
            places[part] = (wrapper, number)
    return places


def _misfit(
    wrapper: BaseLayerWithLoRA, part: int, shape: Sequence[int], max_rank: int, *, is_a: bool
) -> str:
    """Say what is wrong with the shape of A or B; nothing where it fits."""
    if is_a:
        rank, size = shape
        wanted = _num_columns(wrapper)
    else:
        size, rank = shape
        wanted = _num_rows(wrapper, part)
    if rank > max_rank:
        return f"its rank is {rank}, and the engine's --max-lora-rank {max_rank}"
    if size != wanted:
        return f"it is {tuple(shape)}, and the layer's {'input' if is_a else 'output'} {wanted}"
    return ""


def _num_columns(wrapper: BaseLayerWithLoRA) -> int:
    return int(wrapper.base_layer.input_size)


def _num_rows(wrapper: BaseLayerWithLoRA, part: int) -> int:
    """Return rows of a layer of the checkpoint: of a part of the engine's layer, over all its
    workers."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    layer = wrapper.base_layer
    if isinstance(layer, QKVParallelLinear):
        heads = layer.total_num_heads
        if part > 0:
            heads = layer.total_num_kv_heads
        return int(heads * layer.head_size)
    sizes = getattr(layer, "output_sizes", None)
    if sizes is not None and wrapper.n_slices > 1:
        return int(sizes[part])
    return int(layer.output_size)


@dataclass(frozen=True, slots=True)
class PublishedAdapter:
    """What a publish brought: A [rank, in] and B [out, rank] by PEFT's names without a prefix."""

    tensors: Mapping[str, torch.Tensor]
    rank: int
    scale: float


def take(model: Any, adapter: PublishedAdapter) -> None:
    """Make an adapter the one of the model; it is in the slot when the update is finished. Raises
    MismatchError where the engine has no place for one of its tensors."""
    entries = [entry_of(name, tensor) for name, tensor in adapter.tensors.items()]
    for name, why in refusals(model, entries).items():
        raise MismatchError(f"tensor {name!r} of the adapter: {why}")
    setattr(model, _PUBLISHED, adapter)


def forget(model: Any) -> None:
    """Let the model have no adapter when the update is finished: one of zeros, as at the start."""
    model.__dict__.pop(_PUBLISHED, None)


def _fill_slot(model: Any) -> None:
    """Put the published adapter, if there is one, into the slot."""
    if _PUBLISHED not in model.__dict__:
        return
    manager = model.lora_manager
    manager.remove_adapter(_NUMBER)
    manager.add_adapter(_lora_model(model))
    manager.activate_adapter(_NUMBER)


def _lora_model(model: Any) -> LoRAModel:
    """Make what vLLM's slots take of the published adapter."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    adapter: PublishedAdapter = getattr(model, _PUBLISHED)
    dtype = model.lora_manager.lora_config.lora_dtype
    layers: dict[str, Any] = {}
    for name, tensor in adapter.tensors.items():
        module, is_a = _parsed(model, name)
        if module not in layers:
            # alpha only gives a scale of alpha / rank, and this one may be another
            layers[module] = LoRALayerWeights(
                module, adapter.rank, 0, None, None, scaling=adapter.scale
            )
        if is_a:
            layers[module].lora_a = tensor.to(dtype)
        else:
            layers[module].lora_b = tensor.to(dtype, copy=True)  # vLLM multiplies it by the scale
    return LoRAModel(_NUMBER, adapter.rank, layers)


def checksums(model: Any) -> dict[str, str]:
    """Return a digest of what each of this worker's layers has in its slot, by the layer's name."""
    manager = model.lora_manager
    if _NUMBER not in manager.lora_index_to_id:  # vLLM has emptied it, and fills it for a request
        _fill_slot(model)
    if _NUMBER not in manager.lora_index_to_id:
        return {}
    slot = manager.lora_index_to_id.index(_NUMBER)
    found = {}
    for name, wrapper in manager.modules.items():
        for letter, stacked in (("A", wrapper.lora_a_stacked), ("B", wrapper.lora_b_stacked)):
            for part, tensor in enumerate(stacked):
                found[f"{name}.{part}.{letter}"] = digest_tensor(tensor[slot])
    return found
