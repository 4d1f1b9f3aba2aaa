"""Which routes the passes of an RL step replay: the engine's from the store, or recorded ones."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.algorithms.step_terms import StepTerms
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import DataError
from grpo_megatron.routing.router_losses import balance_coefficients
from grpo_megatron.routing.shape import RouteStatus
from grpo_megatron.trainer import router_replay
from grpo_megatron.trainer.distributed import summed
from grpo_megatron.trainer.microbatch import MicroBatch
from grpo_megatron.trainer.router_replay import RouteReplay, Routes, RoutingPass, local_part
from grpo_megatron.trainer.step import PreparedBatch
from grpo_megatron.weights.gather import all_gathered


class RouteSource:
    """Builds the routing passes of one recorded step.

    Args:
        replay: The policy's routers."""

    def __init__(self, config: RunConfig, replay: RouteReplay, table: SampleTable):
        self.config, self._replay, self._table = config, replay, table
        self.settings = config.routing
        self._problems = np.zeros(len(RouteStatus), np.int64)
        self._num_routes = 0

    @property
    def active(self) -> bool:
        """Whether the model has routers at all."""
        return bool(self._replay.shape.layers)

    @property
    def needs_old_pass(self) -> bool:
        """Whether training needs what only an old-policy pass finds."""
        settings = self.settings
        held = settings.keep_loss != "none" or settings.balance_weight > 0
        return self.active and (settings.keep_loss == "kl" or (held and settings.replay == "r2"))

    def from_store(self, batch: PreparedBatch) -> list[Routes] | None:
        """The engine's routes of this rank's tokens and layers; None where none are recorded.

        Raises DataError: some cannot be used, and `routing.on_missing = "fail"`; on all ranks."""
        if not self.active or not (self.config.records_routes or self._table.has_routes):
            return None
        found = [self._read(microbatch) for microbatch in batch.microbatches]
        self._check()
        return found

    def _read(self, microbatch: MicroBatch) -> Routes:
        replay, shape = self._replay, self._replay.shape
        layers, size = replay.layers, microbatch.num_tokens
        ids = np.zeros((len(layers), size, shape.experts_per_token), shape.dtype)
        known = np.zeros((len(layers), size), bool)
        start = 0
        for row, length in zip(microbatch.table_rows.tolist(), microbatch.lengths, strict=True):
            part, status = self._table.routes(row, layers, shape)
            ids[:, start:start + length - 1] = part
            known[:, start:start + length - 1] = status == RouteStatus.OK
            self._problems += np.bincount(status.ravel(), minlength=len(self._problems))
            self._num_routes += status.size
            start += length
        ids = torch.from_numpy(ids.astype(np.int16) if ids.dtype == np.uint16 else ids)
        return Routes(local_part(ids, 1).contiguous(),
                      local_part(torch.from_numpy(known), 1).contiguous())

    def _check(self) -> None:
        """Stop all ranks together where any of them found a route that it may not do without."""
        if self.settings.replay != "r3" or self.settings.on_missing != "fail":
            return
        problems = sum(all_gathered(self._problems))
        if problems[1:].any():
            what = ", ".join(f"{problems[s]} {s.name.lower()}" for s in RouteStatus
                             if s and problems[s])
            shapes = ", ".join(sorted({str(s) for s in self._table.route_shapes}))
            raise DataError(
                f"{what} of {problems.sum()} expert routes cannot be replayed "
                f"(recorded: {shapes or 'none'}; model: {self._replay.shape})",
                where=str(self._table.directory),
                remedy="delete the step to sample it anew, or set routing.on_missing=live")

    def metrics(self) -> dict[str, float]:
        """Routes by status; the last token of a sample has none and is not counted. Collective."""
        counts = summed(torch.from_numpy(np.append(self._problems, self._num_routes)).double())
        if counts[-1] == 0:
            return {}
        out = {f"routing/{s.name.lower()}_routes": float(counts[s]) for s in RouteStatus if s}
        live = float(counts[1:-1].sum() / counts[-1])
        return out | {"routing/unusable_fraction": live}

    def old_pass(self, rollout: Sequence[Routes] | None) -> RoutingPass | None:
        """The old-policy pass: what later passes need is recorded."""
        if not self.active:
            return None
        return RoutingPass(
            replayed=rollout if self.settings.replay == "r3" else None,
            compared={"rollout": rollout} if rollout is not None else {},
            record=True, record_log_probs=self.settings.keep_loss == "kl", measure=True)

    def training_pass(self, batch: PreparedBatch, rollout: Sequence[Routes] | None,
                      old: RoutingPass | None, objective: Objective,
                      terms: StepTerms) -> RoutingPass | None:
        """A pass with gradients; `old` is what the old-policy pass was, if there was one."""
        if not self.active:
            return None
        recorded = self._recorded(batch, old) if old is not None else None
        replayed = {"none": None, "r2": recorded, "r3": rollout}[self.settings.replay]
        compared = {"update": recorded} if recorded is not None else {}
        if old is None and rollout is not None:
            compared["rollout"] = rollout
        return RoutingPass(replayed=replayed, compared=compared, measure=old is None,
                           keep=self._keep(batch, replayed, old, objective, terms))

    def margin_pass(self, batch: PreparedBatch, rollout: Sequence[Routes] | None,
                    old: RoutingPass | None) -> RoutingPass | None:
        """A look at the current weights with the routes of training, nothing measured."""
        if not self.active or self.settings.replay == "none":
            return None
        recorded = self._recorded(batch, old) if old is not None else None
        return RoutingPass(replayed=rollout if self.settings.replay == "r3" else recorded)

    def _recorded(self, batch: PreparedBatch, old: RoutingPass) -> list[Routes]:
        """The live choices of the old-policy pass, for all tokens."""
        rows = range(len(self._replay.taps))
        found = []
        for microbatch in batch.microbatches:
            ids = [old.recorded[microbatch.index, row] for row in rows]
            size = local_part(microbatch.tokens[0]).numel()
            stacked = torch.stack(ids) if ids else torch.empty(
                0, size, self._replay.shape.experts_per_token, dtype=self._replay.id_dtype)
            real = torch.arange(size) < router_replay.count_real(microbatch)
            found.append(Routes(stacked, real.expand(len(ids), size)))
        return found

    def _keep(self, batch: PreparedBatch, replayed: Sequence[Routes] | None,
              old: RoutingPass | None, objective: Objective,
              terms: StepTerms) -> router_replay.KeepTerms | None:
        settings = self.settings
        if settings.keep_loss == "none" and settings.balance_weight == 0:
            return None
        by_domain = torch.tensor([
            settings.keep_weight if d.keep_routing_weight is None else d.keep_routing_weight
            for d in self.config.domains], dtype=torch.float64)
        weights = []
        for microbatch in batch.microbatches:
            rows = torch.from_numpy(microbatch.table_rows)
            of_sample = terms.weights[rows] * by_domain[terms.batch.domains[rows]]
            at_tokens = torch.zeros(microbatch.num_tokens)
            at_tokens[microbatch.rows.cpu()] = of_sample[microbatch.sample.cpu()].float()
            weights.append(local_part(at_tokens))
        balance = self._balance(batch, replayed) if settings.balance_weight > 0 else None
        return router_replay.KeepTerms(
            settings.keep_loss, weights, old.recorded_log_probs if old else {}, balance,
            batch.loss_scale)

    def _balance(self, batch: PreparedBatch, replayed: Sequence[Routes]) -> Tensor:
        replay = self._replay
        counts = replay.count_experts((row, routes.ids[row][routes.known[row]].flatten())
                                      for routes in replayed for row in range(len(replay.layers)))
        found = balance_coefficients(counts, self.settings.balance_weight, batch.num_tokens)
        return found[[replay.shape.layers.index(layer) for layer in replay.layers]].float()


def merged(passes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of the updates' passes: their means."""
    names = dict.fromkeys(name for metrics in passes for name in metrics)
    return {name: float(np.mean([m[name] for m in passes if name in m])) for name in names}
