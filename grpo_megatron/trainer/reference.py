"""What the policy is held against: reference policies, and itself before the step.

References are sets of weights on the host, exchanged with the policy's for a pass: no second model
exists on the device. Domains may have references of their own."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.algorithms.advantages.pipeline import Advantages
from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.stats import Meter, Stats, measure_kl, measure_move
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.distributed import load_model, save_model
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer import step
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.platform import HAS_CUDA
from grpo_megatron.trainer.policy import Policy, state_tensors
from grpo_megatron.trainer.rollouts import objective_of

START = "start"
"""The policy as it was when RL began (or at the last refresh)."""


class References:
    """Weights by name. `START` is taken by `take`, the others are read from Hugging Face files."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._saved: str | None = None  # directory that holds START as it is now
        self._name_of_domain = {d.name: str(d.reference) if d.reference else START
                                for d in config.domains}

    @property
    def wanted(self) -> bool:
        """Whether the objective looks at a reference at all, if only to measure."""
        o = self.config.objective
        return self.config.kind == "rl" and (objective_of(self.config, {}).wants_reference
                or (o.kl != "none" and o.monitor_share > 0))

    def take(self, policy: Policy, name: str = START) -> None:
        """Make the current weights a reference."""
        self._weights[name] = [torch.empty_like(tensor, device="cpu", pin_memory=HAS_CUDA)
                               .copy_(tensor) for tensor in state_tensors(policy)]
        self._saved = self._saved if name != START else None

    def save(self, policy: Policy, checkpoint: Path) -> str | None:
        """Write `START` beside `checkpoint` unless it is there; its name for `load`. Collective."""
        if START in self._weights and self._saved is None:
            name = f"reference_{checkpoint.name}"
            with self.exchanged(policy):
                save_model(checkpoint.with_name(name), policy.chunks)
            self._saved = name
        return self._saved

    def load(self, policy: Policy, checkpoint: Path, name: str) -> None:
        """Read what `save` wrote; the policy is left with these weights. Collective."""
        load_model(checkpoint.with_name(name), policy.chunks)
        self.take(policy)
        self._saved = name

    def read_files(self, policy: Policy, load: Callable[[Path], None]) -> None:
        """Read the references that are Hugging Face checkpoints; the policy stays as it is."""
        paths = sorted(set(self._name_of_domain.values()) - {START})
        if not paths:
            return
        self.take(policy, "aside")
        for path in paths:
            load(Path(path))
            self.take(policy, path)
        self._exchange(policy, "aside")
        del self._weights["aside"]
        policy.optimizer.reload_model_params()  # `load` made its fp32 copies the last reference's

    def refresh(self, policy: Policy) -> None:
        """`reference = ema * reference + (1 - ema) * policy`; without ema, the policy."""
        self._saved, ema = None, self.config.objective.reference_ema
        if ema is None:
            self.take(policy)
            return
        for kept, tensor in zip(self._weights[START], state_tensors(policy), strict=True):
            if kept.is_floating_point():
                kept.lerp_(tensor.to(kept.device), 1 - ema)

    @contextmanager
    def exchanged(self, policy: Policy, name: str = START) -> Iterator[None]:
        """The policy computes with the reference's weights inside the block."""
        self._exchange(policy, name)
        try:
            yield
        finally:
            self._exchange(policy, name)

    def logprobs(self, policy: Policy, batches: Sequence[step.PreparedBatch],
                 objective: Objective, domains: np.ndarray) -> list[list[torch.Tensor]]:
        """By batch and micro-batch, fp32 [n], each domain by its reference. domains: int [N]."""
        found: list[list[torch.Tensor]] = []
        for name in sorted({self._name_of_domain[d] for d in objective.domains}):
            with self.exchanged(policy, name):
                passes = [[step.untruncated(out) for out in step.logprob_pass(policy, batch)]
                          for batch in batches]
            found = found or passes
            uses = np.array([self._name_of_domain[d] == name for d in objective.domains])
            for batch, olds, news in zip(batches, found, passes, strict=True):
                for i, microbatch in enumerate(batch.microbatches):
                    if len(news[i]):
                        chosen = torch.from_numpy(uses[domains[microbatch.table_rows]])
                        chosen = chosen.to(news[i].device)[microbatch.sample]
                        olds[i] = torch.where(chosen, news[i], olds[i])
        return found

    def _exchange(self, policy: Policy, name: str) -> None:
        for tensor, kept in zip(state_tensors(policy), self._weights[name], strict=True):
            aside = tensor.to(kept.device, copy=True)
            tensor.copy_(kept)
            kept.copy_(aside)


class Watch:
    """`objective.monitor_share` of the samples, spread over the step, under the policy before."""

    def __init__(self, config: RunConfig, policy: Policy, table: SampleTable, objective: Objective):
        count = math.ceil(config.objective.monitor_share * len(table))
        rows = np.linspace(0, len(table) - 1, count).astype(np.int64)
        self._policy, self._table, self._objective = policy, table, objective
        self._batch = step.prepare(config.trainer, table, rows)
        self._before = self._logprobs()

    def reference(self, references: References) -> Stats:
        """KL to the reference, for where it weighs nothing: `reference/k1`, `k3`."""
        [found] = references.logprobs(self._policy, [self._batch], self._objective,
                                      self._table.domain)
        return self._measure(found, lambda meter, part, *logprobs:
                             measure_kl(meter, "reference", *logprobs))

    def step(self, batch: SampleBatch, advantages: Advantages) -> Stats:
        """How far the updates of the step moved the policy: `step/…`."""
        values = batch.means(advantages.values) if advantages.per_token else advantages.values

        def measure(meter: Meter, part: MicroBatch, before: torch.Tensor, after: torch.Tensor):
            chosen = values[torch.from_numpy(part.table_rows)].to(after.device)[part.sample]
            measure_move(meter, "step", after - before, chosen)

        return self._measure(self._logprobs(), measure)

    def _logprobs(self) -> list[torch.Tensor]:
        return [step.untruncated(output) for output in step.logprob_pass(self._policy, self._batch)]

    def _measure(self, found: Sequence[torch.Tensor], measure: Callable[..., None]) -> Stats:
        stats = Stats()
        for part, before, values in zip(self._batch.microbatches, self._before, found, strict=True):
            if len(values):
                domain = torch.from_numpy(self._table.domain[part.table_rows]).to(values.device)
                meter = Meter(domain[part.sample], domain, self._objective.domains)
                measure(meter, part, before, values)
                stats.add(meter.stats)
        return step.reduce_stats(stats)
