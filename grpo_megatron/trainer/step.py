"""One optimizer step on recorded samples, and the passes that only look at log-probs.

The loss of a step is a sum over tokens with weights fixed beforehand (`algorithms.step_terms`).
Megatron's schedule divides by the number of micro-batches and data parallelism averages, so the
sum is multiplied by both: the split cannot change the result."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.packing import plan_microbatches
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import TrainerError
from grpo_megatron.trainer.distributed import summed
from grpo_megatron.trainer.microbatch import MicroBatch, build_microbatch
from grpo_megatron.trainer.platform import device
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.router_replay import Routes, RoutingPass
from grpo_megatron.weights.gather import all_gathered

LossFunction = Callable[[MicroBatch, torch.Tensor], tuple[torch.Tensor, Stats]]
"""Micro-batch and the model's output (see `PolicyModel`) to its part of the loss."""


@dataclass(frozen=True)
class PreparedBatch:
    """This rank's micro-batches of one optimizer step."""

    microbatches: tuple[MicroBatch, ...]
    num_tokens: int  # prompt and policy tokens, all ranks

    @property
    def loss_scale(self) -> float:
        """Undoes the averages over micro-batches (Megatron) and over data parallelism."""
        return len(self.microbatches) * parallel_state.get_data_parallel_world_size()


@dataclass
class Update:
    """One optimizer step: its samples, and what earlier passes found on them."""

    rows: torch.Tensor  # int64, the samples in its loss
    batch: PreparedBatch
    old: list[torch.Tensor] | None = None  # per micro-batch fp32 [2, n]; None: current is old
    ref: list[torch.Tensor] | None = None  # per micro-batch fp32 [n]
    routes: list[Routes] | None = None  # the engine's, per micro-batch
    old_routing: RoutingPass | None = None  # what the old-policy pass found


def prepare(layout: TrainerConfig, table: SampleTable, rows: np.ndarray) -> PreparedBatch:
    """Plan and pack `rows` (int64) for this rank."""
    lengths = (table.prompt_lengths + table.completion_lengths)[rows]
    plan = plan_microbatches(lengths, num_ranks=parallel_state.get_data_parallel_world_size(),
        max_tokens=layout.max_tokens_per_microbatch,
        multiple_of=layout.pipeline_parallel_size if layout.virtual_pipeline_parallel_size else 1)
    microbatches = tuple(build_microbatch(i, table, rows[part], pad_to=layout.tensor_parallel_size,
        device=device()) for i, part in enumerate(plan[parallel_state.get_data_parallel_rank()]))
    return PreparedBatch(microbatches, int(lengths.sum()))


def untruncated(output: torch.Tensor) -> torch.Tensor:
    """Log-probs over the whole vocabulary, fp32 [n], of what the model computed."""
    return output[2] if len(output) > 2 else output[0]


def logprob_pass(policy: Policy, batch: PreparedBatch,
                 routing: RoutingPass | None = None) -> list[torch.Tensor]:
    """Per micro-batch what `PolicyModel` gives: log-probs and entropies of the policy tokens, fp32
    [2, n]; [2, 0] off the last pipeline stage. Without `routing` tokens go by the live router."""
    found: list[torch.Tensor] = [torch.empty(2, 0)] * len(batch.microbatches)

    def collect(microbatch: MicroBatch, output: torch.Tensor):
        found[microbatch.index] = output.detach().clone()
        return output.new_zeros(()), {}

    with torch.no_grad():
        _run_schedule(policy, batch, collect, routing, forward_only=True)
    return found


def train_step(policy: Policy, batch: PreparedBatch, loss_function: LossFunction,
               routing: RoutingPass | None = None,
               check: Callable[[Stats], None] = lambda stats: None) -> Stats:
    """Forward, backward, `check` of what they found, and one optimizer step; returns metrics, equal
    on all ranks.

    Raises TrainerError when the loss or the gradient norm is not finite; weights are lost then."""
    stats = Stats()

    def loss_of(microbatch: MicroBatch, output: torch.Tensor):
        loss, part = loss_function(microbatch, output)
        part.mean("loss/value", loss, 0.0, "sum")
        stats.add(part)
        return loss * batch.loss_scale, {}

    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    _run_schedule(policy, batch, loss_of, routing, forward_only=False)
    stats = reduce_stats(stats)
    check(stats)
    _require_finite("loss", stats.result()["loss/value"])
    grad_norm = float(policy.optimizer.step()[1])
    _require_finite("gradient norm", grad_norm)
    stats.mean("grad/norm", torch.tensor(grad_norm), 1.0, "update")
    for name in stats.means.keys() & {"loss/value", "loss/abs_terms"}:  # the mean over updates
        stats.means[name][1], stats.units[name] = 1.0, "update"
    return stats


def _require_finite(what: str, value: float) -> None:
    if not math.isfinite(value):
        raise TrainerError(f"the {what} is {value}",
                           remedy="resume from the last checkpoint with a lower learning rate")


def _run_schedule(policy: Policy, batch: PreparedBatch, on_output: Callable,
                  routing: RoutingPass | None, *, forward_only: bool) -> None:
    """Run Megatron's pipeline schedule; `on_output` sees what the last stage computed."""
    replay = policy.replay

    def forward_step(iterator: Iterator[MicroBatch], model, return_schedule_plan=False):
        microbatch = next(iterator)
        replay.enter(unwrap_model(model), microbatch.index)
        output = model(microbatch.tokens, microbatch.position_ids, None, labels=microbatch.targets,
                       loss_mask=microbatch.rows, packed_seq_params=microbatch.packed,
                       kept=microbatch.kept, teachers=microbatch.teachers)
        replay.leave(unwrap_model(model), microbatch.index, output)
        return output, lambda tensor: on_output(microbatch, tensor)

    for chunk in policy.chunks:
        chunk.train(not forward_only)
    with replay.during(routing, batch.microbatches):
        get_forward_backward_func()(forward_step_func=forward_step, model=list(policy.chunks),
            data_iterator=[iter(batch.microbatches) for _ in policy.chunks],
            num_microbatches=len(batch.microbatches), micro_batch_size=1,
            seq_length=max(m.num_tokens for m in batch.microbatches), forward_only=forward_only)


def speaks_for_samples() -> bool:
    """Whether this rank, and no other one with the same samples, has what the model computed."""
    return (parallel_state.is_pipeline_last_stage(ignore_virtual=True)
            and parallel_state.get_tensor_model_parallel_rank() == 0)


def reduce_stats(stats: Stats) -> Stats:
    """Add up over the data-parallel ranks of the last stage; equal on all ranks. Collective."""
    total, numbers = Stats(), None
    if speaks_for_samples():
        # no pickled tensors (10 ms a step for 100), and one copy from the device for each kind
        numbers = [*(dict(zip(part, torch.stack([*part.values()]).tolist(), strict=True))
                     if part else {} for part in (stats.means, stats.maxima)),
                   {name: values.tolist() for name, values in stats.samples.items()}]
    for parts, units in filter(all, all_gathered((numbers, stats.units))):
        total.add(Stats(*({name: torch.tensor(value, dtype=torch.float64)
                           for name, value in part.items()} for part in parts), units))
    return total


def gather_tokens(batch: SampleBatch, prepared: Sequence[PreparedBatch],
                  values: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """fp32 [n] in the table's order, on every rank; collective. values: by batch, micro-batch."""
    flat = torch.zeros(batch.num_tokens)
    for part, found in zip(prepared, values, strict=True) if speaks_for_samples() else ():
        for microbatch, tokens in zip(part.microbatches, found, strict=True):
            flat[batch.flat_index(torch.from_numpy(microbatch.table_rows))] = tokens.cpu()
    return summed(flat)
