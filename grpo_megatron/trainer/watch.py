"""What costs passes of its own, measured on a few samples of every step."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.pipeline import Advantages
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.monitors import measure_move, measure_reference
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.stats import Meter, Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.reference import References
from grpo_megatron.trainer.step import logprob_pass, prepare, reduce_stats, untruncated


class Watch:
    """`objective.monitor_share` of the samples, spread over the step, under the policy before it.
    """

    def __init__(self, config: RunConfig, policy: Policy, table: SampleTable, objective: Objective):
        count = math.ceil(config.objective.monitor_share * len(table))
        rows = np.linspace(0, len(table) - 1, count).astype(np.int64)
        self._policy, self._table, self._objective = policy, table, objective
        self._batch = prepare(config.trainer, table, rows)
        self._before = self._logprobs()

    def reference(self, references: References) -> Stats:
        """KL to the reference, for where it weighs nothing: `reference/k1`, `k3`."""
        [found] = references.logprobs(self._policy, [self._batch], self._objective,
                                      self._table.domain)
        return self._measure(found, lambda meter, part, *logprobs:
                             measure_reference(meter, *logprobs))

    def step(self, batch: SampleBatch, advantages: Advantages) -> Stats:
        """How far the updates of the step moved the policy: `step/…`."""
        values = batch.means(advantages.values) if advantages.per_token else advantages.values

        def measure(meter: Meter, part: MicroBatch, before: torch.Tensor, after: torch.Tensor):
            chosen = values[torch.from_numpy(part.table_rows)].to(after.device)[part.sample]
            measure_move(meter, "step", after - before, chosen)

        return self._measure(self._logprobs(), measure)

    def _logprobs(self) -> list[torch.Tensor]:
        return [untruncated(output) for output in logprob_pass(self._policy, self._batch)]

    def _measure(self, found: Sequence[torch.Tensor], measure: Callable[..., None]) -> Stats:
        stats = Stats()
        for part, before, values in zip(self._batch.microbatches, self._before, found, strict=True):
            if len(values):
                domain = torch.from_numpy(self._table.domain[part.table_rows]).to(values.device)
                meter = Meter(domain[part.sample], domain, self._objective.domains)
                measure(meter, part, before, values)
                stats.add(meter.stats)
        return reduce_stats(stats)
