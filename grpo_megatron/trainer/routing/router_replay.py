"""Replayed routes in Megatron's routers, and what is measured and held there.

A `RouterReplayHook` stands where Megatron looks for its own replay object
(`TopKRouter.router_replay`), one per MoE layer. Megatron's (0.16.1, moe/router_replay.py) is one
list without layer numbers and takes the routes of whichever micro-batch was forwarded last. A hook
asks which one its chunk works on: `enter` says so for the forward, a hook on the chunk's output for
the backward.

Shapes: T tokens of a micro-batch, K experts per token, E experts, R MoE layers; on this rank."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from grpo_megatron.device_copies import on_the_way_to_host, to_device, wait_for_copies
from grpo_megatron.routing import router_losses
from grpo_megatron.routing.agreement import RoutingSums, agreement
from grpo_megatron.routing.shape import RouteShape
from grpo_megatron.trainer.megatron.layer_specs import moe_layers
from grpo_megatron.trainer.megatron.platform import device
from grpo_megatron.trainer.megatron.process_groups import summed
from grpo_megatron.trainer.steps.microbatch import MicroBatch


@dataclass(frozen=True)
class Routes:
    """Experts of one micro-batch in this rank's layers: on the host, pinned beside a GPU."""

    ids: Tensor  # uint8 or int16 [R, T, K]
    known: Tensor  # bool [R, T]; False: the live router decides

    def of_row(self, row: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Copy ids [T, K] and known [T] of one layer to `device`."""
        return (
            self.ids[row].to(device, non_blocking=True),
            self.known[row].to(device, non_blocking=True),
        )


@dataclass(frozen=True)
class ExpertScores:
    """The experts that tokens of one micro-batch took in one layer, on the host."""

    ids: Tensor  # uint8 or int16 [T, K]
    log_probs: Tensor  # fp32 [T, K], of the live router


@dataclass(frozen=True)
class KeepTerms:
    """Losses on the routers, weighed beforehand like the policy loss."""

    kind: str  # of RoutingConfig.keep_loss
    weights: Sequence[Tensor]  # per micro-batch fp32 [T]; 0 for tokens that are not held
    old_log_probs: Mapping[tuple[int, int], Tensor]  # (micro-batch, layer row) -> [T, E]
    balance: Tensor | None  # [R, E], see `balance_coefficients`
    scale: float  # undoes Megatron's averages, like that of the policy loss


@dataclass
class RoutingPass:
    """What one pass over the micro-batches replays, compares, records and holds.

    After the pass, `recorded` and `recorded_log_probs` hold the live router's choices."""

    replayed: Sequence[Routes] | None = None
    compared: Mapping[str, Sequence[Routes]] = field(default_factory=dict)
    record: bool = False
    record_log_probs: bool = False
    record_scores: bool = False
    shift_from: Mapping[tuple[int, int], ExpertScores] | None = None
    measure: bool = False  # load and entropy
    keep: KeepTerms | None = None
    recorded: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    recorded_log_probs: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    recorded_scores: dict[tuple[int, int], ExpertScores] = field(default_factory=dict)
    """(micro-batch, layer row) -> the experts that were taken, with `record_scores`."""
    shift: dict[int, Tensor] = field(default_factory=dict)
    """Micro-batch -> fp32 [T]: how far the experts of `shift_from` are from their scores there,
    `mean |log p - log p_old|`, added up over this rank's layers."""
    keep_loss: Tensor | float = 0.0
    sums: RoutingSums | None = None
    flipped: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """(comparison, micro-batch) -> 0 or 1 [2, T]: flipped in a layer of this rank, compared."""
    counts_once: bool = False
    """Whether a shared token counts once in sums over tokens (`RoutingConfig.shared_tokens`)."""


class RouterReplayHook:
    """Chooses the experts of one MoE layer, in place of Megatron's replay object.

    `chunk` is the model chunk of the layer, `row` its place among this rank's MoE layers, `layer`
    its number in the model, from 0."""

    def __init__(self, replay: "RouteReplay", router: TopKRouter, chunk: int, row: int):
        self.replay = replay
        self.chunk = chunk
        self.row = row
        self._router = router
        self._loss: Tensor | None = None
        self.layer = router.layer_number - 1
        router.router_replay = self
        router.register_forward_hook(self._attach)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Choose experts by scores [T, E]; return their scores and ids, [T, K] both.

        Megatron's `topk_routing_with_score_function` calls this; `compute` is the live choice."""
        values, live = compute(scores, topk, num_groups=num_groups, group_topk=group_topk)
        run = self.replay.running
        if run is None:
            return values, live
        index, forward = self.replay.position[self.chunk]
        chosen = live
        if run.replayed is not None:
            ids, known = run.replayed[index].of_row(self.row, live.device)
            chosen = torch.where(known[:, None], ids.long(), live)
            values = scores.gather(1, chosen)
        if forward:
            self._observe(run, index, scores.detach(), live, chosen)
        if run.keep is not None:
            self._hold(run, run.keep, index, scores, chosen, forward)
        return values, chosen

    def log_probs(self, scores: Tensor) -> Tensor:
        """Compute log-probs of the experts, fp32 [T, E], by what the router's scores are."""
        router = self._router
        kind = "logits"
        if router.score_function == "sigmoid":
            kind = "sigmoid"
        elif router.config.moe_router_pre_softmax:
            kind = "softmax"
        return router_losses.log_probs(scores, kind, router.expert_bias)

    def _observe(
        self, run: RoutingPass, index: int, scores: Tensor, live: Tensor, chosen: Tensor
    ) -> None:
        """Record and measure what the router does in the forward of micro-batch `index`."""
        if run.record:
            narrow = live.to(self.replay.id_dtype)
            run.recorded[index, self.row] = on_the_way_to_host(narrow)
        if run.record_log_probs:
            log_probs = self.log_probs(scores)
            run.recorded_log_probs[index, self.row] = on_the_way_to_host(log_probs)
        if run.record_scores:
            taken = self.log_probs(scores).gather(1, chosen)
            run.recorded_scores[index, self.row] = ExpertScores(
                on_the_way_to_host(chosen.to(self.replay.id_dtype)), on_the_way_to_host(taken)
            )
        if run.shift_from is not None:
            old = run.shift_from[index, self.row]
            ids = to_device(old.ids, scores.device).long()
            now = self.log_probs(scores).gather(1, ids)
            distance = (now - to_device(old.log_probs, scores.device)).abs().mean(1)
            run.shift[index] = run.shift.get(index, torch.zeros_like(distance)) + distance
        if run.sums is None:
            return
        weights = self.replay.weights[index]
        row = self.replay.shape.layers.index(self.layer)
        if run.measure:
            log_p = self.log_probs(scores)
            run.sums.add_load(row, chosen, -(log_p.exp() * log_p).sum(-1), weights)
        for name, all_routes in run.compared.items():
            ids, known = all_routes[index].of_row(self.row, live.device)
            flips, jaccard = agreement(ids, live)
            run.sums.add_comparison(name, row, flips, jaccard, weights * known)
            flags = torch.stack([(flips > 0) & known, known]).long()
            run.flipped[name, index] = run.flipped.get((name, index), 0) | flags

    def _hold(
        self,
        run: RoutingPass,
        keep: KeepTerms,
        index: int,
        scores: Tensor,
        chosen: Tensor,
        forward: bool,
    ) -> None:
        """Compute the losses on the router, which `_attach` joins to the layer's output."""
        weights = to_device(keep.weights[index], scores.device)
        log_p = self.log_probs(scores)
        loss = scores.new_zeros((), dtype=torch.float32)
        if keep.kind == "kl":
            old = to_device(keep.old_log_probs[index, self.row], scores.device)
            loss = loss + (weights * router_losses.kl(log_p, old)).sum()
        elif keep.kind != "none":
            loss = loss + (weights * getattr(router_losses, keep.kind)(log_p, chosen)).sum()
        loss = loss / len(self.replay.shape.layers)
        if keep.balance is not None:
            of_tokens = log_p.exp() @ keep.balance[self.row].to(log_p)
            loss = loss + (self.replay.weights[index] * of_tokens).sum()
        if forward:
            run.keep_loss = run.keep_loss + loss.detach().double()
        self._loss = None
        if torch.is_grad_enabled():
            self._loss = loss * keep.scale

    def _attach(self, router: TopKRouter, inputs: Any, output: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward hook: the loss joins the backward through the gates."""
        loss = self._loss
        self._loss = None
        if loss is None:
            return output
        gates, routing_map = output
        return MoEAuxLossAutoScaler.apply(gates, loss), routing_map


class RouteReplay:
    """All routers of this rank. Only passes that run inside `during` are touched."""

    def __init__(self, models: Sequence[torch.nn.Module], config: TransformerConfig):
        self.shape = RouteShape(
            moe_layers(config), config.moe_router_topk, config.num_moe_experts or 0
        )
        self.id_dtype = torch.int16
        if self.shape.num_experts <= 256:
            self.id_dtype = torch.uint8
        self.running: RoutingPass | None = None
        self.position: list[tuple[int, bool]] = [(0, True)] * len(models)
        """By chunk: the micro-batch that it works on, and whether this is its forward."""
        self.weights: list[Tensor] = []
        """By micro-batch: what this rank's tokens count in sums over samples, fp32 [T]; padding
        0."""
        self.hooks: list[RouterReplayHook] = []
        self.layers: list[int] = []
        """Layer numbers, from 0, of this rank's rows."""
        self._chunk_of: dict[int, int] = {}
        for chunk, model in enumerate(models):
            self._chunk_of[id(model)] = chunk
            for module in model.modules():
                if isinstance(module, TopKRouter):
                    hook = RouterReplayHook(self, module, chunk, row=len(self.hooks))
                    self.hooks.append(hook)
                    self.layers.append(hook.layer)

    @contextmanager
    def during(self, run: RoutingPass | None, microbatches: Sequence[MicroBatch]) -> Iterator[None]:
        """Let the routers follow `run` inside the block; None leaves them alone."""
        if run is not None and (run.measure or run.compared):
            run.sums = RoutingSums(
                self.shape.layers, self.shape.num_experts, list(run.compared), device()
            )
        self.running = run
        self.weights = []
        if run is not None:
            for microbatch in microbatches:
                weights = local_part(microbatch, microbatch.uses.weights(once=run.counts_once))
                self.weights.append(to_device(weights, device()))
        try:
            yield
        finally:
            self.running = None
            if run is not None and (run.record or run.record_log_probs or run.record_scores):
                wait_for_copies()

    def enter(self, model: torch.nn.Module, index: int) -> None:
        """Say that the chunk `model` is about to compute micro-batch `index`."""
        self.position[self._chunk_of[id(model)]] = (index, True)

    def leave(self, model: torch.nn.Module, index: int, output: Tensor) -> None:
        """Say that the forward of micro-batch `index` is over.

        In the backward of `output`, layers may compute it again."""
        chunk = self._chunk_of[id(model)]

        def back(gradient: Tensor) -> None:
            self.position[chunk] = (index, False)

        if self.running is not None and output.requires_grad:
            output.register_hook(back)

    def count_experts(self, chosen: Iterable[tuple[int, Tensor, Tensor]]) -> Tensor:
        """Count how often rows of this rank chose each expert: fp64 [L, E] of all ranks.

        chosen: rows, integer ids [n] that were chosen there, and how often each counts, fp64 [n].
        Collective."""
        layers = self.shape.layers
        num_experts = self.shape.num_experts
        counts = torch.zeros(len(layers), num_experts, dtype=torch.float64)
        for row, ids, weights in chosen:
            found = torch.bincount(ids, weights, minlength=num_experts)
            counts[layers.index(self.layers[row])] += found
        return summed(counts)

    def finish(self, run: RoutingPass, microbatches: Sequence[MicroBatch]) -> dict[str, float]:
        """Return the metrics of a finished pass, equal on all ranks. Collective."""
        if run.sums is None:
            return {}
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        for name, total in zip(run.compared, run.sums.any_layer, strict=True):
            flags_by_microbatch = []
            weights = []
            for microbatch in microbatches:
                size = count_own(microbatch)
                none_flipped = torch.zeros(2, size, dtype=torch.int64, device=device())
                flags = run.flipped.get((name, microbatch.index), none_flipped)
                flags_by_microbatch.append(flags)
                of_tokens = local_part(microbatch, microbatch.uses.weights(once=run.counts_once))
                weights.append(to_device(of_tokens, flags.device))
            flags = torch.cat(flags_by_microbatch, 1)
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=pipeline)
            if parallel_state.is_pipeline_last_stage(ignore_virtual=True):
                total += (flags * torch.cat(weights).double()).sum(1)
        for tensor in (run.sums.load, run.sums.entropy, run.sums.compared, run.sums.any_layer):
            dist.all_reduce(tensor)
        metrics = run.sums.result()
        if run.keep is not None:
            loss = torch.as_tensor(run.keep_loss, dtype=torch.float64)
            metrics["routing/loss"] = float(summed(loss))
        return metrics


def count_own(microbatch: MicroBatch) -> int:
    """Count the tokens of a micro-batch that this rank's routers see, with padding."""
    group = parallel_state.get_tensor_model_parallel_group()
    return len(microbatch.own_tokens) // int(group.size())


def is_real(microbatch: MicroBatch) -> Tensor:
    """Say which of this rank's tokens are no padding: bool [T], on the host."""
    return local_part(microbatch, torch.arange(microbatch.num_tokens) < microbatch.num_real)


def local_part(microbatch: MicroBatch, tensor: Tensor, dim: int = 0) -> Tensor:
    """Take this rank's part, along `dim`, of a tensor over all T tokens of a micro-batch.

    tensor: on the host, T along `dim`. With TP, MoE needs sequence parallelism."""
    if not microbatch.split.is_whole:
        tensor = tensor.index_select(dim, microbatch.own_tokens)
    group = parallel_state.get_tensor_model_parallel_group()
    parts = tensor.chunk(int(group.size()), dim)
    return parts[int(group.rank())]
