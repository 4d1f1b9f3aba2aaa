"""Training on recorded rollouts: log-prob passes, advantages, optimizer steps.

Advantages are computed here, from the whole batch on every rank, because some need what only the
trainer knows (entropies, old and reference log-probs). Every rank gets the same numbers.
"""

import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from grpo_megatron.algorithms.advantages.pipeline import needed_columns, select
from grpo_megatron.algorithms.evaluate import batch_metrics
from grpo_megatron.algorithms.monitors import derived
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.algorithms.off_policy import calibrated_delta
from grpo_megatron.algorithms.ratios import log_ratio
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.algorithms.step_terms import StepTerms, advantages_of, step_terms
from grpo_megatron.batching.decisions import read_decisions, write_decisions
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.reference import References
from grpo_megatron.trainer.rollouts import gather_tokens, objective_of, sample_batch
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


def train_rollouts(config: RunConfig, policy: Policy, references: References, table: SampleTable,
                   first_update: int, num_updates: int, state: Mapping[str, float],
                   replayed: bool = False) -> dict[str, Any]:
    """All optimizer steps of a recorded batch of rollouts.

    Args:
        first_update: optimizer steps done before, which fixes the learning rate.
        num_updates: optimizer steps of the whole run.
        state: `Objective.state` after the step before.
        replayed: Follow the recorded clip and mask decisions instead of recording them.

    Returns `metrics`, their `normalisers`, the new `state`, `losses` and pre-clip `grad_norms` by
    update, counts and seconds."""
    training = _Training(config, policy, references, table, state, replayed)
    return training.run(first_update, num_updates)


class _Training:
    """One recorded step while it is trained."""

    def __init__(self, config: RunConfig, policy: Policy, references: References,
                 table: SampleTable, state: Mapping[str, float], replayed: bool):
        self.started = time.perf_counter()
        self.config, self.policy, self.references, self.table = config, policy, references, table
        self.objective = objective = objective_of(config, state)
        self.needs = needed_columns(objective.config, reference=objective.wants_reference)
        self.batch = sample_batch(config, table)
        self.followed = {name: torch.from_numpy(flags) for name, flags in read_decisions(
            table.directory, table.completion_lengths).items()} if replayed else None
        self.decided: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self.source = RouteSource(config, policy.replay, table)
        self.routing: list[dict[str, float]] = []  # metrics of passes
        self.updates = self._plan()

    def _plan(self) -> list[Update]:
        """Optimizer steps that have samples to train; the others are skipped."""
        trained, updates = select(self.objective.config, self.batch).numpy(), []
        for number in range(int(self.table.update.max(initial=-1)) + 1):
            packed = np.flatnonzero(self.table.update == number)
            rows = packed[trained[packed]]
            if self.table.completion_lengths[rows].sum():
                # advantages may need tokens of samples that have no loss
                batch = prepare(self.config.trainer, self.table, packed if self.needs else rows)
                updates.append(Update(torch.from_numpy(rows), batch,
                                      routes=self.source.from_store(batch)))
        return updates

    def run(self, first_update: int, num_updates: int) -> dict[str, Any]:
        config, objective = self.config, self.objective
        self._passes()
        old_s = time.perf_counter() - self.started
        self.batch = replace(self.batch, tokens=self._token_columns())
        advantages = advantages_of(objective, self.batch)
        if config.objective.shuffle_advantages:  # negative control
            order = list(range(len(advantages.values)))
            random.Random(f"{config.seed}/{self.table.manifest.get('step')}").shuffle(order)
            advantages = replace(advantages, values=advantages.values[order])
        watch = (Watch(config, self.policy, self.table, objective)
                 if self.updates and config.objective.monitor_share else None)
        total, rates, by_update = Stats(), [], []
        if watch and self.references.wanted and not objective.wants_reference:
            total = watch.reference(self.references)
        for number, update in enumerate(self.updates):
            terms = step_terms(self.objective, self.batch, advantages, update.rows,
                               config.objective.aggregation_length or config.rollout.max_new_tokens)
            rates.append(learning_rate(config.optimizer, first_update + number, num_updates))
            stats = self._step(update, terms, rates[-1])
            by_update.append(stats.result())
            total.add(stats)
        first = parallel_state.get_tensor_model_parallel_rank() == 0
        if self.decided and self.followed is None and first:
            write_decisions(self.table.directory, parallel_state.get_data_parallel_rank(),
                            parallel_state.get_data_parallel_world_size(), self.decided)
        if watch:
            total.add(watch.step(self.batch, advantages))
        skipped = int(self.table.update.max(initial=-1)) + 1 - len(self.updates)
        metrics = {**derived(total.result()),
                   **batch_metrics(self.objective, self.batch, advantages),
                   **{f"objective/{name}": v for name, v in self.objective.state.items()},
                   **merged(self.routing), **self.source.metrics(),
                   **({"optimizer/lr": float(np.mean(rates))} if rates else {}),
                   "batch/skipped_updates": float(skipped)}
        return {"metrics": metrics, "normalisers": total.units,
                "state": dict(self.objective.state), "updates": len(self.updates),
                "losses": [found["loss/value"] for found in by_update],
                "grad_norms": [found["grad/norm"] for found in by_update],
                "tokens": sum(u.batch.num_tokens for u in self.updates),
                "old_logprobs_s": old_s, "train_s": time.perf_counter() - self.started}

    def _passes(self) -> None:
        """Old log-probs, unless the first loss pass has them; reference ones, if they weigh."""
        on_policy = len(self.updates) == 1 and not self.table.manifest["stale"]
        for update in self.updates:
            if (not on_policy or self.needs & {"old_logprobs", "entropies"}
                    or self.source.needs_old_pass):
                update.old_routing = run = self.source.old_pass(update.routes)
                update.old = logprob_pass(self.policy, update.batch, run)
                self._measured(update, run)
        if self.objective.wants_reference:
            batches = [update.batch for update in self.updates]
            found = self.references.logprobs(self.policy, batches, self.objective,
                                             self.table.domain)
            for update, ref in zip(self.updates, found, strict=True):
                update.ref = ref

    def _measured(self, update: Update, run: RoutingPass | None) -> None:
        if run is not None:
            self.routing.append(self.policy.replay.finish(run, update.batch.microbatches))

    def _token_columns(self) -> dict[str, torch.Tensor]:
        """What advantages are computed from: fp32 [n] of the whole batch, equal on all ranks."""
        columns = {}
        if "token_ids" in self.needs:
            columns["token_ids"] = torch.from_numpy(self.table.all_completion_ids()).long()
        sources = {"entropies": lambda u: [found[1] for found in u.old],
                   "old_logprobs": lambda u: [untruncated(found) for found in u.old],
                   "ref_logprobs": lambda u: u.ref}
        batches = [update.batch for update in self.updates]
        for name, source in sources.items():
            if name in self.needs:
                columns[name] = gather_tokens(self.batch, batches, list(map(source, self.updates)))
        return columns

    def _step(self, update: Update, terms: StepTerms, rate: float) -> Stats:
        """One optimizer step; the objective learns from it."""
        if self.config.objective.preference_weight > 0:
            terms = terms.with_margins(self.objective, self._margins(update))
        self.policy.set_learning_rate(rate)
        run = self.source.training_pass(update.batch, update.routes, update.old_routing,
                                        self.objective, terms)

        def loss(microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            logprobs, entropies = output[:2].unbind(0)
            index = microbatch.index
            value, stats = policy_loss(self.objective, terms.loss_batch(
                torch.from_numpy(microbatch.table_rows), logprobs,
                logprobs.detach() if update.old is None else update.old[index][0],
                microbatch.rollout_logprobs, entropies,
                None if update.ref is None else update.ref[index], untruncated(output),
                self.followed))
            self.decided.append((microbatch.table_rows, {
                name: flags.cpu().numpy() for name, flags in stats.decisions.items()}))
            return value, stats

        stats = train_step(self.policy, update.batch, loss, run)
        self._measured(update, run)
        for name in ("loss/value", "loss/abs_terms"):  # the mean over updates
            stats.means[name][1], stats.units[name] = 1.0, "update"
        self._learn(stats)
        return stats

    def _margins(self, update: Update) -> torch.Tensor:
        """`sum_t log pi_theta - log pi_old` of every sample at the current weights, float64 [N]."""
        if update.old is None:
            return torch.zeros(len(self.batch), dtype=torch.float64)
        now = logprob_pass(self.policy, update.batch, self.source.margin_pass(
            update.batch, update.routes, update.old_routing))
        ratios = [log_ratio(new[0], old[0]) for new, old in zip(now, update.old, strict=True)]
        return self.batch.sums(gather_tokens(self.batch, [update.batch], [ratios])).double()

    def _learn(self, stats: Stats) -> None:
        """lambda_grpo's exponent, OPSM's thresholds."""
        state, settings = dict(self.objective.state), self.objective.config
        if "lambda/gradient" in stats.means:
            exponent = (self.objective.exponent
                        - settings.lambda_lr * float(stats.means["lambda/gradient"][0]))
            state["lambda"] = min(max(exponent, -2.0), 2.0)
        for domain, distances in stats.samples.items():
            if len(distances):
                state[f"opsm_delta@{domain}"] = calibrated_delta(distances)
        self.objective = replace(self.objective, state=state)
