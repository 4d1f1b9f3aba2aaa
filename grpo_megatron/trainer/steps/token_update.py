"""Training whose loss is a mean over tokens without rewards: supervised, and distillation.

Distillation (MiniLLM, arXiv:2306.08543; on-policy: GKD, arXiv:2306.13649; several teachers, one for
each domain: DeepSeek-V4) goes by the student's own samples or by a fixed data set. `sampled` is the
policy gradient with `log q - log p` of the sampled tokens as advantages, weighed by IcePop."""

import numpy as np
import torch

from grpo_megatron.algorithms.stats import MetricRecorder, Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig
from grpo_megatron.device_copies import to_device
from grpo_megatron.errors import TrainerError
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.requests import TrainReport
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import (
    losses_and_norms,
    prepare,
    sharing_metrics,
    train_step,
    untruncated,
)
from grpo_megatron.trainer.steps.teachers import Teachers


class TokenLoss:
    """A `LossFunction` in which every policy token has the weight `weight`, and 0 if it is
    of a spoilt turn or too old.

    Without teachers it is the negative log-likelihood, else the divergence from them."""

    def __init__(self, config: RunConfig, table: SampleTable, weight: float, *, distils: bool):
        self.config = config
        self.table = table
        self.weight = weight
        self.distils = distils
        self.domains = [domain.name for domain in config.domains]

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [2 to 4, n].

        Raises TrainerError where samples of a distillation have no teacher."""
        weights = self._weights(microbatch, output.device)
        if not self.distils:
            return _likelihood_loss(output, weights)
        of_samples = self.table.of_episodes(self.table.domain)[microbatch.episodes]
        domain = torch.from_numpy(of_samples)
        domain = to_device(domain, output.device)
        meter = MetricRecorder(domain[microbatch.sample], domain, self.domains)
        loss = _distillation_loss(self.config, microbatch, output, weights, meter)
        return loss, meter.stats

    def _weights(self, microbatch: MicroBatch, where: torch.device) -> float | torch.Tensor:
        """Return the weight of each token, [n]; a number where all weigh the same."""
        without_loss = self.table.without_loss(microbatch.table_rows)
        if without_loss is None:
            return self.weight
        weights = np.where(without_loss, 0.0, self.weight)
        return to_device(torch.from_numpy(weights).float(), where)


def _likelihood_loss(
    output: torch.Tensor, weights: float | torch.Tensor
) -> tuple[torch.Tensor, Stats]:
    """Return the weighted sum of `-log p` over the recorded completions' tokens."""
    stats = Stats()
    total_nll = -output[0].sum()
    stats.set_mean("loss/nll", total_nll, float(output.size(1)))
    return -_weighted_sum(weights, output[0]), stats


def train_tokens(
    config: RunConfig,
    policy: Policy,
    table: SampleTable,
    optimizer: OptimizerConfig,
    first_update: int,
    num_updates: int,
    teachers: Teachers | None = None,
) -> TrainReport:
    """Take one optimizer step for each update of `table`; all policy tokens weigh the same.

    Without `teachers` the loss is the negative log-likelihood. Collective."""
    total = Stats()
    by_update = []
    updates: list[UpdateBatch] = []
    source = RouteSource(config, policy.replay, table)
    for number in range(int(table.update.max(initial=-1)) + 1):
        rows = np.flatnonzero(table.update == number)
        update = prepare(config.trainer, table, rows)
        if teachers is not None:
            teachers.compute_targets(policy, update, table)
        if table.route_shapes:
            update.routes = source.from_store(update)
        num_policy_tokens = int(table.policy_lengths[rows].sum())
        weight = 1.0 / max(num_policy_tokens, 1)
        loss = TokenLoss(config, table, weight, distils=teachers is not None)
        rate = optimizer.rate(first_update + number, num_updates)
        policy.set_learning_rate(rate)
        routing = source.token_pass(update)
        stats = train_step(policy, update, loss, routing)
        source.finish(routing, update)
        by_update.append(stats)
        total.add(stats)
        updates.append(update)
    losses, grad_norms = losses_and_norms(by_update)
    return TrainReport(
        metrics={
            **total.result(),
            **source.metrics(),
            **sharing_metrics(updates),
            "optimizer/lr": rate,
        },
        normalisers=total.units,
        state={},
        updates=len(by_update),
        losses=losses,
        grad_norms=grad_norms,
        tokens=sum(update.num_tokens for update in updates),
    )


def _distillation_loss(
    config: RunConfig,
    microbatch: MicroBatch,
    output: torch.Tensor,
    weights: float | torch.Tensor,
    meter: MetricRecorder,
) -> torch.Tensor:
    """Return the divergence of the policy from the micro-batch's teachers, by the weights of its
    tokens."""
    settings = config.distillation
    if settings is None or not microbatch.teachers:  # the output's last row is another quantity
        raise TrainerError("these samples have no teacher", where="distillation.teachers")
    logprobs, entropies = output[:2].unbind(0)
    log_rho = logprobs.detach() - microbatch.rollout_logprobs
    is_known = torch.isfinite(log_rho)
    meter.set_mean("policy/entropy", entropies)
    if settings.samples == "policy":
        meter.set_mean("mismatch/abs_mean", log_rho.abs(), where=is_known)
    if settings.mode != "sampled":
        divergences = output[-1]
        meter.set_mean("distillation/kl", divergences)
        return _weighted_sum(weights, divergences)
    # as the teachers' are; only ratios and the surrogate are over what sampling kept
    advantages = _teacher_advantages(microbatch, untruncated(output).detach())
    rho = log_rho.exp()
    is_inside = rho >= config.objective.mismatch_min
    is_inside &= rho <= config.objective.mismatch_max
    is_inside &= is_known
    meter.set_mean("distillation/kl", -advantages)
    meter.set_mean("mismatch/rejected", (~is_inside).float())
    corrected = torch.where(is_inside, rho * advantages, 0.0)
    return -_weighted_sum(weights, corrected * logprobs)


def _weighted_sum(weights: float | torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum over tokens; a factor that all share stands before the sum."""
    if isinstance(weights, float):
        return weights * values.sum()
    return (weights * values).sum()


def _teacher_advantages(microbatch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
    """`log q - log p` of the sampled tokens, over teachers by weight, [n]. logprobs: over the whole
    vocabulary, [n]."""
    advantages = torch.zeros_like(logprobs)
    for teacher in microbatch.teachers:
        assert teacher.logprobs is not None  # mode "sampled"
        gain = teacher.logprobs - logprobs[teacher.rows]
        advantages.index_add_(0, teacher.rows, teacher.weight * gain)
    return advantages
