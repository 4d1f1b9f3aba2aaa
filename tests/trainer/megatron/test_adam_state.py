"""The state of Megatron's optimizers before their first step, by the Adam that is inside."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state


class GroupCountingAdam(torch.optim.Optimizer):
    """What Transformer Engine's FusedAdam keeps: moments by parameter, steps by group."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("exp_avg", torch.zeros_like(parameter))
                state.setdefault("exp_avg_sq", torch.zeros_like(parameter))


def wrapped(*optimizers) -> SimpleNamespace:
    """Megatron's chain of optimizers, one of which has no parameters on this rank."""
    parts = [SimpleNamespace(optimizer=optimizer) for optimizer in optimizers]
    return SimpleNamespace(chained_optimizers=[*parts, SimpleNamespace(optimizer=None)])


def parameter() -> torch.nn.Parameter:
    weight = torch.nn.Parameter(torch.ones(3))
    weight.grad = torch.ones(3)
    return weight


@pytest.mark.parametrize("num_steps", [0, 2])
def test_torch_adam_counts_steps_by_parameter(num_steps):
    weight = parameter()
    inner = torch.optim.AdamW([weight])
    for _ in range(num_steps):
        inner.step()
    create_adam_state(wrapped(inner))
    assert sorted(inner.state[weight]) == ["exp_avg", "exp_avg_sq", "step"]
    assert inner.state[weight]["step"] == num_steps


def test_a_part_without_parameters_counts_the_steps_of_the_others():
    inner = torch.optim.AdamW([parameter()])
    empty = torch.optim.AdamW([{"params": []}])
    inner.step()
    create_adam_state(wrapped(inner, empty))
    [state] = empty.state.values()
    assert state == {"step": 1}


@pytest.mark.parametrize("num_steps", [0, 2])
def test_an_adam_that_counts_by_group_gets_moments_only(num_steps):
    """Its own state_dict knows no other names, so a checkpoint could not be written."""
    weight = parameter()
    inner = GroupCountingAdam([weight])
    empty = GroupCountingAdam([{"params": []}])
    for _ in range(num_steps):
        inner.step()
    create_adam_state(wrapped(inner, empty))
    assert sorted(inner.state[weight]) == ["exp_avg", "exp_avg_sq"]
    assert not empty.state


def test_a_reset_forgets_steps_that_are_counted_by_group():
    """In a process of its own: Megatron changes torch where there is no GPU."""
    code = """
from types import SimpleNamespace
import torch
from grpo_megatron.trainer.megatron import platform  # before Megatron
from grpo_megatron.config.trainer import OptimizerConfig
from grpo_megatron.trainer.megatron.policy import Policy

inner = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
inner.param_groups[0]["step"] = 7
part = SimpleNamespace(optimizer=inner, config=SimpleNamespace())
Policy({}, None, [], part, None).reset_optimizer(OptimizerConfig(clip_grad=0.5))
print("step" in inner.param_groups[0], part.config.clip_grad)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "0.5"]
