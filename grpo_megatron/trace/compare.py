"""What the plan says of a rank beside what its trace saw."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import bytes_of_domains, has_frozen_routers, workload_of
from grpo_megatron.plan.rank_bytes import static_bytes
from grpo_megatron.plan.step_memory import step_bytes
from grpo_megatron.plan.traffic import (
    Key,
    Step,
    Traffic,
    forward_traffic,
    gradient_traffic,
    update_traffic,
)
from grpo_megatron.plan.weights import Sizes, weights_of_chunk
from grpo_megatron.trace.loads import Load, stage_and_place
from grpo_megatron.trace.step import RankTrace

PEAK_TOLERANCE = 0.05
"""Of the peak; everything else must agree to the byte."""


@dataclass(frozen=True)
class Comparison:
    """One number from both sides."""

    what: str
    planned: int
    traced: int
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether the plan is right."""
        return abs(self.planned - self.traced) <= self.tolerance * self.traced

    @property
    def difference(self) -> float:
        """Planned minus traced, as a share of the traced; infinite where nothing was traced."""
        if self.planned == self.traced:
            return 0.0
        if self.traced == 0:
            return float("inf")
        return self.planned / self.traced - 1


def comparisons_of(config: RunConfig, sizes: Sizes, trace: RankTrace) -> list[Comparison]:
    """Compare static bytes, the peak and the bytes of collectives of one rank."""
    static = _planned_static(config, sizes, trace.rank)
    found = []
    for part, planned in static.items():
        found.append(Comparison(part, planned, trace.static.parts.get(part, 0)))
    found += _shapes(sizes, trace)
    moving = _planned_moving(config, sizes, trace.load, trace.stage)
    planned_peak = sum(static.values()) + sum(moving.values())
    found.append(Comparison("peak", planned_peak, trace.peak.bytes, PEAK_TOLERANCE))
    found += _traffic(config, sizes, trace)
    return found


def _planned_static(config: RunConfig, sizes: Sizes, rank: int) -> dict[str, int]:
    stage, place = stage_and_place(config.trainer, rank)
    parts = static_bytes(
        sizes, stage, place, frozen_routers=has_frozen_routers(config), overlaps=_overlaps(config)
    )
    return parts | bytes_of_domains(config, sizes, stage)


def _planned_moving(config: RunConfig, sizes: Sizes, load: Load, stage: int) -> dict[str, int]:
    """Return bytes of a step by part, without what lies outside of tensors."""
    work = workload_of(config, sizes)
    work["tokens"] = load.tokens
    work["num_microbatches"] = load.num_microbatches
    parts = step_bytes(sizes, stage, **work)
    del parts["libraries"]
    return parts


def _shapes(sizes: Sizes, trace: RankTrace) -> Iterator[Comparison]:
    """Compare parameters one by one, and describe the first that differs."""
    for chunk, real in enumerate(trace.static.shapes):
        planned = [weight.numel for weight in weights_of_chunk(sizes, trace.stage, chunk)]
        name = f"parameters of chunk {chunk}"
        yield Comparison(name, len(planned), len(real))
        for number, (expected, found) in enumerate(zip(planned, real, strict=False)):
            if expected != found:
                yield Comparison(f"{name}: elements of number {number}", expected, found)
                break


def _traffic(config: RunConfig, sizes: Sizes, trace: RankTrace) -> Iterator[Comparison]:
    """Compare the bytes of collectives by phase, kind, group and type; scalars are left out."""
    planned = _planned_traffic(config, sizes, trace)
    traced: Counter[tuple[str, Key]] = Counter()
    for call in trace.collectives:
        is_scalar = math.prod(call.shape) == 1
        if call.phase in _COMPARED_PHASES and not is_scalar:
            traced[call.phase, (call.kind, call.group, call.dtype)] += call.bytes
    for phase, key in sorted({*planned, *traced}):
        what = f"{phase}: {' '.join(key)}"
        yield Comparison(what, planned[phase, key], traced[phase, key])


_COMPARED_PHASES = ("log-probs", "gradients", "update")


def _planned_traffic(config: RunConfig, sizes: Sizes, trace: RankTrace) -> Counter[tuple[str, Key]]:
    """Return bytes by phase and key, for the passes that the trace has seen."""
    stage, place = stage_and_place(config.trainer, trace.rank)
    load = trace.load
    step = Step(
        stage,
        place,
        load.padded_tokens,
        load.policy_tokens,
        load.own_policy_tokens(config.trainer, place),
        on_gpu=_is_on_gpu(config),
    )
    frozen = has_frozen_routers(config)
    found: Counter[tuple[str, Key]] = Counter()

    def add(phase: str, traffic: Traffic) -> None:
        for key, size in traffic.items():
            found[phase, key] += size

    for one in trace.passes:
        if one.phase == "log-probs":
            add(one.phase, forward_traffic(sizes, step, one.num_microbatches))
        else:
            traffic = gradient_traffic(sizes, step, one.num_microbatches, frozen_routers=frozen)
            add(one.phase, traffic)
            overlaps = _overlaps(config)
            add("update", update_traffic(sizes, step, frozen_routers=frozen, overlaps=overlaps))
    return found


def _is_on_gpu(config: RunConfig) -> bool:
    return config.placement.gpus_per_node > 0


def _overlaps(config: RunConfig) -> bool:
    """Whether gradients are reduced during the backward."""
    overlaps = config.trainer.overlap_communication
    if overlaps is None:
        overlaps = _is_on_gpu(config)
    return overlaps
