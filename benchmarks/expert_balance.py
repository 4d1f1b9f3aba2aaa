"""How even the experts' ranks are in made-up steps whose domains use experts of their own.

    python benchmarks/expert_balance.py

`unavoidable` is the imbalance of all samples together, which no assignment can change; `before`
that of micro-batches of even costs, `after` that of exchanged samples; `left` what remains of the
rest. Seconds are of the whole plan, beside those of a plan that knows no routes."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from grpo_megatron.batching.expert_balance import ExpertLoads
from grpo_megatron.batching.packing import plan_microbatches
from grpo_megatron.batching.prefix_rows import SamplePaths

_CHOICES = 8
"""Experts of a token."""
_OWN_SHARE = 0.8
"""Of a prompt's tokens that go where its domain goes; the others go everywhere alike."""


@dataclass(frozen=True)
class Case:
    """A step and a layout."""

    num_prompts: int
    num_samples: int
    completion: tuple[int, int]
    """Fewest and most tokens."""
    num_layers: int
    expert_ranks: int
    data_ranks: int
    ranks_per_group: int
    max_tokens: int


CASES = (
    Case(64, 8, (64, 256), 4, 4, 4, 4, 4096),
    Case(256, 8, (64, 256), 4, 8, 8, 8, 8192),
    Case(256, 4, (200, 1500), 48, 8, 8, 8, 16384),
    Case(128, 16, (1000, 8000), 94, 8, 16, 8, 16384),
)


def make_step(case: Case, random: np.random.Generator) -> tuple[SamplePaths, ExpertLoads]:
    """Prompts of 100 to 200 tokens, each of a domain of its own."""
    prompts = np.repeat(random.integers(100, 200, case.num_prompts), case.num_samples)
    num_all = len(prompts)
    completions = random.integers(*case.completion, num_all)
    numbers = np.repeat(np.arange(case.num_prompts), case.num_samples)
    pieces = np.stack([numbers, case.num_prompts + np.arange(num_all)], 1)
    paths = SamplePaths.of_pieces(pieces, np.stack([prompts, completions], 1))
    spread = np.full(case.expert_ranks, 0.3)
    of_domain = random.dirichlet(spread, (case.num_prompts, case.num_layers))
    share = _OWN_SHARE * of_domain[numbers] + (1 - _OWN_SHARE) / case.expert_ranks
    loads = ExpertLoads(
        _CHOICES * share * prompts[:, None, None],
        _CHOICES * share * completions[:, None, None],
        case.ranks_per_group,
    )
    return paths, loads


def main() -> None:
    """Print a line for each case."""
    print("prompts samples layers ranks  unavoidable before after  left  seconds (without routes)")
    for case in CASES:
        paths, loads = make_step(case, np.random.default_rng(0))
        layout = {"num_ranks": case.data_ranks, "max_tokens": case.max_tokens}
        started = time.perf_counter()
        plan_microbatches(paths, **layout)
        without_s = time.perf_counter() - started
        started = time.perf_counter()
        plan = plan_microbatches(paths, **layout, experts=loads)
        seconds = time.perf_counter() - started
        of_prompts = loads.prompts[:: case.num_samples].sum(0)
        everything = of_prompts + loads.completions.sum(0)
        unavoidable = everything.max(-1).sum() / everything.mean(-1).sum()
        balance = plan.experts
        assert balance is not None  # routes were given
        left = (balance.after - unavoidable) / (balance.before - unavoidable)
        print(
            f"{case.num_prompts:7} {case.num_samples:7} {case.num_layers:6} "
            f"{case.expert_ranks:5}  {unavoidable:11.3f} {balance.before:6.3f} "
            f"{balance.after:5.3f} {left:5.2f}  {seconds:7.2f} ({without_s:.2f})"
        )


if __name__ == "__main__":
    main()
