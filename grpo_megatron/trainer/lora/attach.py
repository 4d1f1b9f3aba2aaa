"""Adapters put beside the linear layers of a model, whose weights are frozen.

A layer of Megatron's computes as ever; a hook adds what its adapters compute of the same input. One
of its weights may be several of Hugging Face's layers (q, k and v; gate and up), each with an
adapter of its own, or several experts'."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state

from grpo_megatron.config.lora import LoraConfig, is_target
from grpo_megatron.trainer.lora.adapter import Adapter, Split
from grpo_megatron.weights.gather import Shard
from grpo_megatron.weights.low_rank import addend_of_dora
from grpo_megatron.weights.parameters import TOWER, Parameter, TensorMap, without_expert

_OF_LAYER = re.compile(r"model\.(?:\w+\.)*layers\.\d+\.")


@dataclass
class AdaptedWeight:
    """A weight of Megatron's, and the adapters of the layers that it is made of.

    adapters: one for each of `parameter.hf`; None where that layer has none."""

    parameter: Parameter
    shard: Shard
    adapters: Sequence[Adapter | None]
    _norms: list[torch.Tensor | None] = field(default_factory=list)  # of DoRA, see `prepare`

    @property
    def row_parts(self) -> int:
        """How many ranks share the rows of the weight."""
        if self.shard.dim == 0:
            return self.shard.size
        return 1

    @property
    def is_dora(self) -> bool:
        """Whether the adapters have magnitudes."""
        return any(
            adapter is not None and adapter.lora_magnitude_vector is not None
            for adapter in self.adapters
        )

    def prepare(self) -> None:
        """Compute what `addend` needs of other ranks, with the weights as they are. Collective over
        tensor ranks."""
        if self.is_dora:
            self._norms = self._row_norms()

    def begin_magnitudes(self) -> None:
        """Let the magnitudes of DoRA be those of the weight as it is. Collective."""
        if not self.is_dora:
            return
        for adapter, weight in zip(self.adapters, self._of_layers(), strict=True):
            if adapter is not None:
                adapter.begin_magnitude(weight)

    def addend(self) -> torch.Tensor:
        """Return what the adapters add to this rank's part of the weight: fp32, in its shape. With
        DoRA, after `prepare`."""
        parts = []
        for number, (adapter, weight) in enumerate(
            zip(self.adapters, self._of_layers(), strict=True)
        ):
            if adapter is None:
                parts.append(torch.zeros_like(weight, dtype=torch.float32))
            elif adapter.lora_magnitude_vector is None:
                parts.append(adapter.product())
            else:
                norms = self._norms[number]
                assert norms is not None  # `prepare` was called
                magnitude = adapter.lora_magnitude_vector
                parts.append(addend_of_dora(weight, adapter.product(), magnitude, norms))
        return self.parameter.merge(parts, self.row_parts)

    def factors(self) -> torch.Tensor:
        """Return what DoRA multiplies the layer's outputs by: fp32 [rows of the weight here].
        Collective."""
        parts = []
        for adapter, norms, rows in zip(
            self.adapters, self._row_norms(), self._rows(), strict=True
        ):
            if adapter is None:
                parts.append(torch.ones(rows, device=self.shard.tensor.device))
            else:
                assert norms is not None  # there is an adapter
                parts.append(adapter.factors(norms))
        return self.parameter.merge(parts, self.row_parts)

    def _row_norms(self) -> list[torch.Tensor | None]:
        norms: list[torch.Tensor | None] = []
        for adapter, weight in zip(self.adapters, self._of_layers(), strict=True):
            if adapter is None:
                norms.append(None)
            else:
                norms.append(adapter.row_norms(weight))
        return norms

    def _of_layers(self) -> list[torch.Tensor]:
        """Return the rows of each of Hugging Face's layers in this rank's part of the weight."""
        shard = self.shard
        return self.parameter.local_tensors(shard.tensor.detach(), shard.dim, shard.size)

    def output(self, states: torch.Tensor) -> torch.Tensor:
        """Return what is added to the layer's output. states: [..., in]. Collective."""
        parts = []
        for adapter, rows in zip(self.adapters, self._rows(), strict=True):
            if adapter is None:
                part = states.new_zeros(())
                parts.append(part.expand(rows))
            else:
                parts.append(adapter(states))
        return self._joined(parts)

    def _joined(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Put outputs of the layers together as the rows of the weight are: group by group."""
        if len(parts) == 1:
            return parts[0]
        sizes = next(part.shape[:-1] for part in parts if part.dim() > 1)
        groups = max(self.parameter.groups // self.row_parts, 1)
        grouped = [part.expand(*sizes, -1).unflatten(-1, (groups, -1)) for part in parts]
        return torch.cat(grouped, -1).flatten(-2)

    def _rows(self) -> list[int]:
        return [shape[0] // self.row_parts for _, shape in self.parameter.hf]


class _AddsToOutput:
    """A forward hook of a linear layer of Megatron's. weights: one, or those of its experts."""

    def __init__(self, adapters: "ModelAdapters", weights: Sequence[AdaptedWeight | None]):
        self._adapters = adapters
        self._weights = weights

    def __call__(self, layer: Any, inputs: tuple[Any, ...], output: Any) -> Any:
        if not self._adapters.enabled:
            return None
        states = inputs[0]
        if getattr(layer, "layer_norm_weight", None) is not None:
            # Transformer Engine's layer begins with the norm, and keeps what it gave
            states = torch.nn.functional.rms_norm(
                states, states.shape[-1:], layer.layer_norm_weight, layer.eps
            )
        if len(self._weights) == 1:
            [weight] = self._weights
            assert weight is not None
            adapted = _adapted_output(weight, states, output[0], _bias_within(layer))
        else:
            adapted = self._of_experts(states, inputs[1], output[0])
        return (adapted, *output[1:])

    def _of_experts(self, states: torch.Tensor, splits: Any, output: torch.Tensor) -> torch.Tensor:
        """Return the outputs of all experts of a grouped layer, of which each has its tokens.

        splits: how many, by expert."""
        if isinstance(splits, torch.Tensor):
            splits = splits.tolist()
        parts = []
        outputs = output.split(splits)
        for weight, tokens, own in zip(self._weights, states.split(splits), outputs, strict=True):
            if weight is None:
                parts.append(own)
            else:
                parts.append(_adapted_output(weight, tokens, own, None))
        return torch.cat(parts)


def _adapted_output(
    weight: AdaptedWeight,
    states: torch.Tensor,
    output: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return a layer's output with what the adapters of its weight compute. Collective.

    output: of the layer, in which `bias` is, if there is one: DoRA does not multiply it."""
    adapted = output + weight.output(states)
    if not weight.is_dora:
        return adapted
    if bias is not None:
        adapted = adapted - bias
    adapted = (adapted * weight.factors()).to(output.dtype)
    if bias is not None:
        adapted = adapted + bias
    return adapted


def _bias_within(layer: Any) -> torch.Tensor | None:
    """Return the bias of a linear layer that is part of its output; None where there is none, or it
    is given apart."""
    bias: torch.Tensor | None = getattr(layer, "bias", None)
    is_apart = getattr(layer, "skip_bias_add", False) or getattr(layer, "te_return_bias", False)
    if bias is None or bias.numel() == 0 or is_apart:
        return None
    return bias


@dataclass
class ModelAdapters:
    """All adapters of a model chunk.

    Attributes:
        enabled: Whether they are computed; without, the model is what it was.
        by_weight: Of every weight that has some, under its global name."""

    enabled: bool = True
    by_weight: dict[str, AdaptedWeight] = field(default_factory=dict)

    def all(self) -> list[Adapter]:
        """Return every adapter once, in the model's order."""
        found: dict[int, Adapter] = {}
        for weight in self.by_weight.values():
            for adapter in weight.adapters:
                if adapter is not None:
                    found[id(adapter)] = adapter
        return list(found.values())

    def begin_magnitudes(self) -> None:
        """Let the magnitudes of DoRA be those of the weights as they are. Collective."""
        for weight in self.by_weight.values():
            weight.begin_magnitudes()

    @torch.no_grad()
    def change_something(self) -> bool:
        """Whether any adapter changes what this chunk computes. Collective over tensor ranks."""
        changes = any(bool(adapter.lora_B.any()) for adapter in self.all())
        for weight in self.by_weight.values():
            if weight.is_dora and bool((weight.factors() != 1).any()):
                changes = True
        return changes

    def shards(self) -> Iterator[Shard]:
        """Yield this rank's parts of the adapters, by PEFT's names."""
        for adapter in self.all():
            for _, shard in adapter.shards():
                yield shard


def attach(
    model: Any,
    weights: Sequence[tuple[str, Shard]],
    tensor_map: TensorMap,
    lora: LoraConfig,
    seed: int,
) -> ModelAdapters:
    """Freeze a model and put adapters beside the layers that `lora` names.

    weights: names within the model, and which weights of the whole they are."""
    model.requires_grad_(False)
    adapters = ModelAdapters()
    modules = dict(model.named_modules())
    by_layer: dict[str, list[AdaptedWeight | None]] = {}
    for name, shard in weights:
        owner, _, attribute = name.rpartition(".")
        is_linear = re.search(r"\.linear_\w+$", owner) and re.fullmatch(r"weight\d*", attribute)
        is_of_tower = shard.name.startswith(TOWER)  # that of Qwen3-VL has a linear_fc1, too
        if not is_linear or is_of_tower:
            continue
        parameter = tensor_map.parameter(shard.name, shard.full_shape)
        weight: AdaptedWeight | None = _adapted(model, modules, name, parameter, shard, lora, seed)
        if weight is not None:
            adapters.by_weight[shard.name] = weight
        by_layer.setdefault(owner, []).append(weight)
    for owner, of_layer in by_layer.items():
        if any(weight is not None for weight in of_layer):
            modules[owner].register_forward_hook(_AddsToOutput(adapters, of_layer))
    if model.pre_process:
        model.embedding.register_forward_hook(_begin_gradients)
    return adapters


def _begin_gradients(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Let gradients reach the first layer, though nothing before it is trained: layers that are
    computed again in the backward have none where their input has none."""
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_(True)
    return output


def _adapted(
    model: Any,
    modules: dict[str, Any],
    name: str,
    parameter: Parameter,
    shard: Shard,
    lora: LoraConfig,
    seed: int,
) -> AdaptedWeight | None:
    """Make the adapters of one weight; None where no layer that it is made of is a target."""
    found: list[Adapter | None] = []
    owner, _, attribute = name.rpartition(".")
    is_expert = ".experts." in name
    for tensor, shape in parameter.hf:
        module = tensor.removesuffix(".weight")
        if not is_target(_OF_LAYER.sub("", module), lora.targets):
            found.append(None)
            continue
        place = owner
        leaf = module.rpartition(".")[2]
        is_shared = is_expert and lora.experts == "shared"
        if is_shared:
            place = f"{name.partition('.experts.')[0]}.experts"
            module = without_expert(module)
        elif attribute != "weight":  # of a grouped layer, which has one for each expert
            leaf = f"{attribute.removeprefix('weight')}_{leaf}"
        held = modules[place]
        if not hasattr(held, "adapters"):
            held.adapters = torch.nn.ModuleDict()
        if leaf not in held.adapters:
            held.adapters[leaf] = Adapter(
                module,
                (shape[0], shape[1]),
                _split_of(shard, model.config, is_expert=is_expert),
                lora.rank,
                lora.scale,
                shard.tensor,
                seed,
                shared=is_shared,
                dora=lora.dora,
            )
        found.append(held.adapters[leaf])
    if all(adapter is None for adapter in found):
        return None
    return AdaptedWeight(parameter, shard, found)


def _split_of(shard: Shard, config: Any, *, is_expert: bool) -> Split:
    """Say how ranks share the layer of a weight."""
    if is_expert:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return Split(shard.dim, group, bool(config.sequence_parallel), is_expert)
