"""What ranks with a pretended GPU execute, and plain ranks beside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict
from torch.nn.attention import SDPBackend, sdpa_kernel

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RoutingConfig
from grpo_megatron.device_copies import on_the_way_to_host
from grpo_megatron.routing import agreement
from grpo_megatron.trainer.megatron import platform
from grpo_megatron.trainer.routing import route_source
from grpo_megatron.trainer.steps import microbatch, policy_gradient
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from tests.trainer.trainer_ranks import Setup, _perturb

SLOW = {"lr": 1e-5}
"""Adam's first steps go by signs, also of gradients that are nothing but rounding: a small rate
leaves the second and the third step comparable."""


@dataclass
class Found:
    """What a rank computed, and what would have made a GPU's host wait."""

    report: dict[str, Any]
    num_microbatches: int = 0
    waits: dict[str, dict[str, int]] = field(default_factory=dict)
    """By owner: how often each `file:line (kind)`."""


def rl_update(
    model: str,
    samples: str,
    layout: dict[str, Any],
    objective: dict[str, Any],
    routing: dict[str, Any],
    mistake: str | None = None,
) -> Found:
    """A whole RL update of recorded rollouts, against a reference that is not the policy.

    Attention is computed by one kernel wherever tensors say that they are: torch chooses by the
    device, and two kernels round differently, which Adam's steps amplify.

    mistake: one of `MISTAKES` that is made on the way."""
    with pytest.MonkeyPatch.context() as patch:
        if mistake is not None:
            MISTAKES[mistake](patch)
        with sdpa_kernel(SDPBackend.MATH):
            return _rl_update(model, samples, layout, objective, routing)


def _rl_update(
    model: str,
    samples: str,
    layout: dict[str, Any],
    objective: dict[str, Any],
    routing: dict[str, Any],
) -> Found:
    setup = Setup(model, layout)
    config = setup.config(**objective)
    config = config.model_copy(
        update={
            "routing": RoutingConfig(**routing),
            "optimizer": config.optimizer.model_copy(update=SLOW),
        }
    )
    references = References(config)
    if references.wanted:
        _perturb(setup.shards, 1.01)
        references.snapshot(setup.policy)
        _perturb(setup.shards, 1 / 1.01)
        setup.policy.optimizer.reload_model_params()
    table = SampleTable(Path(samples))
    with recorded() as waits:
        training = Training(config, setup.policy, references, table, {})
        report = training.run(0, 3)
    num_microbatches = sum(len(update.microbatches) for update in training.updates)
    return Found(asdict(report), num_microbatches, waits)


# --- mistakes that a run on a CPU does not notice


def _forget_a_transfer(patch: pytest.MonkeyPatch) -> None:
    """The tensors of a micro-batch stay on the host."""
    patch.setattr(microbatch, "to_device", lambda values, device: values)


def _take_numpy_of_a_device_tensor(patch: pytest.MonkeyPatch) -> None:
    """Masks are not copied to the host before they are arrays."""
    patch.setattr(policy_gradient, "to_host", lambda tensors: tensors)


def _leave_routes_unpinned(patch: pytest.MonkeyPatch) -> None:
    """Routes are in memory that a GPU cannot copy from while the host goes on."""
    patch.setattr(route_source, "pinned", lambda values: values)


def _read_a_number(patch: pytest.MonkeyPatch) -> None:
    """The loss of every micro-batch is looked at."""
    original = policy_gradient.PolicyGradientLoss.__call__

    def looked_at(self, batch, output):
        loss, stats = original(self, batch, output)
        assert loss.item() < 1e9
        return loss, stats

    patch.setattr(policy_gradient.PolicyGradientLoss, "__call__", looked_at)


def _read_before_the_copy_is_done(patch: pytest.MonkeyPatch) -> None:
    """Sums of a pass are read without a wait for the copies that bring them."""
    patch.setattr(agreement, "to_host", lambda sums: [on_the_way_to_host(part) for part in sums])


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "forgotten transfer": _forget_a_transfer,
    "numpy": _take_numpy_of_a_device_tensor,
    "unpinned routes": _leave_routes_unpinned,
    "number read": _read_a_number,
    "read too early": _read_before_the_copy_is_done,
}


@contextmanager
def recorded():
    """Synchronisations inside the block, by owner and line; none without a pretended GPU."""
    waits: dict[str, dict[str, int]] = {}
    if not platform.HAS_CUDA:
        yield waits
        return
    from grpo_megatron.pretended_cuda import synchronisations

    with synchronisations.recorded() as record:
        yield waits
    for site, count in record.counts.most_common():
        waits.setdefault(site.owner, {})[str(site)] = count
