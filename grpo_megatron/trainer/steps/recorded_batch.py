"""A recorded step as the objective sees it. Imports no Megatron: reports need it too."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from grpo_megatron.algorithms.batch import DroppedRewards, Events, SampleBatch, turn_events
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError
from grpo_megatron.types import Turn

logger = logging.getLogger(__name__)


def objective_of(config: RunConfig, state: Mapping[str, float]) -> Objective:
    """Return the recipe's objective with what was learned so far (`Objective.state`)."""
    own = {}
    for domain in config.domains:
        if domain.objective is not None:
            own[domain.name] = domain.objective
    return Objective(config.objective, _domain_names(config), own, state)


def sample_batch(config: RunConfig, table: SampleTable) -> SampleBatch:
    """Return rewards and lengths of a recorded step, without token columns. A sample is an episode.

    Raises DataError where the step has other domains than the recipe."""
    names = _domain_names(config)
    recorded = table.manifest.domains
    if recorded and recorded != list(names):
        raise DataError(
            f"the step has the domains {recorded}, the recipe {list(names)}",
            where=str(table.directory),
        )
    domains = torch.from_numpy(table.of_episodes(table.domain)).long()
    components = {}
    component_weights = {}
    for name, values in table.components.items():
        components[name] = torch.from_numpy(table.of_episodes(values))
        component_weights[name] = _component_weights(config, name)[domains]
    batch = SampleBatch(
        rewards=torch.from_numpy(table.of_episodes(table.reward)),
        group_ids=torch.from_numpy(table.of_episodes(table.group)).long(),
        token_counts=torch.from_numpy(table.episode_policy_lengths),
        domains=domains,
        sample_ids=torch.arange(len(domains)),
        trained=torch.ones(len(domains), dtype=torch.bool),
        components=components,
        component_weights=component_weights,
        events=_step_events(table),
        turns=_turns(table),
        spoilt=_without_loss(table),
        correct=_correct(config, table),
        dropped=_dropped(table, names),
        staleness=_staleness(config, table),
    )
    truncated = torch.from_numpy(table.of_episodes(table.truncated))
    return batch.without_truncated(truncated, config.objective.overlong)


def _domain_names(config: RunConfig) -> tuple[str, ...]:
    """Return the domains in the order of the recipe, which is that of domain numbers."""
    return tuple(domain.name for domain in config.domains)


def _component_weights(config: RunConfig, component: str) -> torch.Tensor:
    """Return what a component weighs in every domain, float64 [D]; 0 where it is no reward."""
    weights = torch.zeros(len(config.domains), dtype=torch.float64)
    for number, domain in enumerate(config.domains):
        for reward in domain.rewards:
            if reward.component == component:
                weights[number] = reward.weight
    return weights


def _step_events(table: SampleTable) -> Events | None:
    """Return rewards of single steps; None where no sample has any. One that ends in what an
    environment said ends with the policy token before that."""
    rows, ends, rewards = table.steps
    if not len(rows):
        return None
    offsets = np.cumsum(table.policy_lengths) - table.policy_lengths
    starts = offsets - table.of_episodes(offsets)[table.episode]
    last_tokens = np.empty(len(rows), np.int64)
    for number, (row, end) in enumerate(zip(rows.tolist(), ends.tolist(), strict=True)):
        num_before = int(np.searchsorted(table.policy_places(row), end, side="right"))
        last_tokens[number] = max(starts[row] + num_before - 1, 0)
    return Events(
        torch.from_numpy(table.episode[rows]),
        torch.from_numpy(last_tokens),
        torch.from_numpy(rewards),
    )


def _turns(table: SampleTable) -> Events | None:
    """Return the turns of all episodes; None where no sample has turns."""
    if not table.has_turns:
        return None
    samples: list[list[tuple[Sequence[Turn], int]]] = [[] for _ in table.first_rows]
    for row, episode in enumerate(table.episode.tolist()):
        samples[episode].append((table.turns(row), int(table.completion_lengths[row])))
    return turn_events(samples)


def _without_loss(table: SampleTable) -> torch.Tensor | None:
    """Return which policy tokens are of a spoilt turn or too old, bool [n]; None where none is."""
    found = table.without_loss(np.arange(len(table)))
    if found is None:
        return None
    return torch.from_numpy(found)


def _staleness(config: RunConfig, table: SampleTable) -> torch.Tensor | None:
    """Return by how many weight versions each policy token is older than the step, int64 [n]; None
    where the objective does not use it or nothing is older."""
    if config.objective.proximal != "interpolated" or not table.manifest.stale:
        return None
    versions = [table.versions(row)[table.policy_places(row)] for row in range(len(table))]
    ages = table.manifest.step - np.concatenate(versions).astype(np.int64)
    return torch.from_numpy(ages.clip(min=0))


def _dropped(table: SampleTable, domains: Sequence[str]) -> DroppedRewards | None:
    """Return the rewards of groups that the sampler did not keep; None where nothing was dropped,
    or the objective does not use it."""
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
    """Return what each domain's accuracy component says, bool [N], by episode; one that was skipped
    says no.

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
    return correct[torch.from_numpy(table.first_rows)]
