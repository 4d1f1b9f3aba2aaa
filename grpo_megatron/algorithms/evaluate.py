"""An objective on a small batch, by the functions that the trainer calls, in float64."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grpo_megatron.algorithms.advantages import pipeline
from grpo_megatron.algorithms.advantages.pipeline import Advantages
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.case import Case
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.ratios import calibrated_delta, log_ratio
from grpo_megatron.algorithms.stats import Stats, derived
from grpo_megatron.algorithms.step_terms import step_terms
from grpo_megatron.errors import DataError


class Evaluation(NamedTuple):
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
    """Loss and gradient of all samples as one optimizer step, in micro-batches of the rows `parts`.
    columns, [n]: logprobs, old_logprobs, rollout_logprobs; if needed ref_logprobs, entropies."""
    _require_columns(objective, batch, {*columns, *batch.tokens}, given=advantages is not None)
    logprobs = columns["logprobs"]
    advantages = advantages or pipeline.advantages_of(objective, batch)
    rows = pipeline.select(objective, batch).nonzero()[:, 0]
    longest = int(batch.token_counts.max()) if len(batch) else 1
    terms = step_terms(objective, batch, advantages, rows, constant_length or max(longest, 1))
    if objective.config.preference_weight > 0:
        margins = batch.sums(log_ratio(logprobs, columns["ref_logprobs"]))
        terms = terms.with_margins(objective, margins)
    gradient = torch.zeros_like(logprobs)
    stats = Stats()
    loss = 0.0
    for part in [torch.arange(len(batch))] if parts is None else parts:
        index = batch.flat_index(part)
        local = {name: column[index] for name, column in columns.items()}
        leaf = local["logprobs"].clone().requires_grad_()
        piece, found = policy_loss(
            objective,
            terms.loss_batch(
                part,
                leaf,
                local["old_logprobs"],
                local["rollout_logprobs"],
                local.get("entropies", torch.zeros_like(leaf)),
                local.get("ref_logprobs"),
            ),
        )
        if piece.requires_grad:
            (of_part,) = torch.autograd.grad(piece, [leaf])
            gradient[index] = of_part
        loss += float(piece.detach())
        stats.add(found)
    return Evaluation(loss, gradient, advantages, stats)


def evaluate_case(objective: Objective, case: Case) -> dict[str, Any]:
    """What `objective eval` prints."""
    batch = case.batch.without_truncated(case.truncated, objective.config.overlong)
    found = evaluate(
        objective,
        batch,
        case.columns,
        advantages=case.advantages,
        constant_length=objective.config.aggregation_length,
    )
    metrics = derived(found.stats.result())
    for domain, distances in found.stats.samples.items():
        metrics[f"opsm/calibrated_delta@{domain}"] = calibrated_delta(distances)
    metrics |= batch_metrics(objective, batch, found.advantages)
    values = found.advantages.values
    per_token = found.advantages.per_token
    return {
        "loss": found.loss,
        "grad_logprobs": _ragged(found.gradient, case),
        "advantages": _ragged(values, case) if per_token else values.tolist(),
        "metrics": {n: value if value == value else None for n, value in metrics.items()},
    }


def batch_metrics(
    objective: Objective, batch: SampleBatch, advantages: Advantages
) -> dict[str, float]:
    """Counts and advantages of the whole batch, and by domain where there are several."""
    per_sample = (
        batch.means(advantages.values) if advantages.per_token else advantages.values
    ).double()
    trained = pipeline.select(objective, batch)

    def of(rows: Tensor) -> dict[str, float]:
        values = per_sample[rows] if rows.any() else torch.zeros(1)
        return {
            "advantage/mean": float(values.mean()),
            "advantage/std": float(values.std(correction=0)),
            "advantage/zero_fraction": float((values == 0).double().mean()),
            "batch/unscorable": float((~batch.valid[rows]).sum()),
            "batch/not_trained": float((~trained[rows]).sum()),
            "batch/empty_responses": float((batch.token_counts[rows] == 0).sum()),
        }

    metrics = of(torch.ones(len(batch), dtype=torch.bool))
    for number, name in enumerate(objective.domains if len(objective.domains) > 1 else ()):
        metrics |= {f"{key}@{name}": value for key, value in of(batch.domains == number).items()}
    return metrics


def _require_columns(
    objective: Objective, batch: SampleBatch, there: set[str], *, given: bool
) -> None:
    o = objective.config
    needed: set[str] = set()
    if not given:
        needed |= pipeline.needed_columns(o, weighs_kl=objective.weighs_kl)
        if o.advantage == "components" and not batch.components:
            needed.add("components")
    if objective.wants_reference:
        needed.add("ref_logprobs")
    if any(objective.by_domain("entropy_weight")):
        needed.add("entropies")
    if missing := sorted(needed - there):
        raise DataError(
            f"{missing[0]} is missing",
            where="case",
            remedy=f"objective {o.preset} needs {', '.join(missing)}",
        )


def _ragged(values: Tensor, case: Case) -> list[list[float]]:
    """Flat policy tokens back to all tokens; 0 where the mask is 0."""
    numbers = iter(values.tolist())
    rows = []
    for mask in case.mask:
        row = []
        for is_policy_token in mask:
            row.append(next(numbers) if is_policy_token else 0.0)
        rows.append(row)
    return rows
