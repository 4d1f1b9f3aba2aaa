"""Log-probs of a recorded step under several routings, for the mismatch report."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.algorithms.advantages.pipeline import select
from grpo_megatron.batching.columns import write_columns
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.megatron.policy import Policy
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.routing.router_replay import Routes, RoutingPass, local_part
from grpo_megatron.trainer.steps.joined_reports import joined_metrics
from grpo_megatron.trainer.steps.microbatch import UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import (
    gather_tokens,
    logprob_pass,
    prepare,
    untruncated,
)
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch


@dataclass(frozen=True, slots=True)
class LogprobDiff:
    """Log-probs of the samples of a table at the weights that sampled them.

    The columns are fp64 [n] over the table's policy tokens: `rollout` (the engine's), `live` (with
    the trainer's own routing), `unmasked` (the same over the whole vocabulary, if sampling was
    truncated), `trained` (1 where the sample is in the loss, else 0), and `through_N` (with the
    engine's routes in the MoE layers up to number N). flipped, fp64 [E, L], counts how often only
    the engine used an expert, and metrics are of routing: None and empty without routes."""

    columns: dict[str, np.ndarray]
    flipped: np.ndarray | None
    metrics: dict[str, float]


def measure_logprob_diff(
    config: RunConfig,
    policy: Policy,
    table: SampleTable,
    *,
    by_layer: bool,
    state: Mapping[str, Any],
) -> LogprobDiff:
    """Compute log-probs of all samples of `table` at the present weights. Collective.

    by_layer: have a column `through_N` for each N, else only for the last; state: what the
    objective learned before the step.

    Raises DataError for routes that cannot be used, where `routing.on_missing` says so."""
    batch = prepare(config.trainer, table, np.arange(len(table)))
    samples = sample_batch(config, table)
    source = RouteSource(config, policy.replay, table)
    routes: list[Routes] | None = None
    live_routing: RoutingPass | None = None
    if table.route_shapes:
        routes = source.from_store(batch)
    if routes is not None:
        live_routing = RoutingPass(compared={"rollout": routes}, record=True, measure=True)

    def gathered(values: list[Tensor]) -> np.ndarray:
        return gather_tokens(samples, [batch], [values]).double().numpy()

    is_trained = select(objective_of(config, state), samples).numpy()
    live = logprob_pass(policy, batch, live_routing)
    engines = [table.policy_tokens(row)[1] for row in range(len(table))]
    columns = {
        "live": gathered([output[0] for output in live]),
        "rollout": np.concatenate(engines).astype(np.float64),
        "trained": np.repeat(is_trained[table.episode], table.policy_lengths).astype(np.float64),
    }
    if config.rollout.truncation:
        columns["unmasked"] = gathered([untruncated(output) for output in live])
    metrics: dict[str, float] = {}
    flipped: np.ndarray | None = None
    if routes is not None and live_routing is not None:
        source.finish(live_routing, batch)
        metrics = source.metrics()
        absent = _absent_experts(batch, routes, live_routing)
        flipped = policy.replay.count_experts(absent).T.numpy()
        layers = policy.replay.shape.layers
        if not by_layer:
            layers = layers[-1:]
        for layer in layers:
            replayed = _routes_up_to(layer, routes, policy.replay.layers)
            through = logprob_pass(policy, batch, RoutingPass(replayed=replayed))
            columns[f"through_{layer}"] = gathered([output[0] for output in through])
    return LogprobDiff(columns, flipped, metrics)


def write_logprob_diff(
    to: Path, whole: SampleTable, parts: Sequence[tuple[SampleTable, LogprobDiff]]
) -> dict[str, float]:
    """Write the columns of a whole recorded step to `to`, by rank 0, as `LogprobDiff` has them, and
    `flipped` beside them. parts: of the step, each with its table; all rows are in one of them.

    Returns the routing metrics of all parts together (`joined_metrics`)."""
    columns: dict[str, np.ndarray] = {}
    num_tokens = int(whole.policy_lengths.sum())
    metrics = []
    for table, diff in parts:
        is_row_here = np.isin(np.arange(len(whole)), table.rows_of_step)
        is_token_here = np.repeat(is_row_here, whole.policy_lengths)
        for name, values in diff.columns.items():
            column = columns.setdefault(name, np.full(num_tokens, np.nan))
            column[is_token_here] = values
        if diff.flipped is not None:
            columns["flipped"] = columns.get("flipped", 0.0) + diff.flipped
        metrics.append((diff.metrics, int(is_token_here.sum())))
    if dist.get_rank() == 0:
        write_columns(to, columns)
    return joined_metrics(metrics, {})


def _routes_up_to(layer: int, routes: Sequence[Routes], own_layers: Sequence[int]) -> list[Routes]:
    """Keep the engine's routes in MoE layers up to `layer`; the live router decides above."""
    is_below = torch.tensor(own_layers) <= layer
    return [Routes(part.ids, part.known & is_below[:, None]) for part in routes]


def _absent_experts(
    batch: UpdateBatch, routes: Sequence[Routes], run: RoutingPass
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, by row and micro-batch, what the engine chose and the live router did not, and how
    many samples have the token."""
    for (index, row), live in run.recorded.items():
        known = routes[index].known[row]
        microbatch = batch.microbatches[index]
        uses = local_part(microbatch, microbatch.uses.here).double()
        engine_ids = routes[index].ids[row][known]  # [T known, K]
        is_live_too = (engine_ids[:, :, None] == live[known][:, None, :]).any(-1)
        is_absent = ~is_live_too
        of_experts = uses[known][:, None].expand_as(is_absent)
        yield row, engine_ids[is_absent], of_experts[is_absent]
