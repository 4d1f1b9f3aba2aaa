"""One optimizer step on recorded samples, and the passes that only look at log-probs.

The loss of a step is a sum over tokens with weights fixed beforehand (`algorithms.aggregation`).
Megatron's schedule divides by the number of micro-batches and data parallelism averages, so the
sum is multiplied by both: the split cannot change the result. (Gradients are averaged over
context-parallel ranks too, but the schedule has multiplied the loss by these.)

A step is `prepare`, `compute_gradients`, `apply_gradients`; `train_step` is the last two."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import unwrap_model

from grpo_megatron.algorithms.batch import SampleBatch
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.expert_balance import ExpertLoads
from grpo_megatron.batching.packing import MicroBatchPlan, plan_microbatches
from grpo_megatron.batching.prefix_rows import SamplePaths
from grpo_megatron.batching.shared_prompts import shared_prompts
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.device_copies import to_host
from grpo_megatron.errors import TrainerError
from grpo_megatron.trainer.megatron.context_parallel import ContextRank
from grpo_megatron.trainer.megatron.platform import device
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.megatron.process_groups import is_first_with_samples, summed
from grpo_megatron.trainer.routing.router_replay import RouteReplay, RoutingPass
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch, build_microbatch
from grpo_megatron.weights.gather import all_gathered


class LossFunction(Protocol):
    """The loss of one micro-batch."""

    def __call__(self, microbatch: MicroBatch, output: torch.Tensor) -> tuple[torch.Tensor, Stats]:
        """Return this micro-batch's part of the step's loss, a scalar with gradient, and its
        metrics. output: what `PolicyModel` computed, [2 to 4, n]."""


def prepare(
    layout: TrainerConfig,
    table: SampleTable,
    rows: np.ndarray,
    trained: np.ndarray | None = None,
    experts: ExpertLoads | None = None,
) -> UpdateBatch:
    """Plan and pack the samples of `rows` (int64, ascending, with all rows of an episode) for this
    rank; those in the loss have the rows `trained` (int64, some of `rows`), or all. With
    `share_prefixes`, a prompt is in a micro-batch once. experts: of the table's rows, where they
    are known.

    Every data-parallel rank gets equally many micro-batches, and as many as virtual pipeline
    stages need: a multiple of the pipeline's size. Raises DataError where a sample is longer than a
    micro-batch."""
    if trained is None:
        trained = rows
    shared = shared_prompts(table, rows)
    paths = shared.paths
    num_split_prompts = shared.num_split
    if not layout.share_prefixes:
        paths = paths.apart()
        num_split_prompts = 0
    if experts is not None:
        experts = experts.of_samples(rows)
    plan = _plan(layout, paths, experts)
    paths = plan.paths
    own_plan = plan.samples[parallel_state.get_data_parallel_rank()]
    microbatches = []
    for index, part in enumerate(own_plan):
        microbatch = build_microbatch(
            index,
            table,
            rows[part],
            pad_to=layout.token_multiple,
            device=device(),
            paths=paths.of(part),
            context=ContextRank.of_this_process(),
        )
        microbatches.append(microbatch)
    return UpdateBatch(
        torch.from_numpy(np.unique(table.episode[trained])),
        microbatches,
        num_tokens=int(paths.totals.sum()),
        num_computed_tokens=_count_computed_tokens(paths, plan.samples),
        num_distinct_tokens=float((paths.lengths / paths.uses).sum()),
        num_split_prompts=num_split_prompts,
        experts=plan.experts,
    )


def _plan(layout: TrainerConfig, paths: SamplePaths, experts: ExpertLoads | None) -> MicroBatchPlan:
    """Plan the micro-batches of every rank; samples of `paths` that share nothing stay apart."""
    multiple_of = 1
    if layout.virtual_pipeline_parallel_size:
        multiple_of = layout.pipeline_parallel_size
    return plan_microbatches(
        paths,
        num_ranks=int(parallel_state.get_data_parallel_world_size()),
        max_tokens=layout.max_tokens_per_microbatch,
        multiple_of=multiple_of,
        experts=experts,
    )


def _count_computed_tokens(paths: SamplePaths, plan: Sequence[Sequence[np.ndarray]]) -> int:
    """Count the tokens of all rows of a plan, without padding."""
    count = 0
    for of_rank in plan:
        for samples in of_rank:
            count += paths.count_tokens(samples)
    return count


def untruncated(output: torch.Tensor) -> torch.Tensor:
    """Return the log-probs over the whole vocabulary, fp32 [n], of what the model computed."""
    if len(output) > 2:
        return output[2]
    return output[0]


# --- a training step


def train_step(
    policy: Policy,
    batch: UpdateBatch,
    loss_function: LossFunction,
    routing: RoutingPass | None = None,
) -> Stats:
    """Take one optimizer step; return its metrics, equal on all ranks.

    Raises TrainerError when the loss or the gradient norm is not finite; weights are lost then."""
    stats = compute_gradients(policy, batch, loss_function, routing)
    return apply_gradients(policy, stats)


def compute_gradients(
    policy: Policy,
    batch: UpdateBatch,
    loss_function: LossFunction,
    routing: RoutingPass | None = None,
    *,
    values: bool = False,
) -> Stats:
    """Run forward and backward over all micro-batches; gradients stay in Megatron's buffers.

    values: the loss gets those of the value head, too. Returns metrics of the step, equal on all
    ranks. Collective."""
    stats = Stats()
    for chunk in policy.chunks:
        chunk.zero_grad_buffer()
    policy.optimizer.zero_grad()
    train = _TrainingOutput(loss_function, batch.loss_scale, stats)
    _run_schedule(policy, batch, train, routing, forward_only=False, values=values)
    return reduce_stats(stats)


def measure_loss(
    policy: Policy,
    batch: UpdateBatch,
    loss_function: LossFunction,
    routing: RoutingPass | None = None,
) -> Stats:
    """Look at the loss over all micro-batches without gradients, as if no update followed.

    Returns metrics of the step, equal on all ranks. Raises TrainerError when the loss is not
    finite. Collective."""
    stats = Stats()
    measure = _TrainingOutput(loss_function, batch.loss_scale, stats)
    with torch.no_grad():
        _run_schedule(policy, batch, measure, routing, forward_only=True)
    stats = reduce_stats(stats)
    _require_finite("loss", stats.result()["loss/value"])
    return _as_means_of_updates(stats)


def apply_gradients(policy: Policy, stats: Stats, *, gather: bool = True) -> Stats:
    """Clip the gradients, step the optimizer, and add the norm to the step's metrics.

    gather: leave every rank with all of its weights. Without it, the next forward gathers them
    while it computes; until then, or until `policy.gather_weights`, the weights must not be read.
    Raises TrainerError when the loss or the norm is not finite; weights are lost then.
    Collective."""
    _require_finite("loss", stats.result()["loss/value"])
    _, grad_norm, _ = policy.optimizer.step()
    if gather:
        policy.gather_weights()
    grad_norm = float(grad_norm)
    _require_finite("gradient norm", grad_norm)
    stats.set_mean("grad/norm", torch.tensor(grad_norm), 1.0, "update")
    return _as_means_of_updates(stats)


def _as_means_of_updates(stats: Stats) -> Stats:
    """Let what is a sum over an update be a mean where updates are added."""
    for name in ("loss/value", "loss/abs_terms"):
        if name in stats.means:
            stats.means[name][1] = 1.0
            stats.units[name] = "update"
    return stats


def _require_finite(what: str, value: float) -> None:
    """Raise TrainerError for an infinity or what is no number."""
    if not math.isfinite(value):
        raise TrainerError(
            f"the {what} is {value}",
            remedy="resume from the last checkpoint with a lower learning rate",
        )


# --- a pass without gradients


def logprob_pass(
    policy: Policy,
    batch: UpdateBatch,
    routing: RoutingPass | None = None,
    *,
    squared_probs: bool = False,
    values: bool = False,
) -> list[torch.Tensor]:
    """Compute log-probs and entropies of the policy tokens, without gradients.

    Returns for each micro-batch what `PolicyModel` gives, fp32 [2, n], one row more with
    `squared_probs` and one more with `values`, in this order, the last ones; as many rows of 0
    tokens off the last pipeline stage. Without `routing` tokens go by the live router."""
    num_rows = 2 + int(squared_probs) + int(values)
    collect = _CollectOutput(len(batch.microbatches), num_rows)
    with torch.no_grad():
        _run_schedule(
            policy,
            batch,
            collect,
            routing,
            forward_only=True,
            squared_probs=squared_probs,
            values=values,
        )
    return collect.found


# --- Megatron's schedule, which calls back: once for a forward, once for its output


class _OnOutput(Protocol):
    """Megatron's loss function, with the micro-batch before its output."""

    def __call__(
        self, microbatch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]: ...


@dataclass
class _TrainingOutput:
    """Turns the last stage's output into the scaled loss, and keeps its metrics."""

    loss_function: LossFunction
    loss_scale: float
    stats: Stats

    def __call__(
        self, microbatch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        loss, part = self.loss_function(microbatch, output)
        part.set_mean("loss/value", loss, 0.0, "sum")
        self.stats.add(part)
        return loss * self.loss_scale, {}


class _CollectOutput:
    """Keeps what the last stage computed; there is no loss."""

    def __init__(self, num_microbatches: int, num_rows: int):
        self.found = [torch.empty(num_rows, 0) for _ in range(num_microbatches)]

    def __call__(
        self, microbatch: MicroBatch, output: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        self.found[microbatch.index] = output.detach().clone()
        return output.new_zeros(()), {}


def _run_schedule(
    policy: Policy,
    batch: UpdateBatch,
    on_output: _OnOutput,
    routing: RoutingPass | None,
    *,
    forward_only: bool,
    squared_probs: bool = False,
    values: bool = False,
) -> None:
    """Run Megatron's pipeline schedule; `on_output` sees what the last stage computed."""
    for chunk in policy.chunks:
        chunk.train(not forward_only)
    megatron_schedule = get_forward_backward_func()
    longest = max(microbatch.num_tokens for microbatch in batch.microbatches)
    with policy.replay.during(routing, batch.microbatches):
        megatron_schedule(
            forward_step_func=_ForwardStep(policy.replay, on_output, squared_probs, values),
            model=list(policy.chunks),
            data_iterator=[iter(batch.microbatches) for _ in policy.chunks],
            num_microbatches=len(batch.microbatches),
            micro_batch_size=1,
            seq_length=longest,
            forward_only=forward_only,
        )


@dataclass(frozen=True)
class _ForwardStep:
    """Megatron's `forward_step_func`: one micro-batch through one chunk of the model."""

    replay: RouteReplay
    on_output: _OnOutput
    squared_probs: bool
    values: bool

    def __call__(
        self,
        iterator: Iterator[MicroBatch],
        chunk: torch.nn.Module,
        return_schedule_plan: bool = False,
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, Any]]]]:
        microbatch = next(iterator)
        model = unwrap_model(chunk)
        self.replay.enter(model, microbatch.index)
        output = chunk(
            microbatch.tokens,
            microbatch.position_ids,
            None,
            packed_seq_params=microbatch.packed,
            own=microbatch.own,
            squared_probs=self.squared_probs,
            values=self.values,
            teachers=microbatch.teachers,
            images=microbatch.images,
        )
        self.replay.leave(model, microbatch.index, output)
        return output, partial(self.on_output, microbatch)


# --- what ranks tell each other


def is_output_rank() -> bool:
    """Whether this rank, and no other one with the same samples, has the model's output."""
    is_last_stage = bool(parallel_state.is_pipeline_last_stage(ignore_virtual=True))
    return is_last_stage and is_first_with_samples()


def reduce_stats(stats: Stats) -> Stats:
    """Add up over the data-parallel ranks of the last stage; equal on all ranks. Collective."""
    numbers = None
    if is_output_rank():
        # numbers and no pickled tensors: 10 ms a step for 100 of these
        samples = {name: values.tolist() for name, values in stats.kept_samples().items()}
        numbers = (_to_numbers(stats.means), _to_numbers(stats.maxima), samples)
    total = Stats()
    for parts, units in all_gathered((numbers, stats.units)):
        if parts and units:
            means, maxima, samples = parts
            part = Stats(_to_tensors(means), _to_tensors(maxima), _to_tensors(samples), units)
            total.add(part)
    return total


def sharing_metrics(updates: Sequence[UpdateBatch]) -> dict[str, float]:
    """Return the share of all tokens that was computed, and how many prompts engines routed
    differently.

    updates: of one step. Equal on all ranks; empty where there is none."""
    num_tokens = sum(update.num_tokens for update in updates)
    if num_tokens == 0:
        return {}
    num_computed = sum(update.num_computed_tokens for update in updates)
    num_split = sum(update.num_split_prompts for update in updates)
    return {
        "batch/computed_token_fraction": num_computed / num_tokens,
        "routing/split_prompts": float(num_split),
    }


def balance_metrics(updates: Sequence[UpdateBatch]) -> dict[str, float]:
    """Return how uneven the experts' ranks are in the micro-batches of a step, on the mean of
    updates.

    Empty where their routes were not known beforehand."""
    balances = [update.experts for update in updates if update.experts is not None]
    if not balances:
        return {}
    return {
        "routing/rank_imbalance": float(np.mean([balance.after for balance in balances])),
        "routing/rank_imbalance_by_cost": float(np.mean([balance.before for balance in balances])),
    }


def losses_and_norms(updates: Sequence[Stats]) -> tuple[list[float], list[float]]:
    """Return the loss and the pre-clip gradient norm of every optimizer step."""
    losses = []
    grad_norms = []
    for stats in updates:
        found = stats.result()
        losses.append(found["loss/value"])
        grad_norms.append(found["grad/norm"])
    return losses, grad_norms


def _to_numbers(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors of one shape as Python numbers, with one copy from the device for all."""
    if not tensors:
        return {}
    values = torch.stack(list(tensors.values())).tolist()
    return dict(zip(tensors, values, strict=True))


def _to_tensors(numbers: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return numbers, or lists of them, as float64 tensors."""
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}


def gather_tokens(
    batch: SampleBatch,
    updates: Sequence[UpdateBatch],
    values: Sequence[Sequence[torch.Tensor]],
) -> torch.Tensor:
    """Bring values of policy tokens together: fp32 [n] in the table's order, on every rank.

    values: of each update and each of its micro-batches, [its policy tokens]. Collective."""
    flat = torch.zeros(batch.num_tokens)
    if is_output_rank():
        for update, of_update in zip(updates, values, strict=True):
            on_host = to_host(of_update)
            for microbatch, tokens in zip(update.microbatches, on_host, strict=True):
                index = batch.flat_index(torch.from_numpy(microbatch.episodes))
                flat[index] = tokens
    return summed(flat)
