"""A recorded step as the objective sees it. Imports no Megatron: reports need it too."""

import logging
from collections.abc import Mapping, Sequence

import torch

from grpo_megatron.algorithms.batch import DroppedRewards, Events, SampleBatch
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError

logger = logging.getLogger(__name__)


def objective_of(config: RunConfig, state: Mapping[str, float]) -> Objective:
    """The recipe's objective with what was learned so far."""
    own = {d.name: d.objective for d in config.domains if d.objective is not None}
    return Objective(config.objective, tuple(d.name for d in config.domains), own, state)


def sample_batch(config: RunConfig, table: SampleTable) -> SampleBatch:
    """Rewards and lengths of a recorded step, without token columns."""
    names = [d.name for d in config.domains]
    recorded = table.manifest.domains
    if recorded and recorded != names:
        raise DataError(
            f"the step has the domains {recorded}, the recipe {names}",
            where=str(table.directory),
        )
    weights = [{r.component: r.weight for r in d.rewards} for d in config.domains]
    domains = torch.from_numpy(table.domain).long()
    batch = SampleBatch(
        rewards=torch.from_numpy(table.reward),
        group_ids=torch.from_numpy(table.group).long(),
        token_counts=torch.from_numpy(table.completion_lengths),
        domains=domains,
        sample_ids=torch.arange(len(table)),
        trained=torch.ones(len(table), dtype=torch.bool),
        components={name: torch.from_numpy(v) for name, v in table.components.items()},
        component_weights={
            name: torch.tensor([w.get(name, 0.0) for w in weights], dtype=torch.float64)[domains]
            for name in table.components
        },
        events=Events(*map(torch.from_numpy, table.steps)) if len(table.steps[0]) else None,
        correct=_correct(config, table),
        dropped=_dropped(table, names),
    )
    return batch.without_truncated(torch.from_numpy(table.truncated), config.objective.overlong)


def _dropped(table: SampleTable, domains: Sequence[str]) -> DroppedRewards | None:
    """What the sampler did not keep; None where nothing was dropped, or nobody asked."""
    by_domain = table.manifest.dropped_rewards
    if not by_domain:
        return None
    rewards = []
    domain_of = []
    for domain, values in by_domain.items():
        rewards += values
        domain_of += [domains.index(domain)] * len(values)
    return DroppedRewards(
        rewards=torch.tensor(rewards, dtype=torch.float64),
        domains=torch.tensor(domain_of, dtype=torch.int64),
    )


def _correct(config: RunConfig, table: SampleTable) -> torch.Tensor:
    """What each domain's accuracy component says, bool [N]; one that was skipped says no.

    Where a step was recorded without it, rewards decide, and the log says so."""
    correct = torch.zeros(len(table), dtype=torch.bool)
    for number, domain in enumerate(config.domains):
        rows = torch.from_numpy(table.domain == number)
        if not rows.any():
            continue
        values = table.components.get(domain.accuracy_component)
        least = domain.least_correct
        if values is None:
            logger.warning(
                "%s has no component %s: a reward of %g counts as correct",
                table.directory,
                domain.accuracy_component,
                config.objective.correct_threshold,
            )
            values = table.reward
            least = config.objective.correct_threshold
        correct |= rows & (torch.from_numpy(values) >= least)
    return correct
