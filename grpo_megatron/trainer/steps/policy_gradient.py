"""The policy-gradient loss of one optimizer step, micro-batch by micro-batch."""

from collections.abc import Mapping

import numpy as np
import torch

from grpo_megatron.algorithms.objective import Objective, policy_loss
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.algorithms.step_terms import StepTerms
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.checks import logprob_check
from grpo_megatron.trainer.steps.microbatch import MicroBatch
from grpo_megatron.trainer.steps.optimizer_step import Update, untruncated

MaskRecord = tuple[np.ndarray, dict[str, np.ndarray]]
"""Of one micro-batch: table rows, int64 [S], and who was clipped or rejected, bool [n] by name."""


class PolicyGradientLoss:
    """A `LossFunction`; keeps what it masked in `recorded_masks`.

    `replayed_masks`, bool [n of the step] by name, are followed instead of deciding anew.
    `compare_engines` adds what `canary` measures: whether the engine computed the same."""

    def __init__(
        self,
        config: RunConfig,
        objective: Objective,
        table: SampleTable,
        update: Update,
        terms: StepTerms,
        *,
        replayed_masks: Mapping[str, torch.Tensor] | None,
        compare_engines: bool,
    ):
        self.config = config
        self.objective = objective
        self.table = table
        self.update = update
        self.terms = terms
        self.replayed_masks = replayed_masks
        self.compare_engines = compare_engines
        self.recorded_masks: list[MaskRecord] = []

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return the micro-batch's loss and metrics. output: fp32 [2 or 3, n]."""
        logprobs, entropies = output[:2].unbind(0)
        old_logprobs = self._old_logprobs(microbatch, logprobs)
        ref_logprobs = None
        if self.update.ref is not None:
            ref_logprobs = self.update.ref[microbatch.index]
        batch = self.terms.loss_batch(
            torch.from_numpy(microbatch.table_rows),
            logprobs,
            old_logprobs,
            microbatch.rollout_logprobs,
            entropies,
            ref_logprobs,
            untruncated(output),
            self.replayed_masks,
        )
        loss, stats = policy_loss(self.objective, batch)
        if self.compare_engines:
            differences = old_logprobs - microbatch.rollout_logprobs
            compared = logprob_check.compare(
                self.config, self.table, microbatch.table_rows, differences
            )
            stats.add(compared)
        masks = {name: flags.cpu().numpy() for name, flags in stats.decisions.items()}
        self.recorded_masks.append((microbatch.table_rows, masks))
        return loss, stats

    def _old_logprobs(self, microbatch: MicroBatch, logprobs: torch.Tensor) -> torch.Tensor:
        """Those of the old policy's pass; without one, the current policy is the old one."""
        if self.update.old is None:
            return logprobs.detach()
        return self.update.old[microbatch.index][0]
