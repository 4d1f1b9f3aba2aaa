"""The policy's adapters in vLLM's LoRA machinery, brought there in memory (docs/lora.md).

A server that is started with `lora.publish = "adapter"` has a slot for each of the run's adapters:
one, or one of every domain. They add nothing at first, and a publish replaces them all. vLLM itself
takes adapters from files only: the paths that the server was told are none, and are answered
here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from grpo_megatron.errors import MismatchError
from grpo_megatron.weights.adapter_names import parts_of_name, published_name
from grpo_megatron.weights.tensor_entry import TensorEntry, digest_tensor, entry_of

if TYPE_CHECKING:
    from vllm.lora.layers import BaseLayerWithLoRA
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

_PATH = "grpo_megatron:published"
_RANK_OF_ZEROS = 8  # of the adapter of zeros; any one is right
_PUBLISHED = "published_adapters"
"""Attribute of the engine's model: the `PublishedAdapter` of every domain, by its name."""
_NUMBERS = "adapter_numbers"
"""Attribute of the engine's model: vLLM's number of each domain's adapter, by the domain's name."""


def path_of(domain: str) -> str:
    """Return what a server is told in place of a directory, of the adapter of a domain; "": of the
    one that all domains have."""
    if not domain:
        return _PATH
    return f"{_PATH}/{domain}"


def _domain_of(path: str) -> str | None:
    """Return the domain of a path, as `path_of` takes it; None: of a directory."""
    if path == _PATH:
        return ""
    if path.startswith(f"{_PATH}/"):
        return path.removeprefix(f"{_PATH}/")
    return None


def apply() -> None:
    """Let a worker take the adapters that were published where vLLM would read files, zeros before
    the first, and keep them: vLLM empties all slots after every update (gpu_worker.py:1604)."""
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

    original = WorkerLoRAManager._load_adapter
    reset = LoRAModelRunnerMixin.reset_lora_state

    def _load_adapter(self: WorkerLoRAManager, request: LoRARequest) -> LoRAModel:
        domain = _domain_of(request.lora_path)
        if domain is None:
            from_files: LoRAModel = original(self, request)
            return from_files
        model = self._adapter_manager.model
        _numbers(model)[domain] = request.lora_int_id
        if domain in _published(model):
            return _lora_model(model, domain)
        rank = min(self.lora_config.max_lora_rank, _RANK_OF_ZEROS)
        zeros: LoRAModel = self._adapter_manager.create_dummy_lora(
            request.lora_int_id,
            self.get_dummy_lora_warmup_rank(rank),
            self.embedding_modules,
        )
        return zeros

    def reset_lora_state(self: LoRAModelRunnerMixin) -> None:
        reset(self)
        _fill_slots(self.get_model())

    WorkerLoRAManager._load_adapter = _load_adapter
    LoRAModelRunnerMixin.reset_lora_state = reset_lora_state


def _numbers(model: Any) -> dict[str, int]:
    """Return vLLM's numbers of the adapters that the server was started with, by domain; they are
    known since each was loaded for the first time, at the start."""
    found: dict[str, int] = model.__dict__.setdefault(_NUMBERS, {})
    return found


def _published(model: Any) -> dict[str, PublishedAdapter]:
    """Return what the last publish brought, by domain; nothing before the first."""
    found: dict[str, PublishedAdapter] = model.__dict__.get(_PUBLISHED, {})
    return found


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

    tensors: A [rank, in] and B [out, rank], by names as `published_name` gives them."""
    manager = getattr(model, "lora_manager", None)
    if manager is None:
        return {tensor.name: "the engine was started without adapters" for tensor in tensors}
    places = _places(manager)
    found = {}
    for tensor in tensors:
        domain, name = parts_of_name(tensor.name)
        if domain not in _numbers(model):
            found[tensor.name] = _why_no_slot(model, domain)
            continue
        module, is_a = _parsed(model, name)
        if module not in places:
            found[tensor.name] = "the engine has no layer of that name that takes adapters"
            continue
        wrapper, part = places[module]
        why = _misfit(wrapper, part, tensor.shape, manager.lora_config.max_lora_rank, is_a=is_a)
        if why:
            found[tensor.name] = why
    return found


def _why_no_slot(model: Any, domain: str) -> str:
    """Say which slots there are, where none is for the adapter of `domain`."""
    known = ", ".join(repr(name) for name in sorted(_numbers(model)) if name)
    if not known:
        return "the engine was started with one adapter for all domains"
    if not domain:
        return f"the engine was started with an adapter for each of the domains {known}"
    return f"the engine was started with adapters for the domains {known}, and not for {domain!r}"


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
    """What a publish brought for a slot: A [rank, in] and B [out, rank] by PEFT's names without a
    prefix."""

    tensors: Mapping[str, torch.Tensor]
    rank: int
    scale: float


def take(model: Any, tensors: Mapping[str, torch.Tensor], rank: int, scale: float) -> None:
    """Make adapters those of the model; they are in their slots when the update is finished.

    tensors: of all adapters, by names as `published_name` gives them. Raises MismatchError where
    the engine has no place for one of them, or a slot of which none came."""
    entries = [entry_of(name, tensor) for name, tensor in tensors.items()]
    for name, why in refusals(model, entries).items():
        raise MismatchError(f"tensor {name!r} of the adapter: {why}")
    of_domains: dict[str, dict[str, torch.Tensor]] = {}
    for published, tensor in tensors.items():
        domain, name = parts_of_name(published)
        of_domains.setdefault(domain, {})[name] = tensor
    for domain in _numbers(model):
        if domain not in of_domains:
            raise MismatchError(f"no tensor came of the adapter of domain {domain!r}")
    adapters = {}
    for domain, of_domain in of_domains.items():
        adapters[domain] = PublishedAdapter(of_domain, rank, scale)
    setattr(model, _PUBLISHED, adapters)


def forget(model: Any) -> None:
    """Let the model have no adapters when the update is finished: some of zeros, as at the
    start."""
    model.__dict__.pop(_PUBLISHED, None)


def _fill_slots(model: Any) -> None:
    """Put the published adapters, if there are any, into their slots."""
    for domain in _published(model):
        number = _numbers(model)[domain]
        manager = model.lora_manager
        manager.remove_adapter(number)
        manager.add_adapter(_lora_model(model, domain))
        manager.activate_adapter(number)


def _lora_model(model: Any, domain: str) -> LoRAModel:
    """Make what vLLM's slots take of the published adapter of a domain."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights

    adapter = _published(model)[domain]
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
    return LoRAModel(_numbers(model)[domain], adapter.rank, layers)


def checksums(model: Any) -> dict[str, str]:
    """Return a digest of what each of this worker's layers has in each published slot, by the
    layer's name; where domains have adapters of their own, `DOMAIN/` stands before it."""
    manager = model.lora_manager
    there = set(manager.lora_index_to_id)
    if not there.issuperset(_numbers(model).values()):  # vLLM has emptied them until a request
        _fill_slots(model)
    found = {}
    for domain, number in _numbers(model).items():
        if number not in manager.lora_index_to_id:  # nothing was published
            continue
        slot = manager.lora_index_to_id.index(number)
        for name, digest in _digests_of_slot(manager, slot).items():
            found[published_name(domain, name)] = digest
    return found


def _digests_of_slot(manager: LoRAModelManager, slot: int) -> dict[str, str]:
    """Return the digests of what this worker's layers have in a slot, by the layer's name."""
    found = {}
    for name, wrapper in manager.modules.items():
        for letter, stacked in (("A", wrapper.lora_a_stacked), ("B", wrapper.lora_b_stacked)):
            for part, tensor in enumerate(stacked):
                found[f"{name}.{part}.{letter}"] = digest_tensor(tensor[slot])
    return found
