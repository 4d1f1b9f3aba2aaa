"""Log-probs of a recorded step under several routings, for the mismatch report."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpo_megatron.batching.columns import write_columns
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.policy import Policy
from grpo_megatron.trainer.rollouts import sample_batch
from grpo_megatron.trainer.route_source import RouteSource
from grpo_megatron.trainer.router_replay import Routes, RoutingPass
from grpo_megatron.trainer.step import gather_tokens, logprob_pass, prepare, untruncated


def logprob_gaps(config: RunConfig, policy: Policy, table: SampleTable, to: Path, *,
                 by_layer: bool) -> dict[str, Any]:
    """Passes over all samples at the present weights; collective.

    Writes columns, fp64 [n] over the table's completion tokens: `rollout` (the engine's), `live`
    (own routing), `unmasked` (the same without truncation, where there was one), `through_N`
    (engine routes in MoE layers up to number N, each or just the last); `flipped` fp64 [E, L]: uses
    of an expert by the engine only. Returns routing metrics; without routes nothing of them."""
    batch = prepare(config.trainer, table, np.arange(len(table)))
    rollouts, replay = sample_batch(config, table), policy.replay
    source = RouteSource(config, replay, table)
    routes = source.from_store(batch) if table.route_shapes else None
    run = routes and RoutingPass(compared={"rollout": routes}, record=True, measure=True)

    def gathered(values: list[Tensor]) -> np.ndarray:
        return gather_tokens(rollouts, [batch], [values]).double().numpy()

    live = logprob_pass(policy, batch, run)
    columns = {"live": gathered([out[0] for out in live]), "rollout": np.concatenate(
        [table.completion(row)[1] for row in range(len(table))]).astype(np.float64)}
    if config.rollout.truncation:
        columns["unmasked"] = gathered([untruncated(out) for out in live])
    metrics = {}
    if run is not None:
        source.finish(run, batch)
        metrics = source.metrics()
        columns["flipped"] = replay.count_experts(_absent_experts(routes, run)).T.numpy()
        layers = replay.shape.layers
        for layer in layers if by_layer else layers[-1:]:
            # the engine's routes up to this layer, the live router above
            below = torch.tensor([number <= layer for number in replay.layers], dtype=torch.bool)
            columns[f"through_{layer}"] = gathered([out[0] for out in logprob_pass(
                policy, batch, RoutingPass(replayed=[
                    Routes(part.ids, part.known & below[:, None]) for part in routes]))])
    if dist.get_rank() == 0:
        write_columns(to, columns)
    return metrics


def _absent_experts(routes: Sequence[Routes], run: RoutingPass) -> Iterator[tuple[int, Tensor]]:
    """By row and micro-batch: what the engine chose and the live router did not."""
    for (index, row), live in run.recorded.items():
        known = routes[index].known[row]
        ids = routes[index].ids[row][known]
        yield row, ids[~(ids[:, :, None] == live[known][:, None, :]).any(-1)]
