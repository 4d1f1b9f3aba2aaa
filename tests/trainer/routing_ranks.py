"""Routing cases that worker groups execute."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.errors import DataError
from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)
from grpo_megatron.trainer.megatron import policy as policy_module
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.routing.router_replay import (
    KeepTerms,
    RouterReplayHook,
    Routes,
    RoutingPass,
    local_part,
)
from grpo_megatron.trainer.steps.optimizer_step import (
    balance_metrics,
    logprob_pass,
    prepare,
    train_step,
)
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from tests.trainer.trainer_ranks import OPTIMIZER, Setup


def train(
    model: str,
    samples: str,
    layout: dict[str, Any],
    routing: dict[str, Any],
    *,
    gradients: bool = True,
    preset: str = "grpo",
    spy: bool = False,
) -> dict[str, Any]:
    """All updates of recorded rollouts under a `[routing]` table, and what routers really did.

    `spy`: the number of (layer, token) routes that were applied though another is stored.
    """
    setup = Setup(model, {**layout, **({"distributed_optimizer": False} if gradients else {})})
    config = setup.config(preset=preset, kl="none").model_copy(
        update={"routing": setup.routing(routing)}
    )
    table = SampleTable(Path(samples))
    with _spied(setup, table, spy) as seen:
        try:
            report = Training(config, setup.policy, References(config), table, {}).run(0, 3)
        except DataError as error:
            world: list = [None] * dist.get_world_size()
            dist.all_gather_object(world, str(error))
            return {"error": world}
    parts = setup.shards
    if gradients:
        scale = max(report.grad_norms[-1] / OPTIMIZER.clip_grad, 1.0)
        parts = [replace(s, tensor=s.tensor.main_grad * scale) for s in setup.shards]
    counts = torch.tensor(seen, dtype=torch.float64)
    dist.all_reduce(counts)
    batch = setup.batch(samples)
    return {
        "losses": report.losses,
        "norms": report.grad_norms,
        "metrics": report.metrics,
        "tensors": setup.gather(parts),
        "num_microbatches": len(batch.microbatches),
        "wrong_routes": int(counts[0]),
        "looked_at": int(counts[1]),
    }


def held_and_replayed() -> dict[str, Any]:
    """What a hook chooses for two tokens, of which only the first one has a route; and the loss
    that holds its router, one of two, to these choices."""
    routes = Routes(torch.tensor([[[3, 0], [3, 0]]]), torch.tensor([[True, False]]))
    keep = KeepTerms("set_mass", [torch.tensor([1.0, 0.5])], {}, None, 1.0)
    run = RoutingPass(replayed=[routes], keep=keep)
    replay = SimpleNamespace(
        running=run, position=[(0, True)], shape=SimpleNamespace(layers=(0, 1))
    )
    router = SimpleNamespace(
        layer_number=1,
        register_forward_hook=lambda hook: None,
        score_function="softmax",
        config=SimpleNamespace(moe_router_pre_softmax=True),
        expert_bias=None,
    )
    hook = RouterReplayHook(replay, router, 0, 0)

    def live(scores: torch.Tensor, topk: int, **groups: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.topk(topk)

    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]] * 2)
    values, ids = hook.get_replay_topk(scores, 2, None, None, live)
    return {"values": values.tolist(), "ids": ids.tolist(), "loss": float(run.keep_loss)}


def router_shift(
    model: str, samples: str, layout: dict[str, Any], replay: str
) -> dict[str, np.ndarray | None]:
    """What routers agree on with those from before all weights grew, of all policy tokens; with
    one rank also from whole distributions, recorded in passes of their own."""
    setup = Setup(model, layout)
    config = setup.config(preset="rspo").model_copy(
        update={"routing": setup.routing({"replay": replay, "on_missing": "fail"})}
    )
    table = SampleTable(Path(samples))
    training = Training(config, setup.policy, References(config), table, {})
    for update in training.updates:
        training._old_pass(update)
    old = [_whole_distributions(setup, update) for update in training.updates]
    for shard in setup.shards:
        shard.tensor.data.mul_(1.3)
    shift = sum(training._router_shift(update) for update in training.updates)
    if dist.get_world_size() > 1:
        return {"shift": shift.numpy(), "expected": None}
    expected = torch.zeros_like(shift)
    for update, before in zip(training.updates, old, strict=True):
        now = _whole_distributions(setup, update)
        for microbatch in update.microbatches:
            distances = []
            for row in range(len(setup.policy.replay.layers)):
                ids = update.routes[microbatch.index].ids[row].long()
                known = update.routes[microbatch.index].known[row][:, None]
                ids = torch.where(
                    known, ids, update.old_routing.recorded[microbatch.index, row].long()
                )
                change = now[microbatch.index, row] - before[microbatch.index, row]
                distances.append(change.gather(1, ids).abs().mean(1))
            agreement = (-torch.stack(distances).mean(0)).exp()
            index = training.batch.flat_index(torch.from_numpy(microbatch.episodes))
            expected[index] = agreement[microbatch.predicting]
    return {"shift": shift.numpy(), "expected": expected.numpy()}


def _whole_distributions(setup: Setup, update) -> dict[tuple[int, int], torch.Tensor]:
    """Log-probs of all experts, (micro-batch, layer row) -> [T, E], at the present weights."""
    run = RoutingPass(replayed=update.routes, record_log_probs=True)
    logprob_pass(setup.policy, update, run)
    return run.recorded_log_probs


@contextmanager
def _spied(setup: Setup, table: SampleTable, on: bool):
    """Compare every routing map, also of recomputed layers, with the store."""
    seen, replay = [0, 0], setup.policy.replay
    handles = []
    if on:
        source = replay.during
        batches: list = []

        @contextmanager
        def during(run, microbatches):
            batches[:] = microbatches
            with source(run, microbatches):
                yield

        replay.during = during
        for hook in replay.hooks:

            def look(router, inputs, output, hook=hook):
                if replay.running is None:  # a monitor's look at the weights
                    return
                index, _ = replay.position[hook.chunk]
                expected = _expected(table, batches[index], hook.layer, replay.shape)
                found = output[1]
                part = local_part(batches[index], expected)
                known = part.any(-1)
                seen[0] += int((part[known] != found[known]).any(-1).sum())
                seen[1] += int(known.sum())

            handles.append(hook._router.register_forward_hook(look))
    yield seen
    for handle in handles:
        handle.remove()


def _expected(table: SampleTable, microbatch, layer: int, shape) -> torch.Tensor:
    """bool [T, E] of the stored experts; rows without any are free."""
    expected = torch.zeros(microbatch.num_tokens, shape.num_experts, dtype=torch.bool)
    token_rows = microbatch.tree.token_rows
    for row, of_sample in zip(microbatch.table_rows.tolist(), token_rows, strict=True):
        ids, _ = table.routes(row, (layer,), shape)
        places = torch.from_numpy(of_sample[:-1])
        expected[places[:, None], torch.from_numpy(ids[0].astype(np.int64))] = True
    return expected


@contextmanager
def _other_routers(settings: dict[str, Any]):
    """Policies built inside have these fields of their TransformerConfig changed.

    A selection bias that comes so is not in the checkpoint.
    """
    original, all_shards = policy_module.transformer_config, policy_module.local_shards

    def changed(hf, layout):
        config = original(hf, layout)
        for name, value in settings.items():
            setattr(config, name, value)
        return config

    policy_module.transformer_config = changed
    policy_module.local_shards = lambda *args: [
        shard for shard in all_shards(*args) if not shard.name.endswith("expert_bias")
    ]
    try:
        yield
    finally:
        policy_module.transformer_config, policy_module.local_shards = original, all_shards


def router_gradients(
    model: str,
    samples: str,
    routings: dict[str, dict[str, Any]],
    epsilon: float,
    router: dict[str, Any],
) -> dict[str, list[tuple[float, float]]]:
    """By case and router: (autograd, finite difference) along a random direction of its weight.

    The policy's part of the loss is a weighted sum of log-probs: a GRPO loss is constant where
    the old policy is the current one. Old routers differ from the live ones.
    """
    with _other_routers(router):
        setup = Setup(model, {"distributed_optimizer": False, "max_tokens_per_microbatch": 4000})
    setup.policy.set_learning_rate(0.0)
    generator = torch.Generator().manual_seed(7)
    for hook in setup.policy.replay.hooks:
        if hook._router.expert_bias is not None:
            hook._router.expert_bias.copy_(torch.randn(8, generator=generator))
    return {
        name: _gradients(setup, SampleTable(Path(samples)), routing, epsilon, generator)
        for name, routing in routings.items()
    }


def _gradients(
    setup: Setup,
    table: SampleTable,
    routing: dict[str, Any],
    epsilon: float,
    generator: torch.Generator,
) -> list[tuple[float, float]]:
    policy = setup.policy
    config = setup.config(preset="grpo", kl="none").model_copy(
        update={"routing": setup.routing(routing)}
    )
    objective, rollouts = objective_of(config, {}), sample_batch(config, table)
    constants = loss_constants(
        objective, rollouts, advantages_of(objective, rollouts), torch.arange(len(table)), 20
    )
    update = prepare(setup.layout, table, np.arange(len(table)))
    source = RouteSource(config, policy.replay, table)
    update.routes = source.from_store(update)
    update.old_routing = source.old_pass(update.routes)
    logprob_pass(policy, update, update.old_routing)
    for hook in policy.replay.hooks:
        noise = torch.randn(hook._router.weight.shape, generator=generator)
        hook._router.weight.data.add_(0.1 * noise)

    def of_logprobs(microbatch, output):
        weights = torch.linspace(-1, 1, output.size(1)) * 0.3
        return (weights * output[0]).sum(), Stats()

    def once() -> tuple[float, float]:
        """The loss, and by how much clipping divided the gradients."""
        run = source.training_pass(update, constants)
        found = train_step(policy, update, of_logprobs, run).result()
        return found["loss/value"] + float(run.keep_loss), max(found["grad/norm"], 1.0)

    found = []
    for hook in policy.replay.hooks:
        weight = hook._router.weight
        direction = torch.randn(weight.shape, generator=generator)
        clipped = once()[1]
        analytic = float((weight.main_grad * direction).sum()) * clipped
        start = weight.data.clone()
        ends = []
        for distance in (1, -1, 2, -2):
            weight.data.copy_(start + distance * epsilon * direction)
            ends.append(once()[0])
        weight.data.copy_(start)
        found.append((analytic, _derivative(*ends, epsilon)))
    return found


def _derivative(ahead: float, behind: float, far: float, far_behind: float, step: float) -> float:
    """Return the derivative at 0 from values at one and two steps to both sides, so that errors of
    the second order cancel (Richardson's extrapolation): steps may be so large that the rounding of
    a float32 loss does not count."""
    near_difference = (ahead - behind) / (2 * step)
    far_difference = (far - far_behind) / (4 * step)
    return (4 * near_difference - far_difference) / 3


def loads_in_microbatches(
    model: str, samples: str, layout: dict[str, Any], routing: dict[str, Any]
) -> dict[str, Any]:
    """What the planned micro-batches really send to the ranks with the experts, by the store.

    `loads`: of every data-parallel rank, [micro-batches, layers, expert ranks], a shared token
    once; `metrics`: what the plan says of it; `table_rows`: the samples of each."""
    setup = Setup(model, layout)
    config = setup.config(preset="grpo", kl="none").model_copy(
        update={"routing": setup.routing(routing)}
    )
    table = SampleTable(Path(samples))
    training = Training(config, setup.policy, References(config), table, {})
    [update] = training.updates
    shape = setup.policy.replay.shape
    owners = setup.layout.expert_parallel_size
    loads = []
    for microbatch in update.microbatches:
        owner_of = np.full((len(shape.layers), microbatch.num_tokens, shape.experts_per_token), -1)
        for row, token_rows in zip(microbatch.table_rows, microbatch.tree.token_rows, strict=True):
            ids, _ = table.routes(int(row), shape.layers, shape)
            owner_of[:, token_rows[: ids.shape[1]]] = ids // (shape.num_experts // owners)
        counts = [(owner_of == owner).sum((1, 2)) for owner in range(owners)]
        loads.append(np.stack(counts, -1))
    own = (
        parallel_state.get_data_parallel_rank(),
        np.stack(loads),
        [microbatch.table_rows.tolist() for microbatch in update.microbatches],
    )
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, own)
    by_rank = {number: (found, rows) for number, found, rows in of_ranks}
    return {
        "loads": [by_rank[number][0] for number in sorted(by_rank)],
        "table_rows": [by_rank[number][1] for number in sorted(by_rank)],
        "metrics": balance_metrics(training.updates),
    }
