"""An objective on a small batch, by the functions that the trainer calls, in float64."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages import pipeline
from grpo_megatron.algorithms.aggregation import loss_constants, with_preference
from grpo_megatron.algorithms.batch import Advantages, SampleBatch
from grpo_megatron.algorithms.case import Case
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.ratios import calibrated_delta, infinite_tokens, log_ratio
from grpo_megatron.algorithms.stats import Stats, derived
from grpo_megatron.algorithms.step_size import effective_share, rate_factor
from grpo_megatron.config.objective import ONE_TERM_A_SEQUENCE, ObjectiveConfig
from grpo_megatron.config.passes import loss_columns
from grpo_megatron.errors import DataError


class Evaluation(NamedTuple):
    """An objective on a batch, as one optimizer step."""

    loss: float
    gradient: Tensor  # [n], by the current log-probs
    advantages: Advantages
    stats: Stats


def evaluate(
    objective: Objective,
    batch: SampleBatch,
    columns: Mapping[str, Tensor],
    *,
    advantages: Advantages | None = None,
    parts: Sequence[Tensor] | None = None,
    constant_length: int | None = None,
) -> Evaluation:
    """Return the loss and gradient of all samples as one optimizer step, in micro-batches of the
    rows `parts`.

    columns, [n]: logprobs, old_logprobs, rollout_logprobs; if needed ref_logprobs, entropies.
    advantages: instead of those of the objective; constant_length: tokens that
    `aggregation = "constant"` divides by, the longest sample's if not given. Raises DataError where
    the objective needs a column that is missing."""
    _require_columns(objective, batch, {*columns, *batch.tokens}, given=advantages is not None)
    logprobs = columns["logprobs"]
    advantages = advantages or pipeline.advantages_of(objective, batch)
    rows = pipeline.select(objective, batch).nonzero()[:, 0]
    if not constant_length:
        constant_length = max([1, *batch.token_counts.tolist()])
    constants = loss_constants(objective, batch, advantages, rows, constant_length)
    if objective.config.preference_weight > 0:
        margins = _margins(batch, columns)
        constants = with_preference(constants, objective, margins)
    gradient = torch.zeros_like(logprobs)
    stats = Stats()
    loss = 0.0
    if parts is None:
        parts = [torch.arange(len(batch))]
    for part in parts:
        index = batch.flat_index(part)
        local = {name: column[index] for name, column in columns.items()}
        leaf = local["logprobs"].clone().requires_grad_()
        loss_batch = constants.loss_batch(
            part,
            logprobs=leaf,
            old_logprobs=local["old_logprobs"],
            rollout_logprobs=local["rollout_logprobs"],
            entropies=local.get("entropies", torch.zeros_like(leaf)),
            ref_logprobs=local.get("ref_logprobs"),
        )
        piece, found = policy_loss(objective, loss_batch)
        if piece.requires_grad:
            (of_part,) = torch.autograd.grad(piece, [leaf])
            gradient[index] = of_part
        loss += float(piece.detach())
        stats.add(found)
    return Evaluation(loss, gradient, advantages, stats)


def _margins(batch: SampleBatch, columns: Mapping[str, Tensor]) -> Tensor:
    """Return `sum_t log pi_theta - log pi_ref` of every sample, over the tokens that are in the
    loss, [N]."""
    names = ("logprobs", "old_logprobs", "rollout_logprobs", "ref_logprobs")
    infinite = infinite_tokens(*[columns[name] for name in names])
    away = log_ratio(columns["logprobs"], columns["ref_logprobs"])
    return batch.sums(away.masked_fill(infinite, 0.0))


def evaluate_case(objective: Objective, case: Case) -> dict[str, Any]:
    """Return what `objective eval` prints: loss, its gradient by log-probs, advantages, metrics.

    Raises DataError where the case lacks what the objective reads, or has what it cannot use."""
    if case.advantages is None:
        _require_plain_dropped_rewards(objective.config, case)
    else:
        _require_use_of_given_advantages(objective.config, case, case.advantages)
    batch = case.batch.without_truncated(case.truncated, objective.config.overlong)
    found = evaluate(
        objective,
        batch,
        case.columns,
        advantages=case.advantages,
        constant_length=objective.config.aggregation_length,
    )
    metrics = derived(found.stats.result())
    for domain, distances in found.stats.kept_samples().items():
        metrics[f"opsm/calibrated_delta@{domain}"] = calibrated_delta(distances)
    metrics |= batch_metrics(objective, batch, found.advantages)
    if objective.config.ess_scaling != "none":
        rows = pipeline.select(objective, batch).nonzero()[:, 0]
        share = effective_share(batch, rows)
        metrics["optimizer/ess_fraction"] = share
        metrics["optimizer/lr_factor"] = rate_factor(objective.config, share)
    advantages: list[Any] = found.advantages.values.tolist()
    if found.advantages.per_token:
        advantages = _ragged(found.advantages.values, case)
    numbers: dict[str, float | None] = {}
    for name, value in metrics.items():
        numbers[name] = value
        if math.isnan(value):  # of which JSON has no word
            numbers[name] = None
    return {
        "loss": found.loss,
        "grad_logprobs": _ragged(found.gradient, case),
        "advantages": advantages,
        "metrics": numbers,
    }


def batch_metrics(
    objective: Objective, batch: SampleBatch, advantages: Advantages
) -> dict[str, float]:
    """Return counts and advantages of the whole batch, and by domain where there are several."""
    per_sample = advantages.values
    if advantages.per_token:
        per_sample = batch.means(per_sample)
    per_sample = per_sample.double()
    trained = pipeline.select(objective, batch)

    def of(rows: Tensor) -> dict[str, float]:
        values = per_sample[rows]
        if not len(values):
            values = torch.zeros(1)
        return {
            "advantage/mean": float(values.mean()),
            "advantage/std": float(values.std(correction=0)),
            "advantage/zero_fraction": float((values == 0).double().mean()),
            "batch/unscorable": float((~batch.valid[rows]).sum()),
            "batch/not_trained": float((~trained[rows]).sum()),
            "batch/empty_responses": float((batch.token_counts[rows] == 0).sum()),
        }

    metrics = of(torch.ones(len(batch), dtype=torch.bool))
    if len(objective.domains) == 1:
        return metrics
    for number, name in enumerate(objective.domains):
        for key, value in of(batch.domains == number).items():
            metrics[f"{key}@{name}"] = value
    return metrics


def _require_columns(
    objective: Objective, batch: SampleBatch, there: set[str], *, given: bool
) -> None:
    o = objective.config
    needed = set(loss_columns(o))
    if not given:
        needed |= pipeline.needed_columns(o, weighs_kl=objective.weighs_kl)
        if o.advantage == "components" and not batch.components:
            needed.add("components")
    if objective.wants_reference:
        needed.add("ref_logprobs")
    if any(objective.by_domain("entropy_weight")):
        needed.add("entropies")
    missing = sorted(needed - there)
    if missing:
        raise DataError(
            f"{missing[0]} is missing",
            where="case",
            remedy=f"objective {o.preset} needs {', '.join(missing)}",
        )


def _require_plain_dropped_rewards(o: ObjectiveConfig, case: Case) -> None:
    """Raise DataError, as rules do in training, for shaped rewards beside dropped ones."""
    counts_dropped = o.advantage_std == "batch_raw" and case.batch.dropped is not None
    if not counts_dropped or o.reward_shaping == "none":
        return
    raise DataError(
        "dropped_rewards are not shaped, and the deviation of all rewards (advantage_std = "
        f'"batch_raw") would mix them with those that reward_shaping = "{o.reward_shaping}" makes',
        where="case",
        remedy="leave dropped_rewards out, set reward_shaping to none, or divide by another "
        "deviation",
    )


_OF_COMPUTED_ADVANTAGES = ("reward_shaping", "whiten", "shaping", "advantage_clip")
"""Settings by which the objective makes advantages, which given ones replace."""


def _require_use_of_given_advantages(
    o: ObjectiveConfig, case: Case, advantages: Advantages
) -> None:
    """Raise DataError for settings that would do nothing, or something else, beside advantages that
    the case gives itself."""
    if advantages.per_token and o.ratio in ONE_TERM_A_SEQUENCE:
        raise DataError(
            f"advantages differ from token to token, one {o.ratio} ratio cannot carry them",
            where="case",
            remedy="give one advantage per sample, or set ratio to sequence_token or token",
        )
    replaced = [name for name in _OF_COMPUTED_ADVANTAGES if o.sets(name)]
    if o.kl == "reward_k1":
        replaced += [name for name in ("kl", "kl_beta") if o.sets(name)]
    if replaced:
        raise DataError(
            f"advantages are used as the case gives them: {', '.join(replaced)} would do nothing",
            where="case",
            remedy="give rewards in place of advantages, or leave the setting out",
        )
    for reader in _readers_of_rewards(o, knows_correct=case.batch.correct is not None):
        if not case.has_rewards:
            raise DataError(
                f"{reader} reads rewards, and the case gives advantages alone",
                where="case",
                remedy="give rewards too: advantages stay those of the case",
            )


def _readers_of_rewards(o: ObjectiveConfig, *, knows_correct: bool) -> list[str]:
    """Return what reads rewards beside the advantages. knows_correct: the case has `correct`."""
    readers = []
    if o.subset in ("token_efficiency", "adaptive"):
        readers.append(f'subset = "{o.subset}"')
    if o.positive_nll_weight > 0 and not knows_correct:
        readers.append("positive_nll_weight")
    if o.preference_weight > 0:
        readers.append("preference_weight")
    return readers


def _ragged(values: Tensor, case: Case) -> list[list[float]]:
    """Flat policy tokens back to all tokens; 0 where the mask is 0."""
    numbers = iter(values.tolist())
    rows = []
    for mask in case.mask:
        row = [0.0] * len(mask)
        for place, is_policy_token in enumerate(mask):
            if is_policy_token:
                row[place] = next(numbers)
        rows.append(row)
    return rows
