"""Training steps that compute a prompt once against steps that compute it for every sample.

    python benchmarks/shared_prefix.py [--pairs 3] [--case NAME ...]

Both are the trainer's own step (`Training.run`: packing, Megatron-Core, loss, gradients, Adam) on
one rank, fp32, in one process with one thread, in turn; only `trainer.share_prefixes` differs.
Dense models have hidden size 512 and 4 layers; `demo` is the model, the objective and the lengths
of recipes/demo/gspo-moe-cpu.toml. Seconds are those of the processor, so that other work beside it
changes little. Prints for every case the median ratio of the pairs, the ratio of the peaks of
tensor memory, and how far the gradient norms are apart; exit code 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29631")

from grpo_megatron.trainer.megatron import platform  # noqa: F401, I001  (before Megatron)

import numpy as np
from objective_cost import PeakMemory

from grpo_megatron.batching.manifest import StepFacts
from grpo_megatron.batching.store import (
    SampleRow,
    SampleTable,
    begin_step,
    finish_step,
    write_shard,
)
from grpo_megatron.config.run import RunConfig
from grpo_megatron.plan.memory import vocabulary_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan

DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Case:
    """Groups of samples, and what is wanted of them."""

    prompt: tuple[int, int]
    """Shortest and longest."""
    completion: tuple[int, int]
    group: int
    num_groups: int = 1
    least_ratio: float = 0.97
    most_memory: float = float("inf")
    is_demo: bool = False


CASES = {
    "512+128x16": Case((512, 512), (128, 128), 16, least_ratio=3.2, most_memory=0.45),
    "1024+64x8": Case((1024, 1024), (64, 64), 8, least_ratio=4.5),
    "demo": Case((8, 10), (3, 6), 8, 64, least_ratio=1.6, is_demo=True),
    "128+256x16": Case((128, 128), (256, 256), 16),
    "400..600+64..256x16": Case((400, 600), (64, 256), 16),
    "8+1000x4": Case((8, 8), (1000, 1000), 4),
    "64+700x4": Case((64, 64), (700, 700), 4),
    "4..40+1..400x2": Case((4, 40), (1, 400), 2, 8),
    "1+1x8": Case((1, 1), (1, 1), 8, 128),
    "alone": Case((10, 300), (10, 300), 1, 16),
}


def write_samples(directory: Path, case: Case, vocab_size: int) -> SampleTable:
    """Random tokens; half of the rewards are 1."""
    rng = np.random.default_rng(0)
    groups = []
    rows = []
    for number in range(case.num_groups):
        prompt_ids = rng.integers(2, vocab_size, rng.integers(case.prompt[0], case.prompt[1] + 1))
        completions = []
        for index in range(case.group):
            length = int(rng.integers(case.completion[0], case.completion[1] + 1))
            ids = rng.integers(2, vocab_size, length).astype(np.int32)
            logprobs = np.full(length, -np.log(vocab_size), np.float32)
            spans = (VersionSpan(0, 0, length),)
            completions.append(Completion(ids, logprobs, spans, "stop", ""))
            rows.append(SampleRow(0, len(rows), number, 0, float(index % 2)))
        prompt = Prompt(str(number), "d", "", tuple(prompt_ids.tolist()), "")
        groups.append(RolloutGroup(prompt, tuple(completions), 0))
    working = begin_step(directory)
    shard = write_shard(working / "rollout-0.safetensors", groups)
    rewards = {"exact_match": np.array([row.reward for row in rows])}
    finish_step(directory, [shard], rows, StepFacts(), rewards)
    return SampleTable(directory)


def recipe(case: Case, *, share_prefixes: bool) -> RunConfig:
    """The demo's objective and domain, or plain GRPO's."""
    objective: dict[str, Any] = {"preset": "grpo", "kl": "none", "monitor_share": 0}
    if case.is_demo:
        objective = {"preset": "gspo"}
    reward = {"function": "grpo_megatron.rewards.functions:exact_match"}
    return RunConfig.model_validate(
        {
            "name": "benchmark",
            "model": {"preset": "tiny-qwen3-moe"},
            "objective": objective,
            "domains": [{"name": "d", "source": "file", "path": "x", "rewards": [reward]}],
            "optimizer": {"lr": 1e-12},  # so that every step is the same
            "trainer": {
                "precision": "float32",
                "num_threads": 1,
                "max_tokens_per_microbatch": 16384,
                "share_prefixes": share_prefixes,
            },
        }
    )


def make_policy(case: Case, config: RunConfig) -> Policy:
    """A policy with random weights."""
    hf = DENSE
    if case.is_demo:
        hf = dict(configuration_of(config.model)[0])
        hf["vocab_size"] = vocabulary_of(hf, config.model)
    seed_everything(1)
    return build_policy(hf, config.trainer, config.optimizer)


def step(config: RunConfig, policy: Policy, table: SampleTable) -> tuple[float, float]:
    """Take a step; return its seconds of the processor, and the norm of its gradient."""
    references = References(config)
    if references.wanted:
        references.snapshot(policy)
    started = time.process_time()
    report = Training(config, policy, references, table, {}).run(0, 1)
    seconds = time.process_time() - started
    return seconds, report.grad_norms[0]


def peak_bytes(config: RunConfig, policy: Policy, table: SampleTable) -> int:
    """Most bytes of tensors that a step has made and still holds."""
    with PeakMemory() as memory:
        step(config, policy, table)
    return int(memory.peak)


def measure(name: str, case: Case, root: Path, num_pairs: int) -> dict[str, Any]:
    """Compare both sides on one policy."""
    shared, apart = (recipe(case, share_prefixes=share) for share in (True, False))
    policy = make_policy(case, shared)
    table = write_samples(root / name / "step_000001", case, policy.hf["vocab_size"])
    for config in (shared, apart):
        step(config, policy, table)
    ratios = []
    seconds: dict[str, list[float]] = {"shared": [], "apart": []}
    for pair in range(num_pairs):
        sides = [("shared", shared), ("apart", apart)]
        if pair % 2:
            sides.reverse()
        norms = {}
        for side, config in sides:
            taken, norms[side] = step(config, policy, table)
            seconds[side].append(taken)
        ratios.append(seconds["apart"][-1] / seconds["shared"][-1])
    memory = peak_bytes(shared, policy, table) / peak_bytes(apart, policy, table)
    return {
        "case": name,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds_apart": statistics.median(seconds["apart"]),
        "seconds_shared": statistics.median(seconds["shared"]),
        "memory": memory,
        "norm_difference": abs(norms["shared"] / norms["apart"] - 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="print a line of JSON for each case")
    options = parser.parse_args()
    initialize(recipe(CASES["demo"], share_prefixes=True).trainer, RankInfo(0, 0, 1))
    has_failed = False
    with tempfile.TemporaryDirectory() as root:
        for name in options.case:
            case = CASES[name]
            found = measure(name, case, Path(root), options.pairs)
            is_fast = found["ratio"] >= case.least_ratio
            is_small = found["memory"] <= case.most_memory
            has_failed |= not (is_fast and is_small)
            if options.json:
                print(json.dumps(found), flush=True)
                continue
            print(
                f"{name}: {found['seconds_apart']:.3f} s apart, {found['seconds_shared']:.3f} s "
                f"shared, ratio {found['ratio']:.2f} (wanted {case.least_ratio:g}; "
                f"{min(found['ratios']):.2f} to {max(found['ratios']):.2f}), memory "
                f"{found['memory']:.2f}, gradient norms differ by {found['norm_difference']:.0e}",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
