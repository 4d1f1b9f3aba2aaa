"""Seconds of the passes of an optimizer step, and a trace of one."""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from grpo_megatron import pretended_cuda
from grpo_megatron.algorithms.advantages.pipeline import advantages_of
from grpo_megatron.algorithms.aggregation import loss_constants
from grpo_megatron.algorithms.stats import Stats
from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.prove.computed.memory import peak_bytes
from grpo_megatron.prove.computed.recipe import recipe_of
from grpo_megatron.prove.requests import MeasuredSpeed, MeasureSpeed, Times
from grpo_megatron.trainer.megatron import platform
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.routing.route_source import RouteSource
from grpo_megatron.trainer.routing.router_replay import RoutingPass
from grpo_megatron.trainer.steps.microbatch import UpdateBatch
from grpo_megatron.trainer.steps.optimizer_step import (
    apply_gradients,
    compute_gradients,
    logprob_pass,
    prepare,
)
from grpo_megatron.trainer.steps.policy_gradient import PolicyGradientLoss
from grpo_megatron.trainer.steps.recorded_batch import objective_of, sample_batch
from grpo_megatron.weights.gather import all_gathered

_NUM_TOP_KERNELS = 20


def measure_speed(request: MeasureSpeed, layout: TrainerConfig) -> MeasuredSpeed:
    """Time all passes on each recorded step, the first time of each uncounted. Collective."""
    config = recipe_of(layout, replay="r2" if request.replays_routes else "none")
    policy = build_policy(request.hf, layout, config.optimizer)
    times: list[Times] = []
    optimizer_s = 0.0
    for directory in request.samples:
        step = _Step(config, policy, directory)
        if not times:  # it does not depend on the tokens
            optimizer_s = step.optimizer_s(request.repeats)
        times.append(step.times(request.repeats, optimizer_s))
    top_kernels: list[tuple[str, float, int]] = []
    if request.trace is not None:
        top_kernels = step.traced(request.trace)
    return MeasuredSpeed(times=times, top_kernels=top_kernels)


class _Step:
    """One recorded step, ready to be computed again and again."""

    def __init__(self, config: RunConfig, policy: Policy, directory: Path):
        self.policy = policy
        table = SampleTable(directory, verify=dist.get_rank() == 0)
        rows = np.arange(len(table))
        self.update = prepare(config.trainer, table, rows)
        self.routing: RoutingPass | None = None
        if config.routing.replay != "none":
            self.routing = _routes_of_live_routers(config, policy, table, self.update)
        objective = objective_of(config, {})
        batch = sample_batch(config, table)
        constants = loss_constants(
            objective, batch, advantages_of(objective, batch), self.update.episodes, 1024
        )
        self.loss = PolicyGradientLoss(
            config, objective, table, constants, replayed_masks=None, compare_engines=False
        )

    def times(self, repeats: int, optimizer_s: float) -> Times:
        """Median seconds of each pass, the optimizer's being known. Collective."""
        if platform.HAS_CUDA:
            torch.cuda.reset_peak_memory_stats()
        logprobs_s = _median_s(self._logprobs, repeats)
        train_s = _median_s(self._gradients, repeats)
        replayed_s = 0.0
        if self.routing is not None:
            replayed_s = _median_s(self._replayed_gradients, repeats)
        return Times(
            tokens=self.update.num_tokens,
            logprobs_s=logprobs_s,
            train_s=train_s,
            optimizer_s=optimizer_s,
            replayed_train_s=replayed_s,
            peak_bytes=max(all_gathered(peak_bytes())),
        )

    def _logprobs(self) -> None:
        logprob_pass(self.policy, self.update)

    def _gradients(self) -> Stats:
        return compute_gradients(self.policy, self.update, self.loss)

    def _replayed_gradients(self) -> None:
        compute_gradients(self.policy, self.update, self.loss, self.routing)

    def optimizer_s(self, repeats: int) -> float:
        """Return seconds of the optimizer alone: each time with new gradients, which are not
        timed."""
        seconds = []
        for repeat in range(repeats + 1):
            stats = self._gradients()
            found = _seconds(lambda stats=stats: apply_gradients(self.policy, stats))  # type: ignore[misc]
            if repeat > 0:
                seconds.append(found)
        return statistics.median(seconds)

    def _whole(self) -> None:
        apply_gradients(self.policy, self._gradients())

    def traced(self, path: Path) -> list[tuple[str, float, int]]:
        """Trace one optimizer step with Kineto; rank 0 writes it. Returns name, microseconds and
        calls of what took longest: kernels on a GPU, else operations of the CPU. Collective."""
        from torch.autograd import DeviceType  # type: ignore[attr-defined]
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        has_kernels = platform.HAS_CUDA and not pretended_cuda.is_wanted()
        if has_kernels:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            self._whole()
            _wait_for_device()
        if dist.get_rank() == 0:
            profiler.export_chrome_trace(str(path))
        rows = []
        for event in profiler.key_averages():
            described: Any = event
            is_kernel = described.device_type == DeviceType.CUDA
            if is_kernel != has_kernels:  # operations count their kernels' time once more
                continue
            micros = described.self_cpu_time_total
            if has_kernels:
                micros = described.self_device_time_total
            if micros > 0:
                rows.append((str(described.key), float(micros), int(described.count)))
        rows.sort(key=_micros, reverse=True)
        return rows[:_NUM_TOP_KERNELS]


def _micros(row: tuple[str, float, int]) -> float:
    return row[1]


def _routes_of_live_routers(
    config: RunConfig, policy: Policy, table: SampleTable, update: UpdateBatch
) -> RoutingPass | None:
    """Let a pass record what the routers choose, to be replayed. Other routes would give experts
    other loads, and so a grouped GEMM other work. Collective."""
    source = RouteSource(config, policy.replay, table)
    update.old_routing = source.old_pass(None)
    logprob_pass(policy, update, update.old_routing)
    return source.margin_pass(update)


def _wait_for_device() -> None:
    if platform.HAS_CUDA:
        torch.cuda.synchronize()


def _seconds(work: Callable[[], object]) -> float:
    """Return seconds until the slowest rank has done the work."""
    dist.barrier()
    _wait_for_device()
    started = time.perf_counter()
    work()
    _wait_for_device()
    return float(max(all_gathered(time.perf_counter() - started)))


def _median_s(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of `repeats` times, after one that warms up."""
    found = [_seconds(work) for _ in range(repeats + 1)]
    return statistics.median(found[1:])
