"""A recipe's ranks, traced one after the other and held against its plan."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import policy_sizes
from grpo_megatron.plan.resolve import resolve, resolve_run
from grpo_megatron.trace.compare import Comparison, comparisons_of
from grpo_megatron.trace.loads import load_of, ranks_to_trace, stage_and_place
from grpo_megatron.trace.step import RankTrace, trace_rank


@dataclass
class RecipeTrace:
    """What was found of a recipe, by rank."""

    on_gpu: bool
    traces: list[RankTrace]
    compared: list[list[Comparison]]


def trace_recipe(source: str, overrides: list[str], *, say: Callable[[str], None]) -> RecipeTrace:
    """Trace a recipe or a run directory; `say` hears of every rank.

    Raises ConfigError for a recipe that is not valid."""
    path = Path(source)
    is_run = path.is_dir() or path.suffix == ".json"
    resolved = resolve_run(path, overrides) if is_run else resolve(source, overrides)
    return trace_config(resolved.config, say=say)


def trace_config(config: RunConfig, *, say: Callable[[str], None]) -> RecipeTrace:
    """Trace a valid configuration of a kind that trains."""
    # passes that only look on, over a share of the samples, would hide what an update moves
    objective = config.objective.model_copy(update={"monitor_share": 0.0})
    config = config.model_copy(update={"objective": objective})
    sizes = policy_sizes(config)
    found = RecipeTrace(config.placement.gpus_per_node > 0, [], [])
    for rank in ranks_to_trace(config, sizes):
        started = time.monotonic()
        stage, _ = stage_and_place(config.trainer, rank)
        trace = trace_rank(config, rank, load_of(config, sizes, stage))
        say(
            f"rank {rank}, pipeline stage {trace.stage}: {trace.num_operators:,} operators in "
            f"{time.monotonic() - started:.0f} s"
        )
        found.traces.append(trace)
        found.compared.append(comparisons_of(config, sizes, trace))
    return found
