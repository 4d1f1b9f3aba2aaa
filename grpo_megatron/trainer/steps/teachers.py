"""Teachers of a distillation: one after the other in the place of the policy's weights, or what
the store has of those behind servers.

Beside the student, whose weights wait on the host meanwhile, there is never more than one. From
its second use on, this rank's part of a teacher is read from a file on the node's own disk."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from megatron.core import parallel_state

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import DistillationConfig, RunConfig, TeacherConfig
from grpo_megatron.errors import DataError
from grpo_megatron.trainer.megatron.policy import Policy, base_tensors
from grpo_megatron.trainer.megatron.policy_model import PolicyModel
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, untruncated
from grpo_megatron.trainer.vocab_parallel.divergence import (
    DivergenceSettings,
    TeacherTokens,
    likeliest,
)
from grpo_megatron.weights.tensor_entry import as_bytes


class Teachers:
    """Asks the teachers of a recipe about the tokens of an update.

    `load(path)` reads a checkpoint into the policy's model."""

    def __init__(
        self, config: RunConfig, settings: DistillationConfig, load: Callable[[Path], None]
    ):
        self.config = config
        self.settings = settings
        self._load = load
        self._files: dict[Path, np.memmap] = {}

    def compute_targets(self, policy: Policy, update: UpdateBatch, table: SampleTable) -> None:
        """Put into every micro-batch what the teachers of its samples' domains think of its tokens.

        The policy is as before afterwards. Collective. Raises DataError where the step lacks what a
        served teacher answered."""
        with policy.without_adapters():
            self._compute_targets(policy, update, table)

    def _compute_targets(self, policy: Policy, update: UpdateBatch, table: SampleTable) -> None:
        """Run every teacher over the update, or read what a served one has answered."""
        students: list[torch.Tensor] | None = None
        for number, teacher in enumerate(self.settings.teachers):
            has_teacher = np.isin(table.domain, self._domains_of(teacher))
            if teacher.url:
                self._recall(policy.models[-1], update, table, number, has_teacher)
                continue
            if not table.of_episodes(has_teacher)[update.episodes.numpy()].any():  # on every rank
                continue
            if students is None:
                students = [tensor.to("cpu", copy=True) for tensor in base_tensors(policy)]
            assert teacher.path is not None  # rule teacher_source
            self._put_in_place(policy, teacher.path)
            self._ask(policy, update, table, teacher, has_teacher)
        if students is not None:
            _fill(policy, students)

    def _domains_of(self, teacher: TeacherConfig) -> list[int]:
        """Return numbers of the domains that it teaches; without a list of its own, all."""
        numbers = []
        for number, domain in enumerate(self.config.domains):
            if not teacher.domains or domain.name in teacher.domains:
                numbers.append(number)
        return numbers

    def _put_in_place(self, policy: Policy, path: Path) -> None:
        """Give the policy the weights of a checkpoint; from the second time on, from a file."""
        tensors = base_tensors(policy)
        if path not in self._files:
            self._load(path)
            with tempfile.TemporaryFile() as file:
                for tensor in tensors:
                    file.write(as_bytes(tensor.cpu().contiguous()))
                file.flush()
                self._files[path] = np.memmap(file, np.uint8, "r+")
            return
        sizes = [tensor.nbytes for tensor in tensors]
        parts = torch.from_numpy(self._files[path]).split(sizes)
        weights = []
        for tensor, part in zip(tensors, parts, strict=True):
            # a part of the file is not aligned for its dtype; a copy is
            weights.append(part.clone().view(tensor.dtype).view(tensor.shape))
        _fill(policy, weights)

    def _kl(self, model: PolicyModel) -> DivergenceSettings:
        """Return which divergence is taken, over which vocabulary."""
        return DivergenceSettings(
            model.real_vocab_size,
            self.settings.temperature or self.config.rollout.temperature,
            model.logprob_chunk_tokens,
            self.settings.forward_weight,
        )

    def _recall(
        self,
        model: PolicyModel,
        update: UpdateBatch,
        table: SampleTable,
        number: int,
        has_teacher: np.ndarray,
    ) -> None:
        """Give the micro-batches what a served teacher answered, from the store.

        has_teacher: bool [N], whose samples it teaches. Raises DataError: it has not answered for
        all of them."""
        lengths = np.where(has_teacher, table.policy_lengths, 0)
        starts = np.cumsum([0, *lengths])
        if len(table.teacher_logprobs.get(f"{number}/ids", ())) != starts[-1]:
            raise DataError(
                f"the step has no answers of teacher {number} for its domains",
                where=str(table.directory),
                remedy="delete it; it is sampled anew",
            )
        if not model.post_process:
            return
        all_ids = table.teacher_logprobs[f"{number}/ids"]
        all_logprobs = table.teacher_logprobs[f"{number}/logprobs"]
        for microbatch in update.microbatches:
            rows, entries = _own_rows(microbatch, table, has_teacher)
            index = _token_index(microbatch, starts)[entries]
            ids = torch.from_numpy(all_ids[index])
            logprobs = torch.from_numpy(all_logprobs[index])
            # of a larger vocabulary the ids that the student lacks belong to the tail
            known = ids < model.real_vocab_size
            tail = 1 - torch.where(known, logprobs.double().exp(), 0).sum(-1)
            device = microbatch.tokens.device
            answers = TeacherTokens(
                rows=torch.from_numpy(rows).to(device),
                weight=self.settings.teachers[number].weight,
                settings=self._kl(model),
                ids=torch.where(known, ids.long(), -1).to(device),
                logprobs=logprobs.to(device),
                tail=tail.clamp(min=1e-7).log().float().to(device),
            )
            microbatch.teachers.append(answers)

    def _ask(
        self,
        policy: Policy,
        update: UpdateBatch,
        table: SampleTable,
        teacher: TeacherConfig,
        has_teacher: np.ndarray,
    ) -> None:
        """Give the micro-batches what the teacher, whose weights are in place, computes.

        has_teacher: bool [N], whose samples it teaches."""
        mode = self.settings.mode
        model = policy.models[-1]
        model.answers_states = mode != "sampled"
        outputs = logprob_pass(policy, update)
        model.answers_states = False
        if not model.post_process:
            return
        head = model.output_weight().detach().clone()
        group = parallel_state.get_tensor_model_parallel_group()
        kl = self._kl(model)
        for microbatch, output in zip(update.microbatches, outputs, strict=True):
            if mode == "sampled":
                rows = _rows(microbatch, table.of_episodes(has_teacher))
                logprobs = untruncated(output)[rows]
                answers = TeacherTokens(rows, teacher.weight, kl, logprobs=logprobs)
                microbatch.teachers.append(answers)
                continue
            own_rows, _ = _own_rows(microbatch, table, has_teacher)
            rows = torch.from_numpy(own_rows).to(output.device)
            answers = TeacherTokens(rows, teacher.weight, kl)
            states = output.to(head.dtype)[rows]
            if mode == "full":
                answers = replace(answers, hidden=states, head=head)
            else:
                top_k = self.settings.top_k
                ids, logprobs, tail = likeliest(states, head, top_k, group, kl)
                answers = replace(answers, ids=ids, logprobs=logprobs, tail=tail)
            microbatch.teachers.append(answers)


def _token_index(microbatch: MicroBatch, starts: np.ndarray) -> np.ndarray:
    """Return where the micro-batch's tokens are in the columns of a teacher, int64 [n]. starts:
    [N+1]."""
    parts = [np.empty(0, np.int64)]
    for row in microbatch.table_rows:
        parts.append(np.arange(starts[row], starts[row + 1]))
    return np.concatenate(parts)


def _rows(microbatch: MicroBatch, has_teacher: np.ndarray) -> torch.Tensor:
    """Return policy tokens of samples that a teacher teaches, int64 [m]. has_teacher: bool [M], by
    episode."""
    of_samples = torch.from_numpy(has_teacher[microbatch.episodes]).to(microbatch.sample.device)
    return of_samples[microbatch.sample].nonzero()[:, 0]


def _own_rows(
    microbatch: MicroBatch, table: SampleTable, has_teacher: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return which of the policy tokens that this rank looks at a teacher teaches, int64 [m], and
    which of all that it teaches in the micro-batch these are, int64 [m]."""
    table_rows = microbatch.table_rows
    is_taught = np.repeat(has_teacher[table_rows], table.policy_lengths[table_rows])
    number = np.cumsum(is_taught) - 1
    own = microbatch.own.index_on_host
    if own is not None:
        is_taught = is_taught[own]
        number = number[own]
    return np.flatnonzero(is_taught), number[is_taught]


def _fill(policy: Policy, tensors: list[torch.Tensor]) -> None:
    """Copy values into the policy's own tensors."""
    for tensor, value in zip(base_tensors(policy), tensors, strict=True):
        tensor.copy_(value)
