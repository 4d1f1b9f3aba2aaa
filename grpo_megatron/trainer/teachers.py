"""Teachers of a distillation: one after the other in the place of the policy's weights.

Beside the student, whose weights wait on the host meanwhile, there is never more than one. From
its second use on, this rank's part of a teacher is read from a file on the node's own disk."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig, TeacherConfig
from grpo_megatron.trainer.divergence import DivergenceSettings, TeacherTokens, likeliest
from grpo_megatron.trainer.policy import Policy, state_tensors
from grpo_megatron.trainer.step import PreparedBatch, logprob_pass, untruncated
from grpo_megatron.weights.transfer_plan import as_bytes


class Teachers:
    """`load(path)` reads a checkpoint into the policy's model."""

    def __init__(self, config: RunConfig, load: Callable[[Path], None]):
        self.config, self.settings, self._load = config, config.distillation, load
        self._files: dict[Path, np.memmap] = {}

    def look_at(self, policy: Policy, batch: PreparedBatch, table: SampleTable) -> None:
        """Put into every micro-batch what the teachers of its samples' domains think of its
        tokens. The policy is as before afterwards. Collective."""
        names = [d.name for d in self.config.domains]
        aside = [tensor.to("cpu", copy=True) for tensor in state_tensors(policy)]
        for teacher in self.settings.teachers:
            domains = [i for i, name in enumerate(names) if name in (teacher.domains or names)]
            if np.isin(table.domain, domains).any():  # the same answer on every rank
                self._put_in_place(policy, teacher.path)
                self._ask(policy, batch, table, teacher, domains)
        _fill(policy, aside)

    def _put_in_place(self, policy: Policy, path: Path) -> None:
        tensors = state_tensors(policy)
        if path not in self._files:
            self._load(path)
            with tempfile.TemporaryFile() as file:
                for tensor in tensors:
                    file.write(as_bytes(tensor.cpu().contiguous()))
                file.flush()
                self._files[path] = np.memmap(file, np.uint8, "r+")
            return
        parts = torch.from_numpy(self._files[path]).split([t.nbytes for t in tensors])
        _fill(policy, [part.clone().view(t.dtype).view(t.shape)
                       for t, part in zip(tensors, parts, strict=True)])

    def _ask(self, policy: Policy, batch: PreparedBatch, table: SampleTable,
             teacher: TeacherConfig, domains: list[int]) -> None:
        model, mode = policy.models[-1], self.settings.mode
        model.answers_states = mode != "sampled"
        found = logprob_pass(policy, batch)
        model.answers_states = False
        if not model.post_process:
            return
        head = model.output_weight().detach().clone()
        group = parallel_state.get_tensor_model_parallel_group()
        kl = DivergenceSettings(
            model.real_vocab_size, self.settings.temperature or self.config.rollout.temperature,
            model.logprob_chunk_tokens, self.settings.forward_weight)
        for microbatch, output in zip(batch.microbatches, found, strict=True):
            output = untruncated(output) if mode == "sampled" else output.to(head.dtype)
            taught = torch.from_numpy(np.isin(table.domain[microbatch.table_rows], domains))
            rows = taught.to(output.device)[microbatch.sample].nonzero()[:, 0]
            columns = {"sampled": lambda states: {"logprobs": states},
                       "full": lambda states: {"hidden": states, "head": head},
                       "topk_tail": lambda states: dict(zip(("ids", "logprobs", "tail"), likeliest(
                           states, head, self.settings.top_k, group, kl), strict=True))}
            microbatch.teachers.append(
                TeacherTokens(rows, teacher.weight, kl, **columns[mode](output[rows])))


def _fill(policy: Policy, tensors: list[torch.Tensor]) -> None:
    for tensor, value in zip(state_tensors(policy), tensors, strict=True):
        tensor.copy_(value)
