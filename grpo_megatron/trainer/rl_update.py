"""Training on recorded rollouts: log-prob passes, advantages, optimizer steps.

Advantages are computed here, from the whole batch on every rank, because some need what only the
trainer knows (entropies, old and reference log-probs). Every rank gets the same numbers."""

import random
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from grpo_megatron.algorithms import evaluate, ratios
from grpo_megatron.algorithms.advantages.pipeline import advantages_of, needed_columns, select
from grpo_megatron.algorithms.objective import policy_loss
from grpo_megatron.algorithms.stats import Stats, derived
from grpo_megatron.algorithms.step_terms import StepTerms, step_terms
from grpo_megatron.batching.store import SampleTable, read_decisions, write_decisions
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer import canary, step
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.reference import References, Watch
from grpo_megatron.trainer.rollouts import objective_of, sample_batch
from grpo_megatron.trainer.route_source import RouteSource


class Training:
    """One recorded step while it is trained. `state` is `Objective.state` after the step before;
    with `replayed`, clip and mask decisions follow the recorded ones, which are not written;
    `exact`: these very weights sampled it, so it proves that the engines have them, if it can."""

    def __init__(self, config: RunConfig, policy: Policy, references: References,
                 table: SampleTable, state: Mapping[str, float], replayed: bool = False,
                 exact: bool = False):
        self.started, self.exact = time.perf_counter(), exact
        self.config, self.policy, self.references, self.table = config, policy, references, table
        self.objective = objective = objective_of(config, state)
        self.needs = needed_columns(objective.config, reference=objective.wants_reference)
        self.batch = sample_batch(config, table)
        self.followed = {name: torch.from_numpy(flags) for name, flags in read_decisions(
            table.directory, table.completion_lengths).items()} if replayed else None
        self.decided: list[tuple[np.ndarray, dict[str, np.ndarray]]] = []
        self.source = RouteSource(config, policy.replay, table)
        self.updates = self._plan()

    def _plan(self) -> list[step.Update]:
        """Optimizer steps that have samples to train; the others are skipped."""
        trained, updates = select(self.objective.config, self.batch).numpy(), []
        for number in range(int(self.table.update.max(initial=-1)) + 1):
            packed = np.flatnonzero(self.table.update == number)
            rows = packed[trained[packed]]
            if self.table.completion_lengths[rows].sum():
                # advantages may need tokens of samples that have no loss
                computed = packed if self.needs else rows
                batch = step.prepare(self.config.trainer, self.table, computed)
                routes = self.source.from_store(batch)
                updates.append(step.Update(torch.from_numpy(rows), batch, routes=routes))
        return updates

    def run(self, first_update: int, num_updates: int) -> dict[str, Any]:
        """All optimizer steps of the batch, after `first_update` of the run's `num_updates`; gives
        metrics, `normalisers`, `state`, `losses`, pre-clip `grad_norms` of updates, counts."""
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
            rates.append(config.optimizer.rate(first_update + number, num_updates))
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
        state = dict(self.objective.state)
        metrics = {**derived(total.result()), "batch/skipped_updates": float(skipped),
                   **evaluate.batch_metrics(self.objective, self.batch, advantages),
                   **{f"objective/{name}": v for name, v in state.items()}, **self.source.metrics(),
                   **({"optimizer/lr": float(np.mean(rates))} if rates else {})}
        return {"metrics": metrics, "normalisers": total.units, "state": state,
                "updates": len(self.updates), "losses": [f["loss/value"] for f in by_update],
                "grad_norms": [found["grad/norm"] for found in by_update],
                "tokens": sum(u.batch.num_tokens for u in self.updates),
                "old_logprobs_s": old_s, "train_s": time.perf_counter() - self.started}

    def _passes(self) -> None:
        """Old log-probs, unless the first loss pass has them; reference ones, if they weigh."""
        on_policy = len(self.updates) == 1 and not self.table.manifest["stale"]
        needed = self.needs & {"old_logprobs", "entropies"} or self.source.needs_old_pass
        for update in self.updates:
            if needed or not on_policy:
                update.old_routing = run = self.source.old_pass(update.routes)
                update.old = step.logprob_pass(self.policy, update.batch, run)
                self.source.finish(run, update.batch)
        if self.objective.wants_reference:
            found = self.references.logprobs(self.policy, [u.batch for u in self.updates],
                                             self.objective, self.table.domain)
            for update, ref in zip(self.updates, found, strict=True):
                update.ref = ref

    def _token_columns(self) -> dict[str, torch.Tensor]:
        """What advantages are computed from: fp32 [n] of the whole batch, equal on all ranks."""
        columns = {}
        if "token_ids" in self.needs:
            columns["token_ids"] = torch.from_numpy(self.table.all_completion_ids()).long()
        sources = {"old_logprobs": lambda u: [step.untruncated(found) for found in u.old],
            "entropies": lambda u: [found[1] for found in u.old], "ref_logprobs": lambda u: u.ref}
        batches = [update.batch for update in self.updates]
        for name, source in sources.items():
            if name in self.needs:
                values = list(map(source, self.updates))
                columns[name] = step.gather_tokens(self.batch, batches, values)
        return columns

    def _step(self, update: step.Update, terms: StepTerms, rate: float) -> Stats:
        """One optimizer step; the objective learns from it."""
        if self.config.objective.preference_weight > 0:
            terms = terms.with_margins(self.objective, self._margins(update))
        self.policy.set_learning_rate(rate)
        run = self.source.training_pass(update, terms)
        proves = self.config.samples_prove and not self.table.manifest["stale"]

        def loss(microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
            logprobs, entropies = output[:2].unbind(0)
            index = microbatch.index
            old = logprobs.detach() if update.old is None else update.old[index][0]
            value, stats = policy_loss(self.objective, terms.loss_batch(
                torch.from_numpy(microbatch.table_rows), logprobs, old,
                microbatch.rollout_logprobs, entropies,
                None if update.ref is None else update.ref[index], step.untruncated(output),
                self.followed))
            if proves:
                stats.add(canary.compare(self.config, self.table, microbatch.table_rows,
                                         old - microbatch.rollout_logprobs))
            self.decided.append((microbatch.table_rows, {
                name: flags.cpu().numpy() for name, flags in stats.decisions.items()}))
            return value, stats

        def check(stats: Stats) -> None:
            problem = canary.disagreement(self.config, self.table, stats)
            if problem and self.exact:
                raise MismatchError(f"in step {self.table.manifest['step']}, {problem}",
                                    where="publish.canary_tolerance", remedy=canary.REMEDY)

        stats = step.train_step(self.policy, update.batch, loss, run, check)
        self.source.finish(run, update.batch)
        self._learn(stats)
        return stats

    def _margins(self, update: step.Update) -> torch.Tensor:
        """`sum_t log pi_theta - log pi_old` of every sample at the current weights, float64 [N]."""
        if update.old is None:
            return torch.zeros(len(self.batch), dtype=torch.float64)
        now = step.logprob_pass(self.policy, update.batch, self.source.margin_pass(update))
        found = [ratios.log_ratio(new[0], old[0]) for new, old in zip(now, update.old, strict=True)]
        return self.batch.sums(step.gather_tokens(self.batch, [update.batch], [found])).double()

    def _learn(self, stats: Stats) -> None:
        """lambda_grpo's exponent, OPSM's thresholds."""
        state, settings = dict(self.objective.state), self.objective.config
        if "lambda/gradient" in stats.means:
            exponent = (self.objective.exponent
                        - settings.lambda_lr * float(stats.means["lambda/gradient"][0]))
            state["lambda"] = min(max(exponent, -2.0), 2.0)
        for domain, distances in stats.samples.items():
            if len(distances):
                state[f"opsm_delta@{domain}"] = ratios.calibrated_delta(distances)
        self.objective = replace(self.objective, state=state)
