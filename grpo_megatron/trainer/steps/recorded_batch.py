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
    """The recipe's objective with what was learned so far (`Objective.state`)."""
    own = {}
    for domain in config.domains:
        if domain.objective is not None:
            own[domain.name] = domain.objective
    return Objective(config.objective, _domain_names(config), own, state)


def sample_batch(config: RunConfig, table: SampleTable) -> SampleBatch:
    """Rewards and lengths of a recorded step, without token columns.

    Raises DataError where the step has other domains than the recipe."""
    names = _domain_names(config)
    recorded = table.manifest.domains
    if recorded and recorded != list(names):
        raise DataError(
            f"the step has the domains {recorded}, the recipe {list(names)}",
            where=str(table.directory),
        )
    domains = torch.from_numpy(table.domain).long()
    components = {}
    component_weights = {}
    for name, values in table.components.items():
        components[name] = torch.from_numpy(values)
        component_weights[name] = _component_weights(config, name)[domains]
    batch = SampleBatch(
        rewards=torch.from_numpy(table.reward),
        group_ids=torch.from_numpy(table.group).long(),
        token_counts=torch.from_numpy(table.completion_lengths),
        domains=domains,
        sample_ids=torch.arange(len(table)),
        trained=torch.ones(len(table), dtype=torch.bool),
        components=components,
        component_weights=component_weights,
        events=_step_events(table),
        correct=_correct(config, table),
        dropped=_dropped(table, names),
    )
    return batch.without_truncated(torch.from_numpy(table.truncated), config.objective.overlong)


def _domain_names(config: RunConfig) -> tuple[str, ...]:
    """In the order of the recipe, which is that of domain numbers."""
    return tuple(domain.name for domain in config.domains)


def _component_weights(config: RunConfig, component: str) -> torch.Tensor:
    """What a component weighs in every domain, float64 [D]; 0 where it is no reward."""
    weights = torch.zeros(len(config.domains), dtype=torch.float64)
    for number, domain in enumerate(config.domains):
        for reward in domain.rewards:
            if reward.component == component:
                weights[number] = reward.weight
    return weights


def _step_events(table: SampleTable) -> Events | None:
    """Rewards of single steps; None where no sample has any."""
    rows, ends, rewards = table.steps
    if not len(rows):
        return None
    return Events(torch.from_numpy(rows), torch.from_numpy(ends), torch.from_numpy(rewards))


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
