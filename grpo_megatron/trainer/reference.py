"""Reference policies: second sets of weights on the host, exchanged with the policy's for a pass.

No second model exists on the device. Domains may have references of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.checkpoints.distributed import load_model, save_model
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.platform import HAS_CUDA
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.rollouts import objective_of
from grpo_megatron.trainer.step import PreparedBatch, logprob_pass, untruncated

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
        return (objective_of(self.config, {}).wants_reference
                or (o.kl != "none" and o.monitor_share > 0))

    def take(self, policy: Policy, name: str = START) -> None:
        """Make the current weights a reference."""
        self._weights[name] = [torch.empty_like(tensor, device="cpu", pin_memory=HAS_CUDA)
                               .copy_(tensor) for tensor in _tensors(policy)]
        self._saved = self._saved if name != START else None

    def save(self, policy: Policy, checkpoint: Path) -> str | None:
        """Write `START` beside `checkpoint`, unless an earlier checkpoint has it; returns the
        directory's name, for `load`. Collective."""
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
        for tensor, kept in zip(_tensors(policy), self._weights.pop("aside"), strict=True):
            tensor.copy_(kept)
        policy.reload_main_parameters()  # `load` made them the last reference's

    def refresh(self, policy: Policy) -> None:
        """`reference = ema * reference + (1 - ema) * policy`; without ema, the policy."""
        self._saved, ema = None, self.config.objective.reference_ema
        if ema is None:
            self.take(policy)
            return
        for kept, tensor in zip(self._weights[START], _tensors(policy), strict=True):
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

    def logprobs(self, policy: Policy, batches: Sequence[PreparedBatch],
                 objective: Objective, domains: np.ndarray) -> list[list[torch.Tensor]]:
        """Reference log-probs per batch and micro-batch, fp32 [n], each domain by its own
        reference. domains: int [N of the table]."""
        names = sorted({self._name_of_domain[d] for d in objective.domains})
        found: list[list[torch.Tensor]] = []
        for number, name in enumerate(names):
            with self.exchanged(policy, name):
                passes = [[untruncated(out) for out in logprob_pass(policy, batch)]
                          for batch in batches]
            if number == 0:
                found = passes
                continue
            uses = np.array([self._name_of_domain[d] == name for d in objective.domains])
            for batch, olds, news in zip(batches, found, passes, strict=True):
                for i, microbatch in enumerate(batch.microbatches):
                    if len(news[i]):
                        chosen = torch.from_numpy(uses[domains[microbatch.table_rows]])
                        chosen = chosen.to(news[i].device)[microbatch.sample]
                        olds[i] = torch.where(chosen, news[i], olds[i])
        return found

    def _exchange(self, policy: Policy, name: str) -> None:
        for tensor, kept in zip(_tensors(policy), self._weights[name], strict=True):
            aside = tensor.to(kept.device, copy=True)
            tensor.copy_(kept)
            kept.copy_(aside)


def _tensors(policy: Policy) -> list[torch.Tensor]:
    return [tensor.data for model in policy.models
            for tensor in (*model.parameters(), *model.buffers())]
