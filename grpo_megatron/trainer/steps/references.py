"""What the policy is held against: reference policies, and itself before the step.

References are sets of weights on the host, exchanged with the policy's for a pass: no second model
exists on the device. Domains may have references of their own. Where adapters are trained, the
policy as it began is the model without them, and nothing is kept or exchanged."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.algorithms.batch import Advantages, SampleBatch
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.stats import MetricRecorder, Stats, measure_kl, measure_move
from grpo_megatron.batching.drift_file import SampleDrift
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.checkpoints.distributed import load_model, save_models
from grpo_megatron.config.passes import has_reference
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import to_device, to_host, wait_for_copies
from grpo_megatron.trainer.megatron.platform import HAS_CUDA
from grpo_megatron.trainer.megatron.policy import Policy, adapter_tensors, base_tensors
from grpo_megatron.trainer.steps import optimizer_step
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.weights.gather import all_gathered

START = "start"
"""The policy as it was when RL began (or at the last refresh)."""
_REMAINDER = "remainder"
"""What a moving average is beyond `START`, which is rounded to the model's dtype. Without it an
average in bfloat16 would stand still: its steps are smaller than what the dtype can tell apart."""


class References:
    """Weights by name. `START` is taken by `take`, the others are read from Hugging Face files.

    Where adapters are trained, `START` is a set of adapters, and the others are weights with which
    the model computes without any.

    Attributes:
        start_is_base: Whether `START` is the model without its adapters."""

    def __init__(self, config: RunConfig):
        self.config = config
        self._weights: dict[str, list[torch.Tensor]] = {}
        self._saved: str | None = None  # directory that holds START as it is now
        self.start_is_base = False
        self._name_of_domain: dict[str, str] = {}
        for domain in config.domains:
            self._name_of_domain[domain.name] = str(domain.reference or START)

    @property
    def wanted(self) -> bool:
        """Whether the objective looks at a reference at all, if only to measure."""
        return has_reference(self.config)

    def snapshot(self, policy: Policy, name: str = START) -> None:
        """Make the current weights a reference, as a copy on the host. Collective."""
        if name == START:
            self._saved = None
            self._weights.pop(_REMAINDER, None)
            self.start_is_base = False
            if policy.lora is not None and add_nothing(policy):
                self.begin_with_base()
                return
        copies = []
        for tensor in _tensors_of(policy, name):
            host = torch.empty_like(tensor, device="cpu", pin_memory=HAS_CUDA)
            copies.append(host.copy_(tensor, non_blocking=True))
        wait_for_copies()
        self._weights[name] = copies

    def begin_with_base(self) -> None:
        """Let `START` be the model without its adapters, as a checkpoint says it was."""
        self.start_is_base = True
        self._saved = None
        self._weights.pop(START, None)

    def save(self, policy: Policy, checkpoint: Path) -> str | None:
        """Write `START` beside `checkpoint` unless it is there; its name for `load`. Collective."""
        if START in self._weights and self._saved is None:
            name = f"reference_{checkpoint.name}"
            parts = {".": self.exchanged(policy)}
            if _REMAINDER in self._weights:
                parts[_REMAINDER] = self.exchanged(policy, _REMAINDER)
            save_models(checkpoint.with_name(name), policy.chunks, parts)
            self._saved = name
        return self._saved

    def load(self, policy: Policy, checkpoint: Path, name: str) -> None:
        """Read what `save` wrote; the policy is left without weights of its own. Collective."""
        directory = checkpoint.with_name(name)
        load_model(directory, policy.chunks)
        self.snapshot(policy)
        if (directory / _REMAINDER).is_dir():
            load_model(directory / _REMAINDER, policy.chunks)
            self.snapshot(policy, _REMAINDER)
        self._saved = name

    def read_files(self, policy: Policy, load: Callable[[Path], None]) -> None:
        """Read the references that are Hugging Face checkpoints; the policy stays as it is."""
        paths = sorted(set(self._name_of_domain.values()) - {START})
        if not paths:
            return
        self.snapshot(policy, "aside")
        for path in paths:
            load(Path(path))
            self.snapshot(policy, path)
        self._exchange(policy, "aside")
        del self._weights["aside"]
        policy.optimizer.reload_model_params()  # `load` made its fp32 copies the last reference's

    def refresh(self, policy: Policy) -> None:
        """`reference = ema * reference + (1 - ema) * policy`; without ema, the policy."""
        self._saved = None
        ema = self.config.objective.reference_ema
        if ema is None:
            self.snapshot(policy)
            return
        averages = self._weights[START]
        if _REMAINDER not in self._weights and any(map(_is_rounded, averages)):
            self._weights[_REMAINDER] = [torch.zeros_like(average) for average in averages]
        remainders = self._weights.get(_REMAINDER, averages)
        tensors = _tensors_of(policy, START)
        for average, remainder, tensor in zip(averages, remainders, tensors, strict=True):
            if _is_rounded(average):
                _move_average(average, remainder, tensor.to(average.device), 1 - ema)
            elif average.is_floating_point():
                average.lerp_(tensor.to(average.device), 1 - ema)

    @contextmanager
    def exchanged(self, policy: Policy, name: str = START) -> Iterator[None]:
        """Let the policy compute with the reference's weights inside the block."""
        if name == START and self.start_is_base:
            with policy.without_adapters():
                yield
            return
        self._exchange(policy, name)
        try:
            if name == START:
                yield
            else:
                with policy.without_adapters():
                    yield
        finally:
            self._exchange(policy, name)

    def logprobs(
        self,
        policy: Policy,
        updates: Sequence[UpdateBatch],
        objective: Objective,
        domains: np.ndarray,
    ) -> list[list[torch.Tensor]]:
        """Compute log-probs of the policy tokens under each domain's own reference.

        domains: int [M], the domain of every episode of the table. Returns fp32 [n] by update and
        micro-batch. Collective."""
        reference_of = [self._name_of_domain[domain] for domain in objective.domains]
        found: list[list[torch.Tensor]] = []
        for name in sorted(set(reference_of)):
            passes = self._passes_under(policy, updates, name)
            if not found:
                found = passes
                continue
            uses = np.array([other == name for other in reference_of])
            for update, so_far, of_this in zip(updates, found, passes, strict=True):
                _take_over(update, so_far, of_this, uses[domains])
        return found

    def _passes_under(
        self, policy: Policy, updates: Sequence[UpdateBatch], name: str
    ) -> list[list[torch.Tensor]]:
        """Return log-probs under one reference, fp32 [n] by update and micro-batch."""
        passes = []
        with self.exchanged(policy, name):
            for update in updates:
                outputs = optimizer_step.logprob_pass(policy, update)
                passes.append([optimizer_step.untruncated(output) for output in outputs])
        return passes

    def _exchange(self, policy: Policy, name: str) -> None:
        """Swap the policy's weights with the reference's."""
        for tensor, kept in zip(_tensors_of(policy, name), self._weights[name], strict=True):
            aside = tensor.clone()  # the queue of the device keeps the order of the three
            tensor.copy_(kept, non_blocking=True)
            kept.copy_(aside, non_blocking=True)
        wait_for_copies()


def _tensors_of(policy: Policy, name: str) -> list[torch.Tensor]:
    """Return what a reference consists of: of an earlier policy with adapters these, else all
    weights."""
    if policy.lora is not None and name == START:
        return [parameter.data for parameter in adapter_tensors(policy)]
    return base_tensors(policy)


def _is_rounded(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a dtype that is coarser than float32."""
    return tensor.is_floating_point() and tensor.element_size() < 4


def _move_average(
    average: torch.Tensor, remainder: torch.Tensor, tensor: torch.Tensor, share: float
) -> None:
    """Move `average + remainder` towards a tensor by `share` of their distance; all of one dtype,
    which is coarser than float32."""
    exact = average.float() + remainder.float()
    exact.lerp_(tensor.float(), share)
    average.copy_(exact)
    remainder.copy_(exact - average.float())


def add_nothing(policy: Policy) -> bool:
    """Whether no adapter changes what the model computes, on any rank. Collective."""
    changes = False
    for model in policy.models:
        if model.adapters is not None and model.adapters.change_something():
            changes = True
    return not any(all_gathered(changes))


def _take_over(
    update: UpdateBatch,
    so_far: list[torch.Tensor],
    of_this: list[torch.Tensor],
    uses: np.ndarray,
) -> None:
    """Replace values in `so_far` by those of this reference. uses: bool [M], whose it is."""
    for index, microbatch in enumerate(update.microbatches):
        values = of_this[index]
        if not len(values):  # no output on this pipeline stage
            continue
        of_sample = to_device(torch.from_numpy(uses[microbatch.episodes]), values.device)
        of_token = of_sample[microbatch.sample]
        so_far[index] = torch.where(of_token, values, so_far[index])


class PolicyDriftMonitor:
    """`objective.monitor_share` of the samples, spread over the step, under the policy before.

    `moved` is what `step` saw of these samples, by row of the table, on ranks with an output."""

    def __init__(self, config: RunConfig, policy: Policy, table: SampleTable, objective: Objective):
        self.moved: dict[int, SampleDrift] = {}
        num_samples = len(table.first_rows)
        count = math.ceil(config.objective.monitor_share * num_samples)
        samples = np.linspace(0, num_samples - 1, count).astype(np.int64)
        rows = table.rows_of(samples)
        self._domains = table.of_episodes(table.domain)
        self._policy = policy
        self._table = table
        self._objective = objective
        self._batch = optimizer_step.prepare(config.trainer, table, rows)
        self._before = self._logprobs()

    def reference(self, references: References) -> Stats:
        """Measure the KL to the reference, for where it weighs nothing: `reference/k1`, `k3`."""
        [found] = references.logprobs(self._policy, [self._batch], self._objective, self._domains)
        stats = Stats()
        for _, meter, before, of_reference in self._measured(found):
            measure_kl(meter, "reference", before, of_reference)
            stats.add(meter.stats)
        return optimizer_step.reduce_stats(stats)

    def step(self, batch: SampleBatch, advantages: Advantages) -> Stats:
        """Return how far the updates of the step moved the policy: `step/…`."""
        of_samples = advantages.values
        by_token = advantages.values
        if advantages.per_token:
            of_samples = batch.means(advantages.values)
        else:
            by_token = batch.to_tokens(advantages.values)
        starts = np.cumsum(self._table.policy_lengths) - self._table.policy_lengths
        stats = Stats()
        for microbatch, meter, before, after in self._measured(self._logprobs()):
            samples = torch.from_numpy(microbatch.episodes)
            of_tokens = to_device(of_samples[samples], after.device)[microbatch.sample]
            measure_move(meter, "step", after - before, of_tokens)
            stats.add(meter.stats)
            self._keep(microbatch.table_rows, before, after, starts, by_token)
        return optimizer_step.reduce_stats(stats)

    def _keep(
        self,
        rows: np.ndarray,
        before: torch.Tensor,
        after: torch.Tensor,
        starts: np.ndarray,
        advantages: torch.Tensor,
    ) -> None:
        """Put the samples of a micro-batch into `moved`. rows: int64; before, after: fp32 [n] of
        these; starts: int64 [N], of every row of the table in advantages, [n] of the step."""
        lengths = self._table.policy_lengths[rows].tolist()
        before, after = to_host([before, after])
        parts = zip(rows.tolist(), before.split(lengths), after.split(lengths), strict=True)
        for row, of_before, of_after in parts:
            of_sample = advantages[starts[row] : starts[row] + len(of_before)]
            self.moved[row] = SampleDrift(
                of_before.numpy(), of_after.numpy(), of_sample.float().cpu().numpy()
            )

    def _logprobs(self) -> list[torch.Tensor]:
        """Compute log-probs of the current policy, fp32 [n] by micro-batch."""
        outputs = optimizer_step.logprob_pass(self._policy, self._batch)
        return [optimizer_step.untruncated(output) for output in outputs]

    def _measured(
        self, found: Sequence[torch.Tensor]
    ) -> Iterator[tuple[MicroBatch, MetricRecorder, torch.Tensor, torch.Tensor]]:
        """Yield micro-batches that have an output here, a meter for each, and the log-probs, fp32
        [n], of the policy before the step and those in `found`."""
        for microbatch in self._batch.microbatches:
            before = self._before[microbatch.index]
            values = found[microbatch.index]
            if not len(values):  # no output on this pipeline stage
                continue
            domain = torch.from_numpy(self._domains[microbatch.episodes])
            domain = to_device(domain, values.device)
            meter = MetricRecorder(domain[microbatch.sample], domain, self._objective.domains)
            yield microbatch, meter, before, values
