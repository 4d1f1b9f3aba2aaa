"""Which routes the passes of an RL step replay: the engine's from the store, or recorded ones."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

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
from grpo_megatron.trainer.step import PreparedBatch, Update
from grpo_megatron.weights.gather import all_gathered


class RouteSource:
    """Builds the routing passes of one recorded step for the policy's routers; measures them."""

    def __init__(self, config: RunConfig, replay: RouteReplay, table: SampleTable):
        self.config, self._replay, self._table = config, replay, table
        self.settings = config.routing
        self._by_status = np.zeros(len(RouteStatus), np.int64)
        self._measured: list[dict[str, float]] = []

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
        if not self.active or not (self.config.records_routes or self._table.route_shapes):
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
            self._by_status += np.bincount(status.ravel(), minlength=len(self._by_status))
            start += length
        ids = torch.from_numpy(ids.astype(np.int16) if ids.dtype == np.uint16 else ids)
        return Routes(local_part(ids, 1).contiguous(),
                      local_part(torch.from_numpy(known), 1).contiguous())

    def _check(self) -> None:
        """Stop all ranks together where any of them found a route that it may not do without."""
        if self.settings.replay != "r3" or self.settings.on_missing != "fail":
            return
        problems = sum(all_gathered(self._by_status))
        if problems[1:].any():
            what = ", ".join(f"{problems[s]} {s.name.lower()}" for s in RouteStatus
                             if s and problems[s])
            shapes = ", ".join(sorted({str(s) for s in self._table.route_shapes}))
            raise DataError(
                f"{what} of {problems.sum()} expert routes cannot be replayed (recorded: "
                f"{shapes or 'none'}; model: {self._replay.shape})",
                where=str(self._table.directory),
                remedy="delete the step to sample it anew, or set routing.on_missing=live")

    def finish(self, run: RoutingPass | None, batch: PreparedBatch) -> None:
        """Measure a finished pass. Collective."""
        if run is not None:
            self._measured.append(self._replay.finish(run, batch.microbatches))

    def metrics(self) -> dict[str, float]:
        """Means over the passes, routes by status (a sample's last token has none). Collective."""
        out = {name: float(np.mean([found[name] for found in self._measured if name in found]))
               for name in dict.fromkeys(name for found in self._measured for name in found)}
        counts = summed(torch.from_numpy(self._by_status).double())
        if counts.any():
            out |= {f"routing/{s.name.lower()}_routes": float(counts[s]) for s in RouteStatus if s}
            out["routing/unusable_fraction"] = float(counts[1:].sum() / counts.sum())
        return out

    def old_pass(self, rollout: Sequence[Routes] | None) -> RoutingPass | None:
        """The old-policy pass: what later passes need is recorded."""
        if not self.active:
            return None
        compared = {"rollout": rollout} if rollout is not None else {}
        return RoutingPass(rollout if self.settings.replay == "r3" else None, compared, record=True,
                           record_log_probs=self.settings.keep_loss == "kl", measure=True)

    def training_pass(self, update: Update, terms: StepTerms) -> RoutingPass | None:
        """A pass with gradients."""
        if not self.active:
            return None
        recorded, first = self._recorded(update), update.old_routing is None
        replayed = {"none": None, "r2": recorded, "r3": update.routes}[self.settings.replay]
        compared = {"update": recorded} if recorded is not None else {}
        if first and update.routes is not None:
            compared["rollout"] = update.routes
        return RoutingPass(replayed=replayed, compared=compared, measure=first,
                           keep=self._keep(update, replayed, terms))

    def margin_pass(self, update: Update) -> RoutingPass | None:
        """A look at the current weights with the routes of training, nothing measured."""
        if not self.active or self.settings.replay == "none":
            return None
        return RoutingPass(replayed=update.routes if self.settings.replay == "r3"
                           else self._recorded(update))

    def _recorded(self, update: Update) -> list[Routes] | None:
        """The live choices of the old-policy pass, for all tokens."""
        if update.old_routing is None:
            return None
        rows, found = range(len(self._replay.taps)), []
        for microbatch in update.batch.microbatches:
            ids = [update.old_routing.recorded[microbatch.index, row] for row in rows]
            size = local_part(microbatch.tokens[0]).numel()
            stacked = torch.stack(ids) if ids else torch.empty(
                0, size, self._replay.shape.experts_per_token, dtype=self._replay.id_dtype)
            real = torch.arange(size) < router_replay.count_real(microbatch)
            found.append(Routes(stacked, real.expand(len(ids), size)))
        return found

    def _keep(self, update: Update, replayed: Sequence[Routes] | None,
              terms: StepTerms) -> router_replay.KeepTerms | None:
        settings, batch, old = self.settings, update.batch, update.old_routing
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
        return router_replay.KeepTerms(settings.keep_loss, weights,
            old.recorded_log_probs if old else {}, balance, batch.loss_scale)

    def _balance(self, batch: PreparedBatch, replayed: Sequence[Routes]) -> Tensor:
        replay = self._replay
        counts = replay.count_experts((row, routes.ids[row][routes.known[row]].flatten())
                                      for routes in replayed for row in range(len(replay.layers)))
        found = balance_coefficients(counts, self.settings.balance_weight, batch.num_tokens)
        return found[[replay.shape.layers.index(layer) for layer in replay.layers]].float()
