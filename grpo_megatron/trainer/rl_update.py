"""Training on recorded rollouts: log-prob passes, advantages, optimizer steps.

Advantages are computed here, from the whole batch on every rank, because some need what only the
trainer knows (entropies, old and reference log-probs). Every rank gets the same numbers.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_megatron.algorithms.advantages import Advantages, needed_columns
from grpo_megatron.algorithms.advantages.pipeline import select
from grpo_megatron.algorithms.batch import Events, SampleBatch
from grpo_megatron.algorithms.evaluate import batch_metrics
from grpo_megatron.algorithms.monitors import derived
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.off_policy import calibrated_delta
from grpo_megatron.algorithms.ratios import log_ratio
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.algorithms.step_terms import StepTerms, advantages_of, step_terms
from grpo_megatron.batching.decisions import read_decisions, write_decisions
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.platform import device
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.reference import References
from grpo_megatron.trainer.route_source import RouteSource, merged
from grpo_megatron.trainer.router_replay import Routes, RoutingPass
from grpo_megatron.trainer.schedule import learning_rate
from grpo_megatron.trainer.step import PreparedBatch, logprob_pass, prepare, train_step, untruncated
from grpo_megatron.trainer.watch import Watch


@dataclass
class Update:
    """One optimizer step: its samples, and what earlier passes found on them."""

    rows: torch.Tensor  # int64, the samples in its loss
    batch: PreparedBatch
    old: list[torch.Tensor] | None = None  # per micro-batch fp32 [2, n]; None: current is old
    ref: list[torch.Tensor] | None = None  # per micro-batch fp32 [n]
    routes: list[Routes] | None = None  # the engine's, per micro-batch
    old_routing: RoutingPass | None = None  # what the old-policy pass found


def objective_of(config: RunConfig, state: Mapping[str, float]) -> Objective:
    """The recipe's objective with what was learned so far."""
    own = {d.name: d.objective for d in config.domains if d.objective is not None}
    return Objective(config.objective, tuple(d.name for d in config.domains), own, state)


def train_rollouts(config: RunConfig, policy: Policy, references: References, table: SampleTable,
                   first_update: int, num_updates: int, state: Mapping[str, float],
                   replayed: bool = False) -> dict[str, Any]:
    """All optimizer steps of a recorded batch of rollouts.

    Args:
        replayed: Follow the recorded clip and mask decisions instead of recording them.
        first_update: optimizer steps done before, which fixes the learning rate.
        num_updates: optimizer steps of the whole run.
        state: `Objective.state` after the step before.

    Returns:
        `metrics`, their `normalisers`, the new `state`, `losses` and pre-clip `grad_norms` by
        update, counts and seconds.
    """
    started = time.perf_counter()
    objective = objective_of(config, state)
    batch = sample_batch(config, table)
    needs = needed_columns(objective.config, reference=objective.wants_reference)
    updates = _plan(config, table, batch, objective, everything=bool(needs))
    source = RouteSource(config, policy.replay, table)
    for update in updates:
        update.routes = source.from_store(update.batch)
    routing = _passes(policy, references, table, objective, updates, needs, source)
    old_s = time.perf_counter() - started
    batch = replace(batch, tokens=_token_columns(table, batch, updates, needs))
    advantages = advantages_of(objective, batch)
    if objective.config.shuffle_advantages:
        advantages = _shuffled(advantages, f"{config.seed}/{table.manifest.get('step')}")
    total, rates, by_update, decided = Stats(), [], [], Decided(table, replayed)
    watch = (Watch(config, policy, table, objective)
             if updates and config.objective.monitor_samples else None)
    if watch and references.wanted and not objective.wants_reference:
        total = watch.reference(references)
    for number, update in enumerate(updates):
        terms = step_terms(objective, batch, advantages, update.rows,
                           config.objective.aggregation_length or config.rollout.max_new_tokens)
        if config.objective.preference_weight > 0:
            terms = terms.with_margins(objective, _margins(policy, batch, update, source))
        rates.append(learning_rate(config.optimizer, first_update + number, num_updates))
        policy.set_learning_rate(rates[-1])
        run = source.training_pass(update.batch, update.routes, update.old_routing, objective,
                                   terms)
        stats = train_step(policy, update.batch,
                           _loss_function(objective, terms, update, decided), run)
        if run is not None:
            routing.append(policy.replay.finish(run, update.batch.microbatches))
        for name in ("loss/value", "loss/abs_terms"):  # the mean over updates
            stats.means[name][1], stats.units[name] = 1.0, "update"
        objective = replace(objective, state=_learned(objective, stats))
        by_update.append(stats.result())
        total.add(stats)
    decided.write()
    if watch:
        total.add(watch.step(batch, advantages))
    metrics = {**derived(total.result()), **batch_metrics(objective, batch, advantages)}
    if rates:
        metrics["optimizer/lr"] = float(np.mean(rates))
    metrics |= {f"objective/{name}": value for name, value in objective.state.items()}
    metrics |= merged(routing) | source.metrics()
    metrics["batch/skipped_updates"] = float(int(table.update.max(initial=-1)) + 1 - len(updates))
    return {"metrics": metrics, "normalisers": total.units, "state": dict(objective.state),
            "updates": len(updates), "old_logprobs_s": old_s,
            "losses": [found["loss/value"] for found in by_update],
            "grad_norms": [found["grad/norm"] for found in by_update],
            "tokens": sum(u.batch.num_tokens for u in updates),
            "train_s": time.perf_counter() - started}


def sample_batch(config: RunConfig, table: SampleTable) -> SampleBatch:
    """Rewards and lengths of a recorded step, without token columns."""
    weights = {d.name: {r.component: r.weight for r in d.rewards}
               for d in config.domains}
    names = [d.name for d in config.domains]
    if table.manifest.get("domains", names) != names:
        raise DataError(f"the step has the domains {table.manifest['domains']}, the recipe "
                        f"{names}", where=str(table.directory))
    batch = SampleBatch(
        rewards=torch.from_numpy(table.reward), group_ids=torch.from_numpy(table.group).long(),
        token_counts=torch.from_numpy(table.completion_lengths),
        sample_ids=torch.arange(len(table)), domains=torch.from_numpy(table.domain).long(),
        trained=torch.ones(len(table), dtype=torch.bool),
        components={name: torch.from_numpy(v) for name, v in table.components.items()},
        component_weights={name: torch.tensor([weights[names[d]].get(name, 0.0)
                                               for d in table.domain.tolist()],
                                              dtype=torch.float64)
                           for name in table.components},
        events=Events(*map(torch.from_numpy, table.steps)) if len(table.steps[0]) else None)
    return batch.without_truncated(torch.from_numpy(table.truncated), config.objective.overlong)


def _plan(config: RunConfig, table: SampleTable, batch: SampleBatch, objective: Objective, *,
          everything: bool) -> list[Update]:
    """Optimizer steps that have samples to train; the others are skipped.

    Args:
        everything: pack samples without loss too, for the statistics of their tokens.
    """
    trained, updates = select(objective.config, batch).numpy(), []
    for number in range(int(table.update.max(initial=-1)) + 1):
        rows = np.flatnonzero((table.update == number) & trained)
        packed = np.flatnonzero(table.update == number) if everything else rows
        if table.completion_lengths[rows].sum():
            updates.append(Update(torch.from_numpy(rows), prepare(config.trainer, table, packed)))
    return updates


def _passes(policy: Policy, references: References, table: SampleTable, objective: Objective,
            updates: Sequence[Update], needs: frozenset[str],
            source: RouteSource) -> list[dict[str, float]]:
    """Old log-probs, unless the first loss pass has them; reference log-probs, if they weigh.
    Returns routing metrics of the old-policy passes."""
    on_policy = len(updates) == 1 and not table.manifest["stale"]
    routing = []
    for update in updates:
        if not on_policy or needs & {"old_logprobs", "entropies"} or source.needs_old_pass:
            update.old_routing = run = source.old_pass(update.routes)
            update.old = logprob_pass(policy, update.batch, run)
            if run is not None:
                routing.append(policy.replay.finish(run, update.batch.microbatches))
    if objective.wants_reference:
        for update, found in zip(updates, references.logprobs(
                policy, [u.batch for u in updates], objective, table.domain), strict=True):
            update.ref = found
    return routing


def _token_columns(table: SampleTable, batch: SampleBatch, updates: Sequence[Update],
                   needs: frozenset[str]) -> dict[str, torch.Tensor]:
    """What advantages are computed from: fp32 [n] of the whole batch, equal on all ranks."""
    columns = {}
    if "token_ids" in needs:
        columns["token_ids"] = torch.from_numpy(table.all_completion_ids()).long()
    sources = {"old_logprobs": lambda u: [untruncated(found) for found in u.old],
               "entropies": lambda u: [found[1] for found in u.old],
               "ref_logprobs": lambda u: u.ref}
    for name in sorted(needs & set(sources)):
        columns[name] = gather_tokens(batch, [
            (microbatch, values) for update in updates
            for microbatch, values in zip(update.batch.microbatches, sources[name](update),
                                          strict=True)])
    return columns


def gather_tokens(batch: SampleBatch,
              parts: Sequence[tuple[MicroBatch, torch.Tensor]]) -> torch.Tensor:
    """Put per-micro-batch tokens in the order of the table, on every rank. Collective."""
    flat = torch.zeros(batch.num_tokens, device=device())
    speaks = (parallel_state.is_pipeline_last_stage(ignore_virtual=True)
              and parallel_state.get_tensor_model_parallel_rank() == 0)
    for microbatch, values in parts if speaks else ():
        index = batch.flat_index(torch.from_numpy(microbatch.table_rows))
        flat[index.to(flat.device)] = values
    dist.all_reduce(flat)
    return flat.cpu()


def _margins(policy: Policy, batch: SampleBatch, update: Update,
             source: RouteSource) -> torch.Tensor:
    """`sum_t log pi_theta - log pi_old` of every sample at the current weights, float64 [N]."""
    if update.old is None:
        return torch.zeros(len(batch), dtype=torch.float64)
    now = logprob_pass(policy, update.batch, source.margin_pass(
        update.batch, update.routes, update.old_routing))
    return batch.sums(gather_tokens(batch, [
        (microbatch, log_ratio(new[0], old[0])) for microbatch, new, old
        in zip(update.batch.microbatches, now, update.old, strict=True)])).double()


class Decided:
    """Clip and mask decisions of a step: collected and written, or read and followed."""

    def __init__(self, table: SampleTable, replayed: bool):
        self._directory = table.directory
        self._rows: list[np.ndarray] = []
        self._flags: list[dict[str, np.ndarray]] = []
        self.recorded = None
        if replayed:
            found = read_decisions(table.directory, table.completion_lengths)
            self.recorded = {name: torch.from_numpy(flags) for name, flags in found.items()}

    def collect(self, microbatch: MicroBatch, flags: Mapping[str, torch.Tensor]) -> None:
        self._rows.append(microbatch.table_rows)
        self._flags.append({name: value.cpu().numpy() for name, value in flags.items()})

    def write(self) -> None:
        speaks = (self.recorded is None and self._rows
                  and parallel_state.get_tensor_model_parallel_rank() == 0)
        if speaks:
            write_decisions(self._directory, parallel_state.get_data_parallel_rank(),
                            parallel_state.get_data_parallel_world_size(), self._rows,
                            self._flags)


def _loss_function(objective: Objective, terms: StepTerms, update: Update, decided: Decided):
    def loss(microbatch: MicroBatch, output: torch.Tensor):
        logprobs, entropies = output[:2].unbind(0)
        old = None if update.old is None else update.old[microbatch.index][0]
        value, stats = policy_loss(objective, terms.loss_batch(
            torch.from_numpy(microbatch.table_rows), logprobs,
            logprobs.detach() if old is None else old, microbatch.rollout_logprobs, entropies,
            None if update.ref is None else update.ref[microbatch.index],
            untruncated(output), decided.recorded))
        decided.collect(microbatch, stats.decisions)
        return value, stats
    return loss


def _learned(objective: Objective, stats: Stats) -> dict[str, float]:
    """The state after an optimizer step: lambda_grpo's exponent, OPSM's thresholds."""
    state, o = dict(objective.state), objective.config
    if "lambda/gradient" in stats.means:
        exponent = objective.exponent - o.lambda_lr * float(stats.means["lambda/gradient"][0])
        state["lambda"] = min(max(exponent, -2.0), 2.0)
    for domain, distances in stats.samples.items():
        if len(distances):
            state[f"opsm_delta@{domain}"] = calibrated_delta(distances)
    return state


def _shuffled(advantages: Advantages, seed: str) -> Advantages:
    """Negative control: permute the samples' advantages over the batch."""
    order = list(range(len(advantages.values)))
    random.Random(seed).shuffle(order)
    return replace(advantages, values=advantages.values[order])
