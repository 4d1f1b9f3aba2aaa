"""Training a process reward model: answers whose steps have labels.

A recorded answer has a turn of one token for each step, whose reward is the step's label
(`data.step_rows`); the model's scalar there is the logit of "this step is right"."""

import numpy as np
import torch

from grpo_megatron.algorithms.preferences import step_losses
from grpo_megatron.algorithms.stats import MetricRecorder, Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.megatron.process_groups import summed
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.microbatch import MicroBatch


class StepLossFunction:
    """A `LossFunction`: the mean loss over the steps of an optimizer step's answers, of which this
    micro-batch has some.

    rows: of the table, those of the optimizer step."""

    def __init__(self, config: RunConfig, table: SampleTable, rows: np.ndarray):
        self._table = table
        self._domains = [domain.name for domain in config.domains]
        self._num_steps = int(table.policy_lengths[rows].sum())

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [2, n], the logits first."""
        logits = output[0]
        rows = microbatch.table_rows
        labels = to_device(torch.from_numpy(_labels(self._table, rows)), logits.device)
        losses = step_losses(logits.double(), labels)
        domains = self._table.domain[rows]
        of_steps = np.repeat(domains, self._table.policy_lengths[rows])
        meter = MetricRecorder(
            to_device(torch.from_numpy(of_steps), logits.device),
            to_device(torch.from_numpy(domains), logits.device),
            self._domains,
        )
        is_right = labels > 0.5
        meter.set_mean("preference/loss", losses)
        meter.set_mean("preference/accuracy", ((logits > 0) == is_right).double())
        meter.set_mean("preference/reward_chosen", logits, where=is_right)
        meter.set_mean("preference/reward_rejected", logits, where=~is_right)
        return (losses.sum() / self._num_steps).float(), meter.stats


def _labels(table: SampleTable, rows: np.ndarray) -> np.ndarray:
    """Return the labels of all steps of rows, one row after another; float64 [n]."""
    labels: list[float] = []
    for row in rows.tolist():
        labels += [turn.reward for turn in table.turns(row)]
    return np.array(labels, np.float64)


def step_logits(config: RunConfig, policy: Policy, table: SampleTable) -> list[list[float]]:
    """Return the logits of the steps of every row; equal on all ranks. Collective."""
    update = optimizer_step.prepare(config.trainer, table, np.arange(len(table)))
    source = RouteSource(config, policy.replay, table)
    outputs = optimizer_step.logprob_pass(policy, update, source.margin_pass(update))
    ends = np.cumsum(table.policy_lengths)
    starts = ends - table.policy_lengths
    found = torch.zeros(int(ends[-1]), dtype=torch.float64)
    if optimizer_step.is_output_rank():
        for microbatch, output in zip(update.microbatches, outputs, strict=True):
            rows = microbatch.table_rows
            of_rows = output[0].double().cpu().split(table.policy_lengths[rows].tolist())
            for row, logits in zip(rows.tolist(), of_rows, strict=True):
                found[starts[row] : ends[row]] = logits
    values = summed(found).tolist()
    return [values[start:end] for start, end in zip(starts, ends, strict=True)]
