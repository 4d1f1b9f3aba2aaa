"""The policy-gradient loss of one optimizer step, micro-batch by micro-batch."""

from collections.abc import Mapping

import numpy as np
import torch

from grpo_megatron.algorithms.batch import LossConstants
from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_host
from grpo_megatron.trainer.checks import logprob_check
from grpo_megatron.trainer.steps.microbatch import MicroBatch
from grpo_megatron.trainer.steps.optimizer_step import untruncated

MaskRecord = tuple[np.ndarray, dict[str, np.ndarray]]
"""Of one micro-batch: table rows, int64, and who was clipped or rejected, bool [n] by name."""


class PolicyGradientLoss:
    """A `LossFunction`; keeps what it masked for `recorded_masks`.

    `replayed_masks`, bool [n of the step] by name, are followed instead of deciding anew.
    `compare_engines` adds what `canary` measures: whether the engine computed the same."""

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        table: SampleTable,
        constants: LossConstants,
        *,
        replayed_masks: Mapping[str, torch.Tensor] | None,
        compare_engines: bool,
    ):
        self.config = config
        self.objective = objective
        self.table = table
        self.constants = constants
        self.replayed_masks = replayed_masks
        self.compare_engines = compare_engines
        self._masks: list[tuple[np.ndarray, dict[str, torch.Tensor]]] = []

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [2 or 3, n]."""
        logprobs, entropies = output[:2].unbind(0)
        old_logprobs = microbatch.old_logprobs
        if old_logprobs is None:
            old_logprobs = logprobs.detach()
        batch = self.constants.loss_batch(
            torch.from_numpy(microbatch.episodes),
            logprobs=logprobs,
            old_logprobs=old_logprobs,
            rollout_logprobs=microbatch.rollout_logprobs,
            entropies=entropies,
            ref_logprobs=microbatch.ref_logprobs,
            untruncated_logprobs=untruncated(output),
            replayed_masks=self.replayed_masks,
        )
        loss, stats = policy_loss(self.objective, batch)
        if self.compare_engines:
            differences = old_logprobs - microbatch.rollout_logprobs
            compared = logprob_check.compare(
                self.config, self.table, microbatch.table_rows, old_logprobs, differences
            )
            stats.add(compared)
        self._masks.append((microbatch.table_rows, stats.masks))
        return loss, stats

    def recorded_masks(self) -> list[MaskRecord]:
        """Copy the masks of all micro-batches so far to the host, at once."""
        on_device: list[torch.Tensor] = []
        for _, masks in self._masks:
            on_device += masks.values()
        on_host = iter(to_host(on_device))
        records: list[MaskRecord] = []
        for rows, masks in self._masks:
            records.append((rows, {name: next(on_host).numpy() for name in masks}))
        return records
