"""What ranks with a pretended GPU execute, and plain ranks beside them."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RoutingConfig
from grpo_megatron.trainer.megatron import platform
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
) -> Found:
    """A whole RL update of recorded rollouts, against a reference that is not the policy."""
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
        references.take(setup.policy)
        _perturb(setup.shards, 1 / 1.01)
        setup.policy.optimizer.reload_model_params()
    table = SampleTable(Path(samples))
    with recorded() as waits:
        training = Training(config, setup.policy, references, table, {})
        report = training.run(0, 3)
    num_microbatches = sum(len(update.microbatches) for update in training.updates)
    return Found(asdict(report), num_microbatches, waits)


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
