"""Training whose loss is a mean over tokens without rewards: supervised, and distillation.

Distillation (MiniLLM, arXiv:2306.08543; on-policy: GKD, arXiv:2306.13649; several teachers, one for
each domain: DeepSeek-V4) goes by the student's own samples or by a fixed data set. `sampled` is the
policy gradient with `log q - log p` of the sampled tokens as advantages, weighed by IcePop."""

from typing import Any

import numpy as np
import torch

from grpo_megatron.algorithms.stats import Meter, Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig
from grpo_megatron.errors import TrainerError
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.route_source import RouteSource
from grpo_megatron.trainer.step import Update, prepare, train_step
from grpo_megatron.trainer.teachers import Teachers


def train_tokens(config: RunConfig, policy: Policy, table: SampleTable, optimizer: OptimizerConfig,
                 first_update: int, num_updates: int, teachers: Teachers | None = None,
                 ) -> dict[str, Any]:
    """One optimizer step for each update of `table`; all completion tokens weigh the same. Without
    `teachers` the loss is the negative log-likelihood. Returns what `Training.run` does."""
    total, tokens, by_update = Stats(), 0, []
    source = RouteSource(config, policy.replay, table)
    for update in range(int(table.update.max(initial=-1)) + 1):
        rows = np.flatnonzero(table.update == update)
        batch = prepare(config.trainer, table, rows)
        if teachers is not None:
            teachers.look_at(policy, batch, table, rows)
        weight = 1.0 / max(int(table.completion_lengths[rows].sum()), 1)

        def loss(part: MicroBatch, output: torch.Tensor, weight=weight):
            if teachers is None:
                stats, total_nll = Stats(), -output[0].sum()
                stats.mean("loss/nll", total_nll, float(output.size(1)))
                return weight * total_nll, stats
            domain = torch.from_numpy(table.domain[part.table_rows]).to(output.device)
            meter = Meter(domain[part.sample], domain, [d.name for d in config.domains])
            return _distillation_loss(config, part, output, weight, meter), meter.stats

        rate = optimizer.rate(first_update + update, num_updates)
        policy.set_learning_rate(rate)
        stats = train_step(policy, batch, loss, source.margin_pass(Update(torch.from_numpy(rows),
            batch, routes=source.from_store(batch) if table.route_shapes else None)))
        by_update.append(stats.result())
        total.add(stats)
        tokens += batch.num_tokens
    metrics = {**total.result(), **source.metrics(), "optimizer/lr": rate}
    return {"metrics": metrics, "normalisers": total.units, "state": {}, "updates": len(by_update),
            "losses": [found["loss/value"] for found in by_update],
            "grad_norms": [found["grad/norm"] for found in by_update], "tokens": tokens,
            "old_logprobs_s": 0.0}


def _distillation_loss(config: RunConfig, part: MicroBatch, output: torch.Tensor, weight: float,
                       meter: Meter) -> torch.Tensor:
    if not part.teachers:  # the last row of the output would be another quantity
        raise TrainerError("these samples have no teacher", where="distillation.teachers")
    logprobs, entropies = output[:2].unbind(0)
    gap = logprobs.detach() - part.rollout_logprobs
    meter.mean("policy/entropy", entropies)
    known = torch.isfinite(gap)
    if config.distillation.samples == "policy":
        meter.mean("mismatch/abs_mean", gap.abs(), where=known)
    if config.distillation.mode != "sampled":
        meter.mean("distillation/kl", output[-1])
        return weight * output[-1].sum()
    advantages = torch.zeros_like(gap)
    for teacher in part.teachers:
        advantages.index_add_(0, teacher.rows, teacher.weight * (
            teacher.logprobs - logprobs.detach()[teacher.rows]))
    o, ratio = config.objective, gap.exp()
    inside = known & (ratio >= o.mismatch_min) & (ratio <= o.mismatch_max)
    meter.mean("distillation/kl", -advantages)
    meter.mean("mismatch/rejected", (~inside).float())
    return -weight * (torch.where(inside, ratio * advantages, 0.0) * logprobs).sum()
