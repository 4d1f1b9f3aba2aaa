"""Which routes the passes of an RL step replay: the engine's from the store, or recorded ones."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from grpo_megatron.algorithms.batch import LossConstants
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.passes import compares_routers
from grpo_megatron.config.run import RunConfig
from grpo_megatron.device_copies import pinned, to_device, to_host
from grpo_megatron.errors import DataError
from grpo_megatron.routing.router_losses import balance_coefficients
from grpo_megatron.routing.shape import RouteStatus
from grpo_megatron.trainer.megatron.platform import device
from grpo_megatron.trainer.megatron.process_groups import is_first_with_samples, summed
from grpo_megatron.trainer.routing import router_replay
from grpo_megatron.trainer.routing.router_replay import RouteReplay, Routes, RoutingPass, local_part
from grpo_megatron.trainer.steps.microbatch import MicroBatch, UpdateBatch
from grpo_megatron.weights.gather import all_gathered


class RouteSource:
    """Builds the routing passes of one recorded step for the policy's routers; measures them.

    `replay` are the routers, `table` the recorded step with the engine's routes."""

    def __init__(self, config: RunConfig, replay: RouteReplay, table: SampleTable):
        self.config = config
        self.settings = config.routing
        self._replay = replay
        self._table = table
        self._by_status = np.zeros(len(RouteStatus), np.int64)
        self._measured: list[dict[str, float]] = []

    @property
    def active(self) -> bool:
        """Whether the model has routers at all."""
        return bool(self._replay.shape.layers)

    @property
    def holds_shift(self) -> bool:
        """Whether the loss asks how far the routers have shifted since the old policy."""
        return compares_routers(self.config, has_routers=self.active)

    @property
    def _counts_once(self) -> bool:
        """Whether a token that samples share counts once for all of them."""
        return self.settings.shared_tokens == "once"

    def from_store(self, batch: UpdateBatch) -> list[Routes] | None:
        """Read the engine's routes of this rank's tokens and layers; None where none are recorded.

        Raises DataError, on all ranks, where some cannot be used and `routing.on_missing` is
        "fail". Collective."""
        if not self.active or not (self.config.records_routes or self._table.route_shapes):
            return None
        found = [self._read(microbatch) for microbatch in batch.microbatches]
        self._check()
        return found

    def _read(self, microbatch: MicroBatch) -> Routes:
        """Read the routes of a micro-batch, whose last token of each sample has none.

        Samples that share a token have the same route there (`batching.shared_prompts`)."""
        replay = self._replay
        shape = self._replay.shape
        layers = replay.layers
        size = microbatch.num_tokens
        ids = np.zeros((len(layers), size, shape.experts_per_token), shape.dtype)
        known = np.zeros((len(layers), size), bool)
        counts_routes = is_first_with_samples()
        token_rows = microbatch.tree.token_rows
        for row, with_route in zip(microbatch.table_rows.tolist(), token_rows, strict=True):
            part, status = self._table.routes(row, layers, shape)
            ids[:, with_route[:-1]] = part
            known[:, with_route[:-1]] = status == RouteStatus.OK
            if counts_routes:
                self._by_status += np.bincount(status.ravel(), minlength=len(self._by_status))
        if ids.dtype == np.uint16:  # of which torch has no index operations
            ids = ids.astype(np.int16)
        own_ids = local_part(microbatch, torch.from_numpy(ids), 1)
        own_known = local_part(microbatch, torch.from_numpy(known), 1)
        return Routes(pinned(own_ids.contiguous()), pinned(own_known.contiguous()))

    def _check(self) -> None:
        """Stop all ranks together where any of them found a route that it may not do without."""
        if self.settings.replay != "r3" or self.settings.on_missing != "fail":
            return
        problems = sum(all_gathered(self._by_status))
        described = []
        for status in RouteStatus:
            if status != RouteStatus.OK and problems[status]:
                described.append(f"{problems[status]} {status.name.lower()}")
        if not described:
            return
        what = ", ".join(described)
        shapes = ", ".join(sorted(set(map(str, self._table.route_shapes)))) or "none"
        raise DataError(
            f"{what} of {problems.sum()} expert routes cannot be replayed (recorded: "
            f"{shapes}; model: {self._replay.shape})",
            where=str(self._table.directory),
            remedy="delete the step to sample it anew, or set routing.on_missing=live",
        )

    def finish(self, run: RoutingPass | None, batch: UpdateBatch) -> None:
        """Measure a finished pass. Collective."""
        if run is not None:
            self._measured.append(self._replay.finish(run, batch.microbatches))

    def metrics(self) -> dict[str, float]:
        """Return means over the passes, and how many routes were unusable. Collective."""
        values: dict[str, list[float]] = {}
        for found in self._measured:
            for name, value in found.items():
                values.setdefault(name, []).append(value)
        metrics = {name: float(np.mean(of_passes)) for name, of_passes in values.items()}
        counts = summed(torch.from_numpy(self._by_status).double())
        if counts.any():
            for status in RouteStatus:
                if status:
                    metrics[f"routing/{status.name.lower()}_routes"] = float(counts[status])
            metrics["routing/unusable_fraction"] = float(counts[1:].sum() / counts.sum())
        return metrics

    def old_pass(self, rollout: Sequence[Routes] | None) -> RoutingPass | None:
        """Build the old-policy pass, which records what later passes need.

        rollout: the engine's routes by micro-batch. None without routers."""
        if not self.active:
            return None
        compared = {}
        if rollout is not None:
            compared["rollout"] = rollout
        replayed: Sequence[Routes] | None = None
        if self.settings.replay == "r3":
            replayed = rollout
        return RoutingPass(
            replayed=replayed,
            compared=compared,
            record=True,
            record_log_probs=self.settings.keep_loss == "kl",
            record_scores=self.holds_shift,
            measure=True,
            counts_once=self._counts_once,
        )

    def training_pass(self, update: UpdateBatch, constants: LossConstants) -> RoutingPass | None:
        """Build a pass with gradients. None without routers; collective with a balance loss."""
        if not self.active:
            return None
        recorded = self._recorded(update)
        is_first_pass = update.old_routing is None
        replayed = None
        if self.settings.replay == "r2":
            replayed = recorded
        elif self.settings.replay == "r3":
            replayed = update.routes
        compared = {}
        if recorded is not None:
            compared["update"] = recorded
        if is_first_pass and update.routes is not None:
            compared["rollout"] = update.routes
        keep = self._keep(update, replayed, constants)
        return RoutingPass(
            replayed=replayed,
            compared=compared,
            measure=is_first_pass,
            keep=keep,
            counts_once=self._counts_once,
        )

    def token_pass(self, update: UpdateBatch) -> RoutingPass | None:
        """Build a pass with gradients of a loss that knows no old policy, such as distillation's.

        None where the live experts are taken and no others were recorded."""
        if not self.active or update.routes is None:
            return None
        replayed: Sequence[Routes] | None = None
        if self.settings.replay == "r3":
            replayed = update.routes
        return RoutingPass(
            replayed=replayed,
            compared={"rollout": update.routes},
            measure=True,
            counts_once=self._counts_once,
        )

    def margin_pass(self, update: UpdateBatch) -> RoutingPass | None:
        """Build a pass that only looks at the current weights, with the routes of training.

        None where these are the live ones."""
        if not self.active or self.settings.replay == "none":
            return None
        if self.settings.replay == "r3":
            return RoutingPass(replayed=update.routes)
        return RoutingPass(replayed=self._recorded(update))

    def shift_pass(self, update: UpdateBatch) -> RoutingPass:
        """Build a pass that compares the routers with those of the old policy's pass, with the
        routes of training."""
        assert update.old_routing is not None  # `holds_shift` asks for the pass
        run = self.margin_pass(update) or RoutingPass()
        run.shift_from = update.old_routing.recorded_scores
        return run

    def router_shift(self, run: RoutingPass, update: UpdateBatch) -> list[Tensor]:
        """`exp(-mean |log p - log p_old|)` at the policy tokens of each micro-batch, fp32 [n], as
        the pass `run` found it: the mean over the old policy's experts and all layers, at the
        position that predicts the token (RSPO, arXiv:2510.23027 v2). Collective."""
        sizes = [microbatch.num_tokens for microbatch in update.microbatches]
        total = torch.zeros(sum(sizes), device=device())
        for microbatch, part in zip(update.microbatches, total.split(sizes), strict=True):
            if microbatch.index in run.shift:  # else no layer of this stage has experts
                own = local_part(microbatch, torch.arange(microbatch.num_tokens))
                part[to_device(own, device())] = run.shift[microbatch.index].float()
        for group in (
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_context_parallel_group(),
            parallel_state.get_pipeline_model_parallel_group(),
        ):
            dist.all_reduce(total, group=group)
        agreement = (-total / len(self._replay.shape.layers)).exp()
        found = []
        for microbatch, part in zip(update.microbatches, agreement.split(sizes), strict=True):
            found.append(part[microbatch.predicting])
        return found

    def _recorded(self, update: UpdateBatch) -> list[Routes] | None:
        """Return the live choices of the old-policy pass, for all tokens; None before it."""
        if update.old_routing is None:
            return None
        num_layers = len(self._replay.layers)
        found = []
        for microbatch in update.microbatches:
            size = router_replay.count_own(microbatch)
            ids = torch.empty(
                num_layers, size, self._replay.shape.experts_per_token, dtype=self._replay.id_dtype
            )
            for row in range(num_layers):
                ids[row] = update.old_routing.recorded[microbatch.index, row]
            known = router_replay.is_real(microbatch).expand(num_layers, size).contiguous()
            found.append(Routes(pinned(ids), pinned(known)))
        return found

    def _keep(
        self, update: UpdateBatch, replayed: Sequence[Routes] | None, constants: LossConstants
    ) -> router_replay.KeepTerms | None:
        """Weigh the losses on the routers like the policy loss; None where there are none."""
        settings = self.settings
        if settings.keep_loss == "none" and settings.balance_weight == 0:
            return None
        by_domain = self._keep_weights()
        weights = []
        predicting = [microbatch.predicting for microbatch in update.microbatches]
        samples_of_tokens = [microbatch.sample for microbatch in update.microbatches]
        on_host = to_host([*predicting, *samples_of_tokens])  # the device is waited for once
        for number, microbatch in enumerate(update.microbatches):
            places = on_host[number]
            sample_of_token = on_host[len(predicting) + number]
            samples = torch.from_numpy(microbatch.episodes)
            of_sample = constants.weights[samples] * by_domain[constants.batch.domains[samples]]
            at_tokens = torch.zeros(microbatch.num_tokens)
            of_uses = of_sample[sample_of_token].float()
            if constants.batch.spoilt is not None:
                is_spoilt = constants.batch.spoilt[constants.batch.flat_index(samples)]
                of_uses[is_spoilt] = 0.0
            if self._counts_once:
                of_uses = of_uses / microbatch.uses.in_update[places]
            at_tokens.index_add_(0, places, of_uses)
            weights.append(pinned(local_part(microbatch, at_tokens).contiguous()))
        balance = None
        if settings.balance_weight > 0:
            assert replayed is not None  # rule routing_replay
            balance = self._balance(update, replayed)
        old_log_probs: Mapping[tuple[int, int], Tensor] = {}
        if update.old_routing is not None:
            old_log_probs = update.old_routing.recorded_log_probs
        return router_replay.KeepTerms(
            settings.keep_loss, weights, old_log_probs, balance, update.loss_scale
        )

    def _keep_weights(self) -> Tensor:
        """Return the weight of the keep-routing loss by domain, float64 [D]."""
        weights = []
        for domain in self.config.domains:
            weight = self.settings.keep_weight
            if domain.keep_routing_weight is not None:
                weight = domain.keep_routing_weight
            weights.append(weight)
        return torch.tensor(weights, dtype=torch.float64)

    def _balance(self, batch: UpdateBatch, replayed: Sequence[Routes]) -> Tensor:
        """Compute coefficients of the balance loss, fp32 [R, E]: this rank's layers. Collective."""
        replay = self._replay
        chosen = []
        for microbatch, routes in zip(batch.microbatches, replayed, strict=True):
            uses = microbatch.uses.weights(once=self._counts_once)
            own_uses = local_part(microbatch, uses).double()
            for row in range(len(replay.layers)):
                known = routes.known[row]
                ids = routes.ids[row][known]
                weights = own_uses[known].repeat_interleave(ids.size(1))
                chosen.append((row, ids.flatten(), weights))
        counts = replay.count_experts(chosen)
        num_tokens = float(batch.num_tokens)
        if self._counts_once:
            num_tokens = batch.num_distinct_tokens
        found = balance_coefficients(counts, self.settings.balance_weight, num_tokens)
        own_rows = [replay.shape.layers.index(layer) for layer in replay.layers]
        return found[own_rows].float()
