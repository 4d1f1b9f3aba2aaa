"""What a policy thinks of whole answers: sums of the log-probs of their tokens."""

import numpy as np
import torch

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.megatron.process_groups import summed
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch


def policy_values(
    config: RunConfig, table: SampleTable, microbatch: MicroBatch, output: torch.Tensor
) -> torch.Tensor:
    """Return what the model says of every policy token, fp32 [n]: its log-prob over the whole
    vocabulary, or of a reward model the scalar by which its row is compared."""
    if not config.reward_labels:
        return optimizer_step.untruncated(output)
    rows = microbatch.table_rows
    of_tokens = np.repeat(table.domain[rows], table.policy_lengths[rows]).astype(np.int64)
    chosen = to_device(torch.from_numpy(of_tokens), output.device)
    return output.gather(0, chosen[None]).squeeze(0)


def row_sums(table: SampleTable, microbatch: MicroBatch, values: torch.Tensor) -> torch.Tensor:
    """Return sums of `values`, [n], over the tokens of each row of the micro-batch, float64 [R]: in
    the order of `MicroBatch.table_rows`, with gradient."""
    lengths = table.policy_lengths[microbatch.table_rows]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    index = to_device(torch.from_numpy(rows), values.device)
    sums = torch.zeros(len(lengths), dtype=torch.float64, device=values.device)
    return sums.index_add(0, index, values.double())


def answer_scores(
    config: RunConfig, policy: Policy, table: SampleTable, rows: np.ndarray | None = None
) -> np.ndarray:
    """Return sums of log-probs of the answers in `rows` (int64, ascending), or of all, float64 [N]
    by row of the table, 0 for others; equal on all ranks. Collective."""
    if rows is None:
        rows = np.arange(len(table))
    update = optimizer_step.prepare(config.trainer, table, rows)
    return scores_of(config, policy, table, update)


def scores_of(
    config: RunConfig, policy: Policy, table: SampleTable, update: UpdateBatch
) -> np.ndarray:
    """Return sums of log-probs of the answers of an update whose micro-batches are planned, float64
    [N] by row of the table, 0 for others; equal on all ranks. Collective."""
    source = RouteSource(config, policy.replay, table)
    outputs = optimizer_step.logprob_pass(policy, update, source.margin_pass(update))
    found = torch.zeros(len(table), dtype=torch.float64)
    if optimizer_step.is_output_rank():
        for microbatch, output in zip(update.microbatches, outputs, strict=True):
            values = policy_values(config, table, microbatch, output)
            sums = row_sums(table, microbatch, values)
            found[torch.from_numpy(microbatch.table_rows)] = sums.cpu()
    return summed(found).numpy()
