"""Adapters of several domains, each trained as if its domain had a run of its own (docs/lora.md).

The policy has the adapters of one domain at a time, and an optimizer with their state. Those of the
others rest: their parameters beside the policy, where a publish finds them, and what the optimizer
knows of them in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from grpo_megatron.device_copies import wait_for_copies
from grpo_megatron.trainer.lora.peft_format import AdapterMap, adapter_model
from grpo_megatron.trainer.megatron.platform import HAS_CUDA
from grpo_megatron.trainer.megatron.policy import Policy, adapter_tensors
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from grpo_megatron.weights.adapter_names import published_name
from grpo_megatron.weights.gather import Shard, ShardedModel

_STEP = "step"


@dataclass(frozen=True, slots=True)
class _Resting:
    """The adapters of a domain that the policy does not have.

    parameters: as of `adapter_tensors`; state: as of `_optimizer_tensors`, on the host; steps: as
    of `_counts_of_steps`."""

    parameters: list[torch.Tensor]
    state: list[torch.Tensor]
    steps: list[Any]


class DomainAdapters:
    """The adapters of every domain. They begin as those that the policy has.

    Attributes:
        domains: Their names.
        present: The domain whose adapters the policy has."""

    def __init__(self, policy: Policy, domains: Sequence[str]):
        create_adam_state(policy.optimizer)  # so that there is one to set aside
        self._policy = policy
        self.domains = tuple(domains)
        self.present = self.domains[0]
        self._resting: dict[str, _Resting] = {}
        for domain in self.domains:
            self._resting[domain] = _copies_of(policy)

    def take(self, domain: str) -> None:
        """Let the policy have the adapters of `domain`, and its optimizer their state."""
        if domain == self.present:
            return
        self._set_aside()
        resting = self._resting[domain]
        _copy_all(resting.parameters, _parameters_of(self._policy))
        _copy_all(resting.state, _optimizer_tensors(self._policy))
        _set_counts_of_steps(self._policy, resting.steps)
        self.present = domain

    def _set_aside(self) -> None:
        """Let the copies of the present domain be what the policy has."""
        resting = self._resting[self.present]
        _copy_all(_parameters_of(self._policy), resting.parameters)
        _copy_all(_optimizer_tensors(self._policy), resting.state)
        resting.steps[:] = _counts_of_steps(self._policy)

    @property
    def num_bytes(self) -> int:
        """Bytes of the parameters that lie beside the policy, on its device."""
        total = 0
        for resting in self._resting.values():
            for parameter in resting.parameters:
                total += parameter.numel() * parameter.element_size()
        return total

    def published(self) -> ShardedModel:
        """Return the adapters of all domains, spread over ranks as they are, under their
        `published_name`. They are those of now once `refresh` was called."""
        shards: list[Shard] = []
        for domain in self.domains:
            of_policy = adapter_model(self._policy).shards
            parameters = self._resting[domain].parameters
            for shard, parameter in zip(of_policy, parameters, strict=True):
                name = published_name(domain, shard.name)
                shards.append(replace(shard, name=name, tensor=parameter))
        return ShardedModel(AdapterMap(), shards)

    def refresh(self) -> None:
        """Bring what was trained last to where a publish finds it."""
        _copy_all(_parameters_of(self._policy), self._resting[self.present].parameters)


def _copies_of(policy: Policy) -> _Resting:
    """Return copies of the adapters that the policy has, and of their optimizer's state."""
    parameters = [tensor.clone() for tensor in _parameters_of(policy)]
    state = []
    for tensor in _optimizer_tensors(policy):
        is_of_gpu = tensor.device.type != "cpu"  # torch's Adam counts steps on the host
        is_pinned = HAS_CUDA and is_of_gpu
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned)
        state.append(host.copy_(tensor, non_blocking=True))
    wait_for_copies()
    return _Resting(parameters, state, _counts_of_steps(policy))


def _copy_all(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=True)
    wait_for_copies()


def _parameters_of(policy: Policy) -> list[torch.Tensor]:
    """Return the adapters' parameters on this rank."""
    return [parameter.data for parameter in adapter_tensors(policy)]


def _optimizer_tensors(policy: Policy) -> list[torch.Tensor]:
    """Return what the optimizer has on this rank, in a fixed order: of each parameter its own copy,
    which is float32, and the state."""
    tensors = []
    for optimizer in policy.torch_optimizers():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensors.append(parameter.data)
                state = optimizer.state[parameter]
                for name in sorted(state):
                    tensors.append(state[name])
    return tensors


def _counts_of_steps(policy: Policy) -> list[Any]:
    """Return how many steps each group has taken, where its optimizer counts them by groups."""
    counts = []
    for optimizer in policy.torch_optimizers():
        for group in optimizer.param_groups:
            counts.append(group.get(_STEP))
    return counts


def _set_counts_of_steps(policy: Policy, counts: Sequence[Any]) -> None:
    places = []
    for optimizer in policy.torch_optimizers():
        places += optimizer.param_groups
    for group, count in zip(places, counts, strict=True):
        if count is None:
            group.pop(_STEP, None)
        else:
            group[_STEP] = count
