"""What ranks with a pretended GPU are asked about an optimizer whose state is on the host."""

from __future__ import annotations

from typing import Any

from grpo_megatron.config.trainer import OptimizerConfig
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

# isort: split
from grpo_megatron.trainer.megatron.policy import describe_kernels
from grpo_megatron.trainer.megatron.static_bytes import static_bytes_of
from grpo_megatron.trainer.megatron.upstream_fixes import create_adam_state
from tests.checkpoints.checkpoint_ranks import _train
from tests.trainer.trainer_ranks import Setup, state_tensors


def where_state_is(model: str, layout: dict[str, Any]) -> dict[str, Any]:
    """Bytes on the device and on the host, and what the log says."""
    setup = Setup(model, layout)
    create_adam_state(setup.policy.optimizer)
    static = static_bytes_of(setup.policy)
    kernels = {
        kernel.part: kernel.chosen for kernel in describe_kernels(setup.policy, setup.layout)
    }
    return {
        "device": static.parts,
        "host": static.host,
        "optimizer": kernels["optimizer"],
        "state": kernels.get("optimizer state"),
    }


def after_a_reset(model: str, samples: str, layout: dict[str, Any]) -> list[list[dict[str, float]]]:
    """Metrics of three steps, and of as many from the same weights with a fresh optimizer."""
    setup = Setup(model, layout)
    tensors = state_tensors(setup.policy)
    weights = [tensor.clone() for tensor in tensors]
    found = []
    for _ in range(2):
        for tensor, start in zip(tensors, weights, strict=True):
            tensor.copy_(start)
        setup.policy.optimizer.reload_model_params()
        setup.policy.reset_optimizer(OptimizerConfig(lr=1e-3))
        setup.policy.set_learning_rate(1e-3)
        found.append(_train(setup, samples, 3))
    return found


def saved_groups(model: str, layout: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Names of classes in the parameter groups, as Megatron's optimizer has them and as saved."""
    setup = Setup(model, layout)
    create_adam_state(setup.policy.optimizer)
    optimizer = setup.policy.optimizer
    [part] = getattr(optimizer, "chained_optimizers", [optimizer])
    return (
        _classes(part.optimizer.state_dict()["param_groups"]),
        _classes(part.state_dict()["optimizer"]["param_groups"]),
    )


def _classes(groups: list[dict[str, Any]]) -> list[str]:
    found = set()
    for group in groups:
        found |= {name for name, value in group.items() if isinstance(value, type)}
    return sorted(found)
