"""Training on preferences: pairs of answers, answers with labels, or with labels of their steps
(`algorithms.preferences`).

A step is recorded like one of RL: a group is a prompt with two answers, whose rewards say which one
is chosen. Both answers of a pair are one episode, so that they share a micro-batch and the loss of
the pair is exact there; the loss of the step is the mean over its pairs, whatever the layout.
The reference's log-probs are the component `REFERENCE` of the step."""

import time

import numpy as np
import torch

from grpo_megatron.algorithms.preferences import (
    MARGIN,
    REFERENCE,
    kto_baseline,
    labelled_losses,
    pair_losses,
)
from grpo_megatron.algorithms.stats import MetricRecorder, Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device
from grpo_megatron.errors import MismatchError
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.requests import TrainReport
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.steps.answer_scores import (
    answer_scores,
    policy_values,
    row_sums,
)
from grpo_megatron.trainer.steps.microbatch import MicroBatch
from grpo_megatron.trainer.steps.optimizer_step import (
    LossFunction,
    apply_gradients,
    compute_gradients,
    losses_and_norms,
    prepare,
    sharing_metrics,
)
from grpo_megatron.trainer.steps.references import add_nothing
from grpo_megatron.trainer.steps.step_labels import StepLossFunction

_GAP = "preference/reference_gap"
_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1}
"""Mean difference of the log-prob of a token that other packing may explain."""


class PreferenceLossFunction:
    """A `LossFunction`: the mean loss over the pairs, or the labelled answers, of an optimizer
    step, of which this micro-batch has some.

    rows: of the table, those of the step; baseline: KTO's, else 0."""

    def __init__(self, config: RunConfig, table: SampleTable, rows: np.ndarray, baseline: float):
        self._config = config
        self._settings = config.preferences
        self._table = table
        self._baseline = baseline
        self._domains = [domain.name for domain in config.domains]
        self._num_items = len(np.unique(table.episode[rows]))
        chosen = rows[table.reward[rows] == 1]
        self._num_chosen_tokens = max(int(table.policy_lengths[chosen].sum()), 1)

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [2 or 3, n]."""
        rows = microbatch.table_rows
        values = policy_values(self._config, self._table, microbatch, output)
        sums = row_sums(self._table, microbatch, values)
        scores = self._scores(rows, sums)
        items = rows
        if self._settings.is_paired:
            items = rows[0::2]
        domain = to_device(torch.from_numpy(self._table.domain[items]), sums.device)
        meter = MetricRecorder(domain, domain, self._domains)
        if self._settings.is_paired:
            margins = self._margins(items, sums.device)
            losses = pair_losses(self._settings, scores[0::2], scores[1::2], margins)
            _measure_pairs(meter, self._settings, scores.detach(), sums.detach())
        else:
            labels = to_device(torch.from_numpy(self._table.reward[rows] == 1), sums.device)
            baseline = scores.new_tensor(self._baseline)
            losses = labelled_losses(self._settings, scores, labels, baseline)
            _measure_labels(meter, self._settings, scores.detach(), labels, self._baseline)
        meter.set_mean("preference/loss", losses, "samples")
        loss = losses.sum() / self._num_items
        if self._settings.loss == "orpo":
            nll = -sums[0::2].sum() / self._num_chosen_tokens
            meter.stats.set_mean("loss/nll", nll, 0.0, "sum")
            loss = loss + nll
        self._measure_gap(meter.stats, rows, sums.detach())
        return loss.float(), meter.stats

    def _scores(self, rows: np.ndarray, sums: torch.Tensor) -> torch.Tensor:
        """Return sums or means of log-probs, less those of the reference; float64 [R]."""
        scores = sums
        if self._settings.has_reference:
            reference = torch.from_numpy(self._table.components[REFERENCE][rows])
            scores = scores - to_device(reference, sums.device)
        if self._settings.takes_means:
            lengths = torch.from_numpy(self._table.policy_lengths[rows]).double()
            scores = scores / to_device(lengths, sums.device)
        return scores

    def _margins(self, items: np.ndarray, where: torch.device) -> torch.Tensor | float:
        """Return the margins of pairs, [P]; 0 where they do not count."""
        if not self._settings.use_margins:
            return 0.0
        return to_device(torch.from_numpy(self._table.components[MARGIN][items]), where)

    def _measure_gap(self, stats: Stats, rows: np.ndarray, sums: torch.Tensor) -> None:
        """How far policy and reference are apart on a token: 0 before the first step."""
        if not self._settings.has_reference:
            return
        reference = torch.from_numpy(self._table.components[REFERENCE][rows])
        gap = (sums - to_device(reference, sums.device)).abs().sum()
        stats.set_mean(_GAP, gap, float(self._table.policy_lengths[rows].sum()), "tokens")


def _measure_pairs(
    meter: MetricRecorder, settings: PreferencesConfig, scores: torch.Tensor, sums: torch.Tensor
) -> None:
    """Implicit rewards, beta times the scores, and log-probs. scores, sums: float64 [2 P]."""
    chosen = settings.reward_scale * scores[0::2]
    rejected = settings.reward_scale * scores[1::2]
    meter.set_mean("preference/reward_chosen", chosen, "samples")
    meter.set_mean("preference/reward_rejected", rejected, "samples")
    meter.set_mean("preference/margin", chosen - rejected, "samples")
    meter.set_mean("preference/accuracy", (chosen > rejected).double(), "samples")
    if settings.loss == "bradley_terry":
        return  # its scores are no log-probs
    meter.set_mean("preference/logprob_chosen", sums[0::2], "samples")
    meter.set_mean("preference/logprob_rejected", sums[1::2], "samples")


def _measure_labels(
    meter: MetricRecorder,
    settings: PreferencesConfig,
    scores: torch.Tensor,
    labels: torch.Tensor,
    baseline: float,
) -> None:
    """Implicit rewards by label. scores: float64 [R]; labels: bool [R]."""
    rewards = settings.beta * scores
    meter.set_mean("preference/reward_chosen", rewards, "samples", where=labels)
    meter.set_mean("preference/reward_rejected", rewards, "samples", where=~labels)
    is_right = (scores > baseline) == labels
    meter.set_mean("preference/accuracy", is_right.double(), "samples")


def train_preferences(
    config: RunConfig, policy: Policy, table: SampleTable, first_update: int, num_updates: int
) -> TrainReport:
    """Take one optimizer step for each update of `table`. Collective.

    Raises MismatchError where the first step shows that the recorded log-probs of the reference are
    of another model."""
    started = time.perf_counter()
    passes_s = 0.0
    total = Stats()
    by_update = []
    updates = []
    rate = 0.0
    source = RouteSource(config, policy.replay, table)
    has_baseline = config.preferences.loss == "kto"
    for number in range(int(table.update.max(initial=-1)) + 1):
        is_here = table.update == number
        baseline = 0.0
        if has_baseline:
            before = time.perf_counter()
            baseline = _baseline(config, policy, table, np.flatnonzero(is_here))
            passes_s += time.perf_counter() - before
        rows = np.flatnonzero(is_here & ~np.isnan(table.reward))
        update = prepare(config.trainer, table, rows)
        loss = _loss_function(config, table, rows, baseline)
        rate = config.optimizer.rate(first_update + number, num_updates)
        policy.set_learning_rate(rate)
        stats = compute_gradients(policy, update, loss, source.margin_pass(update))
        if first_update + number == 0:
            _require_same_reference(config, policy, stats)
        stats = apply_gradients(policy, stats)
        if has_baseline:
            stats.set_mean("preference/baseline", torch.tensor(baseline), 1.0, "update")
        by_update.append(stats)
        total.add(stats)
        updates.append(update)
    losses, grad_norms = losses_and_norms(by_update)
    return TrainReport(
        metrics={**total.result(), **sharing_metrics(updates), "optimizer/lr": rate},
        normalisers=total.units,
        state={},
        updates=len(by_update),
        losses=losses,
        grad_norms=grad_norms,
        tokens=sum(update.num_tokens for update in updates),
        old_logprobs_s=passes_s,
        train_s=time.perf_counter() - started,
    )


def _loss_function(
    config: RunConfig, table: SampleTable, rows: np.ndarray, baseline: float
) -> LossFunction:
    if config.preferences.rows == "steps":
        return StepLossFunction(config, table, rows)
    return PreferenceLossFunction(config, table, rows, baseline)


def _baseline(config: RunConfig, policy: Policy, table: SampleTable, rows: np.ndarray) -> float:
    """Compute KTO's z of an optimizer step, from the answers to other prompts among its rows."""
    others = rows[np.isnan(table.reward[rows])]
    scores = answer_scores(config, policy, table, others)[others]
    scores -= table.components[REFERENCE][others]
    return float(kto_baseline(torch.from_numpy(scores)))


def _require_same_reference(config: RunConfig, policy: Policy, stats: Stats) -> None:
    """Before the first step the policy is its own reference, unless the recipe names another, or
    names one beside adapters that were trained before. Collective."""
    settings = config.preferences
    if not settings.has_reference or not config.begins_as_reference:
        return
    # asked of the policy: where a checkpoint has the adapters, no setting names them any more
    if settings.reference is not None and not add_nothing(policy):
        return
    gap = stats.result()[_GAP]
    if gap > _TOLERANCE[config.trainer.precision]:
        raise MismatchError(
            f"before the first step, log-probs of policy and reference differ by {gap:.3g} a "
            "token, and both are the model that the run began with",
            where="reference/",
            remedy="remove the folder reference/ of the run; its log-probs are computed anew",
        )
