"""Training on recorded rollouts: log-prob passes, advantages, optimizer steps.

Advantages are computed here, from the whole batch on every rank, because some need what only the
trainer knows (entropies, old and reference log-probs). Every rank gets the same numbers."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from megatron.core import parallel_state

from grpo_megatron.algorithms import evaluate, ratios
from grpo_megatron.algorithms.advantages.pipeline import (
    advantages_of,
    needed_columns,
    select,
    state_after,
    value_targets,
)
from grpo_megatron.algorithms.aggregation import loss_constants, with_preference
from grpo_megatron.algorithms.batch import Advantages, LossConstants, ValueTargets
from grpo_megatron.algorithms.stats import Stats, derived
from grpo_megatron.algorithms.step_size import effective_share, rate_factor
from grpo_megatron.algorithms.value_loss import measured
from grpo_megatron.batching.drift_file import write_drift
from grpo_megatron.batching.mask_file import read_masks, write_masks
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.passes import loss_columns, takes_old_pass
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer.checks import logprob_check
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.requests import TrainReport
from grpo_megatron.trainer.routing.expert_loads import expert_loads
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.critic import (
    Critic,
    PolicyAndValueLoss,
    ValueLoss,
    num_counted_tokens,
)
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.trainer.steps.policy_gradient import MaskRecord, PolicyGradientLoss
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.trainer.steps.references import PolicyDriftMonitor, References
from grpo_megatron.weights.gather import all_gathered


class Training:
    """One recorded step while it is trained.

    `state` is `Objective.state` after the step before. With `replayed`, clip and mask decisions
    follow the recorded ones, which are not written anew. `exact`: these very weights sampled it,
    so the step proves that the engines have them, if it can. `critic`: of an objective whose
    advantages are made of values, if it is a model beside the policy."""

    def __init__(
        self,
        config: RunConfig,
        policy: Policy,
        references: References,
        table: SampleTable,
        state: Mapping[str, float],
        replayed: bool = False,
        exact: bool = False,
        critic: Critic | None = None,
    ):
        self.started = time.perf_counter()
        self.config = config
        self.policy = policy
        self.references = references
        self.critic = critic
        self.table = table
        self.exact = exact
        self.objective = objective_of(config, state)
        needed = needed_columns(self.objective.config, weighs_kl=self.objective.weighs_kl)
        self.needs = needed | loss_columns(self.objective.config)
        self.batch = sample_batch(config, table)
        self.replayed_masks: dict[str, torch.Tensor] | None = None
        self.has_recorded_masks = True
        """Whether the masks of a step that is replayed are there."""
        if replayed:
            masks = _recorded_masks(table)
            self.replayed_masks = masks or {}
            self.has_recorded_masks = masks is not None
        self.recorded_masks: list[list[MaskRecord]] = []
        """By epoch, of every micro-batch."""
        self.source = RouteSource(config, policy.replay, table)
        self.prepared = self._plan()
        """Updates whose tokens are looked at before the first optimizer step."""
        self.updates = [update for update in self.prepared if len(update.episodes)]
        """Those of them with a sample in the loss, which are trained."""
        self.is_untouched = True
        """Whether the weights are still those from before the step."""
        self.value_targets: ValueTargets
        """What the critic learns, once it has looked at the tokens."""

    @property
    def num_planned_updates(self) -> int:
        """Optimizer steps of the recorded step, also those without a sample to train."""
        return int(self.table.update.max(initial=-1)) + 1

    def _plan(self) -> list[UpdateBatch]:
        """Plan the optimizer steps that have samples to train, and the others, which are skipped,
        where advantages may be made of their tokens."""
        is_trained = select(self.objective, self.batch).numpy()[self.table.episode]
        updates = []
        experts = expert_loads(self.config, self.table, self.policy.replay.shape)
        for number in range(self.num_planned_updates):
            all_rows = np.flatnonzero(self.table.update == number)
            rows = all_rows[is_trained[all_rows]]
            if self.table.policy_lengths[rows].sum() == 0:
                rows = rows[:0]
            computed = rows
            if self.needs:  # advantages may be made of tokens of samples that have no loss
                computed = all_rows
            if self.table.policy_lengths[computed].sum() == 0:
                continue
            update = optimizer_step.prepare(
                self.config.trainer, self.table, computed, rows, experts
            )
            update.routes = self.source.from_store(update)
            updates.append(update)
        return updates

    def run(self, first_update: int, num_updates: int) -> TrainReport:
        """Take all optimizer steps of the batch, which come after `first_update` of the run's
        `num_updates`. Collective.

        Raises MismatchError where `exact` samples show that an engine computes something else,
        TrainerError where the loss or a gradient is not finite."""
        self._run_passes()
        old_logprobs_s = time.perf_counter() - self.started
        critic_s = self._compute_values()
        self.batch = replace(self.batch, tokens=self._token_columns())
        advantages = advantages_of(self.objective, self.batch)
        if self.config.critic is not None:
            self.value_targets = value_targets(self.objective, self.batch)
        if self.config.objective.shuffle_advantages:
            advantages = self._shuffled(advantages)

        total = Stats()
        drift_monitor = self._drift_monitor()
        reference_is_only_measured = self.references.wanted and not self.objective.wants_reference
        if drift_monitor and reference_is_only_measured:
            total.add(drift_monitor.reference(self.references))

        trained = _PolicyUpdates()
        if self._trains_critic_alone:
            for update in self.updates:
                total.add(self._measure_update(update, advantages))
        else:
            trained = self._train_policy(first_update, num_updates, advantages)
            for stats in trained.stats:
                total.add(stats)
        critic_began = time.perf_counter()
        if self.critic is not None:
            for stats in self._train_critic(self.critic, num_updates):
                total.add(stats)
        critic_s += time.perf_counter() - critic_began

        self._write_masks()
        if drift_monitor:
            total.add(drift_monitor.step(self.batch, advantages))
            self._write_drift(drift_monitor)
        losses, grad_norms = optimizer_step.losses_and_norms(trained.stats)
        metrics = self._metrics(total, advantages, trained)
        if self.critic is not None:
            metrics["time/critic_s"] = critic_s
        return TrainReport(
            metrics=metrics,
            normalisers=total.units,
            state=state_after(self.objective, self.batch),
            updates=len(trained.stats),
            losses=losses,
            grad_norms=grad_norms,
            tokens=self.config.batch.epochs * sum(update.num_tokens for update in self.updates),
            old_logprobs_s=old_logprobs_s,
            train_s=time.perf_counter() - self.started,
        )

    @property
    def _trains_critic_alone(self) -> bool:
        """Whether the policy stays as it is in this step."""
        return self.critic is not None and self.critic.is_warming_up(self.table.manifest.step)

    def _train_policy(
        self, first_update: int, num_updates: int, advantages: Advantages
    ) -> "_PolicyUpdates":
        """Take all optimizer steps of the policy. first_update, num_updates: as of `run`."""
        if self.critic is not None:  # its schedule begins where the critic is warm
            warmup_steps = self.critic.settings.warmup_steps
            num_updates -= warmup_steps * self.config.batch.updates_per_step
        trained = _PolicyUpdates()
        num_updates_here = self.config.batch.epochs * len(self.updates)
        for epoch in range(self.config.batch.epochs):
            self.recorded_masks.append([])
            for update in self.updates:
                number = first_update + len(trained.stats)
                rate = self.config.optimizer.rate(number, num_updates)
                if self.config.objective.ess_scaling != "none":
                    share = effective_share(self.batch, update.episodes)
                    rate *= rate_factor(self.config.objective, share)
                    trained.shares.append(share)
                self.policy.set_learning_rate(rate)
                constants = self._constants(update, advantages)
                is_last = len(trained.stats) + 1 == num_updates_here
                stats = self._train(update, constants, epoch, is_last=is_last)
                self._update_state(stats)
                trained.rates.append(rate)
                trained.stats.append(stats)
        return trained

    # --- the critic

    def _compute_values(self) -> float:
        """Let the critic compute the values of all tokens, as it is before the step; returns the
        seconds."""
        began = time.perf_counter()
        if self.critic is not None:
            self.critic.compute_values(self.prepared)
        return time.perf_counter() - began

    def _train_critic(self, critic: Critic, num_updates: int) -> list[Stats]:
        """Take an optimizer step of the critic for each one that the policy takes in a step after
        the warm-up; returns the metrics of each."""
        optimizer = critic.settings.optimizer
        first = self.table.manifest.step * self.config.batch.updates_per_step
        num_updates_here = self.config.batch.epochs * len(self.updates)
        trained = []
        for number in range(num_updates_here):
            stats = critic.train(
                self.updates[number % len(self.updates)],
                self.batch,
                self.value_targets,
                optimizer.rate(first + number, num_updates),
                self.objective.domains,
                is_last=number + 1 == num_updates_here,
            )
            trained.append(stats)
        return trained

    def _measure_update(self, update: UpdateBatch, advantages: Advantages) -> Stats:
        """Measure an update as if it were trained, which it is not; checks the engines' log-probs,
        too."""
        constants = self._constants(update, advantages)
        routing = self.source.training_pass(update, constants)
        loss = self._loss(constants, epoch=0, has_old_logprobs=True)
        stats = optimizer_step.measure_loss(self.policy, update, loss, routing)
        self._require_agreement(stats)
        self.source.finish(routing, update)
        return stats

    # --- before the first optimizer step

    def _run_passes(self) -> None:
        """Compute old log-probs, unless the first loss pass finds them, and reference ones, if they
        weigh."""
        if takes_old_pass(
            self.config,
            self.needs,
            has_routers=self.source.active,
            num_updates=self.config.batch.epochs * len(self.updates),
            is_stale=self.table.manifest.stale,
        ):
            for update in self.prepared:
                self._old_pass(update)
        if self.objective.wants_reference:
            found = self.references.logprobs(
                self.policy,
                self.prepared,
                self.objective,
                self.table.of_episodes(self.table.domain),
            )
            for update, of_update in zip(self.prepared, found, strict=True):
                for microbatch, logprobs in zip(update.microbatches, of_update, strict=True):
                    microbatch.ref_logprobs = logprobs

    def _old_pass(self, update: UpdateBatch) -> None:
        """Let the old policy, which the weights still are, compute log-probs and entropies of the
        tokens, and values where it has a head for them."""
        update.old_routing = self.source.old_pass(update.routes)
        with_squares = "squared_probs" in self.needs
        with_values = self.config.policy_has_value_head
        outputs = optimizer_step.logprob_pass(
            self.policy,
            update,
            update.old_routing,
            squared_probs=with_squares,
            values=with_values,
        )
        self.source.finish(update.old_routing, update)
        for microbatch, output in zip(update.microbatches, outputs, strict=True):
            if with_values:
                microbatch.values = output[-1]
                output = output[:-1]
            if with_squares:
                microbatch.old_squared_probs = output[-1]
                output = output[:-1]
            microbatch.old_logprobs = output[0]
            microbatch.old_untruncated_logprobs = optimizer_step.untruncated(output)
            microbatch.old_entropies = output[1]

    def _token_columns(self) -> dict[str, torch.Tensor]:
        """Return what advantages are computed from: fp32 [n] of the whole batch, equal on all
        ranks."""
        columns = {}
        if "token_ids" in self.needs:
            columns["token_ids"] = torch.from_numpy(self.table.all_policy_ids()).long()
        for name, column in _COLUMNS.items():
            if name in self.needs:
                columns[name] = self._gathered(column)
        return columns

    def _gathered(self, column: Callable[[MicroBatch], torch.Tensor]) -> torch.Tensor:
        """Return a column of all micro-batches, fp32 [n] in the table's order, on every rank."""
        values = []
        for update in self.prepared:
            values.append([column(microbatch) for microbatch in update.microbatches])
        return optimizer_step.gather_tokens(self.batch, self.prepared, values)

    def _shuffled(self, advantages: Advantages) -> Advantages:
        """Give every sample another one's advantage: the negative control."""
        order = list(range(len(advantages.values)))
        seed = f"{self.config.seed}/{self.table.manifest.step}"
        random.Random(seed).shuffle(order)
        return replace(advantages, values=advantages.values[order])

    def _drift_monitor(self) -> PolicyDriftMonitor | None:
        """Measure a share of the samples before the step is trained; None where `monitor_share` is
        0."""
        if not self.updates or self.config.objective.monitor_share == 0:
            return None
        return PolicyDriftMonitor(self.config, self.policy, self.table, self.objective)

    # --- one optimizer step

    def _constants(self, update: UpdateBatch, advantages: Advantages) -> LossConstants:
        """Return what is fixed before the first micro-batch."""
        constant_length = self.config.objective.aggregation_length
        if constant_length is None:
            constant_length = self.config.rollout.max_new_tokens
        constants = loss_constants(
            self.objective, self.batch, advantages, update.episodes, constant_length
        )
        if self.config.objective.preference_weight > 0:
            constants = with_preference(constants, self.objective, self._margins(update))
        if self.source.holds_shift and not self.is_untouched:
            constants = replace(constants, router_shift=self._router_shift(update))
        return constants

    def _train(
        self, update: UpdateBatch, constants: LossConstants, epoch: int, *, is_last: bool
    ) -> Stats:
        """Take one optimizer step. epoch: how often the batch was trained before, from 0; is_last:
        no other one follows, so that the weights are read next."""
        routing = self.source.training_pass(update, constants)
        # without a pass of the old policy, its log-probs are those of the first optimizer step
        has_old_logprobs = self.is_untouched or update.microbatches[0].old_logprobs is not None
        policy_loss = self._loss(constants, epoch, has_old_logprobs=has_old_logprobs)
        loss: optimizer_step.LossFunction = policy_loss
        with_values = self.config.policy_has_value_head
        if with_values:
            loss = self._with_value_loss(policy_loss, update)
        stats = optimizer_step.compute_gradients(
            self.policy, update, loss, routing, values=with_values
        )
        self._require_agreement(stats)
        stats = optimizer_step.apply_gradients(self.policy, stats, gather=is_last)
        self.is_untouched = False
        self.recorded_masks[epoch] += policy_loss.recorded_masks()
        self.source.finish(routing, update)
        return stats

    def _loss(
        self, constants: LossConstants, epoch: int, *, has_old_logprobs: bool
    ) -> PolicyGradientLoss:
        """Make the loss of an update. has_old_logprobs: the log-probs that the update has, or
        finds, are of the policy from before the step."""
        sampled_by_these_weights = not self.table.manifest.stale
        return PolicyGradientLoss(
            self.config,
            self.objective,
            self.table,
            constants,
            replayed_masks=self._replayed_masks_of(epoch),
            compare_engines=(
                self.config.can_verify_from_samples
                and sampled_by_these_weights
                and has_old_logprobs
            ),
        )

    def _with_value_loss(
        self, policy_loss: PolicyGradientLoss, update: UpdateBatch
    ) -> PolicyAndValueLoss:
        """Add the loss of a critic that shares the policy's layers to that of an update."""
        settings = self.config.critic
        assert settings is not None  # the policy has a value head
        value_loss = ValueLoss(
            settings,
            self.batch,
            self.value_targets,
            num_counted_tokens(update, self.batch, self.value_targets),
            self.objective.domains,
        )
        return PolicyAndValueLoss(policy_loss, value_loss, settings.loss_weight)

    def _replayed_masks_of(self, epoch: int) -> Mapping[str, torch.Tensor] | None:
        """Return the recorded masks of an epoch, bool [n] by name; None where nothing is
        replayed."""
        if self.replayed_masks is None:
            return None
        masks = {}
        for name, mask in self.replayed_masks.items():
            of_first_epoch = name.partition(_EPOCH)[0]
            if name == _mask_name(of_first_epoch, epoch):
                masks[of_first_epoch] = mask
        return masks

    def _require_agreement(self, stats: Stats) -> None:
        """Raise MismatchError, before weights change, where an engine computes something else."""
        problem = logprob_check.disagreement(self.config, self.table, stats)
        if problem and self.exact:
            raise MismatchError(
                f"in step {self.table.manifest.step}, {problem}",
                where="publish.canary_tolerance",
                remedy=logprob_check.REMEDY,
            )

    def _margins(self, update: UpdateBatch) -> torch.Tensor:
        """`sum_t log pi_theta - log pi_ref` of every sample at the current weights, over the tokens
        that are in the loss, float64 [N]."""
        routing = self.source.margin_pass(update)
        outputs = optimizer_step.logprob_pass(self.policy, update, routing)
        of_tokens = []
        if optimizer_step.is_output_rank():  # elsewhere passes found nothing
            for microbatch, output in zip(update.microbatches, outputs, strict=True):
                of_tokens.append(_away_from_reference(microbatch, output))
        gathered = optimizer_step.gather_tokens(self.batch, [update], [of_tokens])
        return self.batch.sums(gathered).double()

    def _router_shift(self, update: UpdateBatch) -> torch.Tensor:
        """Return how much the current routers agree with the old policy's, fp32 [n of the batch]; 0
        at tokens that are not of the update. Collective."""
        routing = self.source.shift_pass(update)
        optimizer_step.logprob_pass(self.policy, update, routing)
        of_tokens = self.source.router_shift(routing, update)
        return optimizer_step.gather_tokens(self.batch, [update], [of_tokens])

    def _update_state(self, stats: Stats) -> None:
        """Update what the objective learns: lambda_grpo's exponent, OPSM's thresholds."""
        state = dict(self.objective.state)
        if "lambda/gradient" in stats.means:
            gradient = float(stats.means["lambda/gradient"][0])
            exponent = self.objective.exponent - self.objective.config.lambda_lr * gradient
            state["lambda"] = min(max(exponent, -2.0), 2.0)
        for domain, distances in stats.samples.items():
            if len(distances):
                state[f"opsm_delta@{domain}"] = ratios.calibrated_delta(distances)
        self.objective = replace(self.objective, state=state)

    # --- after the last optimizer step

    @property
    def _has_masks(self) -> bool:
        """Whether this rank's losses said of any tokens whether they are clipped or rejected."""
        for of_epoch in self.recorded_masks:
            for _, masks in of_epoch:
                if masks:
                    return True
        return False

    def _write_masks(self) -> None:
        """Keep who was clipped and rejected for a replay; of ranks with the same samples, one."""
        masks = _masks_of_all_epochs(self.recorded_masks, self.table.rows_of_step)
        if not masks or self.replayed_masks is not None:
            return
        if not optimizer_step.is_output_rank():
            return
        write_masks(
            self.table.directory,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            masks,
            self.table.domain_name,
        )

    def _write_drift(self, monitor: PolicyDriftMonitor) -> None:
        """Keep what the step did to the monitored samples for reports; of ranks with the
        same samples, one, also where none of its samples is monitored."""
        if self.replayed_masks is not None:
            return
        if not optimizer_step.is_output_rank():
            return
        moved = {}
        for row, drift in monitor.moved.items():
            moved[int(self.table.rows_of_step[row])] = drift
        write_drift(
            self.table.directory,
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
            moved,
            self.table.domain_name,
        )

    def _metrics(
        self, total: Stats, advantages: Advantages, trained: "_PolicyUpdates"
    ) -> dict[str, float]:
        """Return the metrics of the step, by name."""
        metrics = derived(total.result())
        skipped = self.num_planned_updates - len(self.updates)
        metrics["batch/skipped_updates"] = float(skipped)
        metrics.update(optimizer_step.sharing_metrics(self.updates))
        metrics.update(optimizer_step.balance_metrics(self.updates))
        metrics.update(evaluate.batch_metrics(self.objective, self.batch, advantages))
        for name, value in self.objective.state.items():
            if isinstance(value, float):
                metrics[f"objective/{name}"] = value
        metrics.update(self.source.metrics())
        if self.replayed_masks is not None:
            has_masks = any(all_gathered(self._has_masks))
            metrics["replay/decisions_recorded"] = float(self.has_recorded_masks or not has_masks)
        if trained.rates:
            metrics["optimizer/lr"] = float(np.mean(trained.rates))
        if trained.shares:
            metrics["optimizer/ess_fraction"] = float(np.mean(trained.shares))
        if self.config.critic is not None:
            metrics.update(measured(self.value_targets))
        return metrics


@dataclass
class _PolicyUpdates:
    """The optimizer steps of the policy in a step; none while the critic is warmed up."""

    stats: list[Stats] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    """Learning rate of each."""
    shares: list[float] = field(default_factory=list)
    """Of its samples that is effective, where the rate goes by it."""


_EPOCH = "@epoch_"


def _mask_name(name: str, epoch: int) -> str:
    """Return what a mask is called in the store: its name, and from the second epoch on, which
    one."""
    if epoch == 0:
        return name
    return f"{name}{_EPOCH}{epoch}"


def _masks_of_all_epochs(
    recorded: Sequence[Sequence[MaskRecord]], rows_of_step: np.ndarray
) -> list[MaskRecord]:
    """Join the masks of every micro-batch, which all epochs go through in the same order.

    rows_of_step: int64 [N], as of `SampleTable`; the joined ones have these rows."""
    joined = []
    for of_epochs in zip(*recorded, strict=True):
        rows, _ = of_epochs[0]
        masks = {}
        for epoch, (_, of_epoch) in enumerate(of_epochs):
            for name, mask in of_epoch.items():
                masks[_mask_name(name, epoch)] = mask
        joined.append((rows_of_step[rows], masks))
    return joined


def _old_untruncated(microbatch: MicroBatch) -> torch.Tensor:
    """Return the old policy's log-probs over the whole vocabulary; its pass was run."""
    assert microbatch.old_untruncated_logprobs is not None
    return microbatch.old_untruncated_logprobs


def _old_sampled(microbatch: MicroBatch) -> torch.Tensor:
    """Return the old policy's log-probs over what could be sampled; its pass was run."""
    assert microbatch.old_logprobs is not None
    return microbatch.old_logprobs


def _old_entropies(microbatch: MicroBatch) -> torch.Tensor:
    """Return the old policy's entropies; its pass was run."""
    assert microbatch.old_entropies is not None
    return microbatch.old_entropies


def _old_squared_probs(microbatch: MicroBatch) -> torch.Tensor:
    """Return sums of the old policy's squared probabilities; its pass was run with them."""
    assert microbatch.old_squared_probs is not None
    return microbatch.old_squared_probs


def _rollout(microbatch: MicroBatch) -> torch.Tensor:
    """Return the engine's log-probs."""
    return microbatch.rollout_logprobs


def _reference(microbatch: MicroBatch) -> torch.Tensor:
    """Return the reference's log-probs, which the objective wants and a pass has found."""
    assert microbatch.ref_logprobs is not None
    return microbatch.ref_logprobs


def _values(microbatch: MicroBatch) -> torch.Tensor:
    """Return the critic's values, which a rule asks for where advantages need them."""
    assert microbatch.values is not None
    return microbatch.values


_COLUMNS: dict[str, Callable[[MicroBatch], torch.Tensor]] = {
    "old_logprobs": _old_untruncated,
    "sampled_logprobs": _old_sampled,
    "entropies": _old_entropies,
    "squared_probs": _old_squared_probs,
    "rollout_logprobs": _rollout,
    "ref_logprobs": _reference,
    "values": _values,
}
"""Where each token column of a `SampleBatch` is in a micro-batch. Equal on all ranks in its order,
for a column is gathered by all of them together."""


def _away_from_reference(microbatch: MicroBatch, output: torch.Tensor) -> torch.Tensor:
    """Return `log pi_theta - log pi_ref` of each token, fp32 [n]; 0 for those that are not in the
    loss. output: of the current weights, fp32 [2 or 3, n]."""
    logprobs = optimizer_step.untruncated(output)
    reference = _reference(microbatch)
    columns = [output[0], logprobs, reference, microbatch.rollout_logprobs]
    if microbatch.old_logprobs is not None:
        columns.append(microbatch.old_logprobs)
    away = ratios.log_ratio(logprobs, reference)
    return away.masked_fill(ratios.infinite_tokens(*columns), 0.0)


def _recorded_masks(table: SampleTable) -> dict[str, torch.Tensor] | None:
    """Return who was clipped or rejected when the step was first trained, bool [n] by name; None
    where it is not recorded."""
    whole = SampleTable(table.directory, verify=False)
    is_row_here = np.isin(np.arange(len(whole)), table.rows_of_step)
    is_token_here = np.repeat(is_row_here, whole.policy_lengths)
    recorded = read_masks(table.directory, whole.policy_lengths, table.domain_name)
    if recorded is None:
        return None
    found = {}
    for name, flags in recorded.items():
        found[name] = torch.from_numpy(flags[is_token_here])
    return found
