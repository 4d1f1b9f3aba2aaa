"""What the plan says of a rank beside what its trace saw."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import has_frozen_routers, workload_of
from grpo_megatron.plan.rank_bytes import static_bytes, step_bytes
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


def comparisons_of(
    config: RunConfig, sizes: Sizes, load: Load, trace: RankTrace
) -> list[Comparison]:
    """Compare static bytes, the peak and the bytes of collectives of one rank."""
    static = _planned_static(config, sizes, trace.rank)
    found = []
    for part, planned in static.items():
        found.append(Comparison(part, planned, trace.static.parts[part]))
    found += _shapes(sizes, trace)
    moving = _planned_moving(config, sizes, load, trace.stage)
    planned_peak = sum(static.values()) + sum(moving.values())
    found.append(Comparison("peak", planned_peak, trace.peak.bytes, PEAK_TOLERANCE))
    return found


def _planned_static(config: RunConfig, sizes: Sizes, rank: int) -> dict[str, int]:
    stage, place = stage_and_place(config.trainer, rank)
    overlaps = config.trainer.overlap_communication
    if overlaps is None:
        overlaps = config.placement.gpus_per_node > 0
    return static_bytes(
        sizes, stage, place, frozen_routers=has_frozen_routers(config), overlaps=overlaps
    )


def _planned_moving(config: RunConfig, sizes: Sizes, load: Load, stage: int) -> dict[str, int]:
    """Bytes of a step by part, without what lies outside of tensors."""
    work = workload_of(config, sizes)
    work["tokens"] = load.tokens
    work["num_microbatches"] = load.num_microbatches
    parts = step_bytes(sizes, stage, **work)
    del parts["libraries"]
    return parts


def _shapes(sizes: Sizes, trace: RankTrace) -> Iterator[Comparison]:
    """Compare parameters one by one, and tell of the first that differs."""
    for chunk, real in enumerate(trace.static.shapes):
        planned = [weight.numel for weight in weights_of_chunk(sizes, trace.stage, chunk)]
        name = f"parameters of chunk {chunk}"
        yield Comparison(name, len(planned), len(real))
        for number, (expected, found) in enumerate(zip(planned, real, strict=False)):
            if expected != found:
                yield Comparison(f"{name}: elements of number {number}", expected, found)
                break


def totals(trace: RankTrace) -> Mapping[tuple[str, str, str, str], int]:
    """Bytes of collectives by phase, kind, group and type."""
    found: Counter[tuple[str, str, str, str]] = Counter()
    for call in trace.collectives:
        found[call.phase, call.kind, call.group, call.dtype] += call.bytes
    return found
