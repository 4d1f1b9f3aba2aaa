"""Time and memory of every objective beside the model: `python benchmarks/objective_cost.py`.

One core, 4096 ragged samples of 1 M policy tokens in all. Prints for every preset the seconds of
advantages, loss and gradient, as a share of the demo model's own log-prob forward over as many
tokens (measured on a part of them and scaled), and the peak of tensor memory beyond the inputs, in
fp32 copies of the token array. Wanted: under 1 % and under 6 copies.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
import weakref
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_megatron.algorithms.advantages.pipeline import loss_columns, needed_columns
from grpo_megatron.algorithms.batch import Events, SampleBatch
from grpo_megatron.algorithms.evaluate import evaluate
from grpo_megatron.algorithms.objective import Objective
from grpo_megatron.config.objective import PRESETS, ObjectiveConfig

NUM_SAMPLES, NUM_TOKENS, GROUP = 4096, 1_000_000, 16
MICROBATCH_TOKENS = 16_384


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes in storages that operations made and that were alive at once."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self._known = 0, 0, set()

    def __torch_dispatch__(self, operation, types, arguments=(), keywords=None):
        result = operation(*arguments, **(keywords or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._watch(leaf.untyped_storage())
        return result

    def _watch(self, storage) -> None:
        key = storage.data_ptr()
        if not storage.nbytes() or key in self._known:
            return
        self._known.add(key)
        self.alive += storage.nbytes()
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def random_batch(seed: int = 0) -> tuple[SampleBatch, dict[str, torch.Tensor]]:
    """Ragged samples with every column an objective may ask for."""
    rng = np.random.default_rng(seed)
    counts = (
        rng.multinomial(NUM_TOKENS - 16 * NUM_SAMPLES, rng.dirichlet(np.full(NUM_SAMPLES, 4.0)))
        + 16
    )
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> torch.Tensor:
        return torch.randn(NUM_TOKENS, generator=generator) * scale

    logprobs = -noise(1.0).abs() - 0.01
    columns = {
        "logprobs": logprobs,
        **{
            name: logprobs + noise(0.05)
            for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs")
        },
        "entropies": noise(0.5).abs(),
    }
    samples = torch.arange(NUM_SAMPLES)
    rewards = torch.from_numpy(rng.integers(0, 2, NUM_SAMPLES)).double()
    tokens = {name: columns[name] for name in ("old_logprobs", "ref_logprobs", "entropies")}
    tokens["values"] = noise(0.3)
    tokens["token_ids"] = torch.from_numpy(rng.integers(0, 50_000, NUM_TOKENS))
    sample = samples.repeat_interleave(4)
    end = (torch.from_numpy(counts)[sample] - 1) * (torch.arange(len(sample)) % 4 + 1) // 4
    events = Events(
        sample,
        end,
        torch.rand(len(sample), generator=generator).double(),
        torch.randint(0, 3, (len(sample),), generator=generator),
    )
    ones = torch.ones(NUM_SAMPLES, dtype=torch.float64)
    return SampleBatch(
        rewards,
        samples // GROUP,
        torch.from_numpy(counts),
        samples,
        torch.zeros_like(samples),
        torch.ones(NUM_SAMPLES, dtype=torch.bool),
        {"a": rewards, "b": ones * 0.5},
        {"a": ones, "b": ones},
        tokens,
        events,
    ), columns


def microbatches(batch: SampleBatch) -> list[torch.Tensor]:
    """Rows in parts of about `MICROBATCH_TOKENS`, as the trainer would pack them."""
    place = batch.offsets[:-1] // MICROBATCH_TOKENS
    _, sizes = torch.unique_consecutive(place, return_counts=True)
    return list(torch.arange(len(batch)).split(sizes.tolist()))


def measured(
    name: str, batch: SampleBatch, columns: dict[str, torch.Tensor], repeats: int
) -> tuple[float, float]:
    """Seconds (best of several) and peak memory in copies of the token array."""
    settings = {"kl_beta": 0.01} if PRESETS[name].values.get("kl") else {}
    objective = Objective(ObjectiveConfig(preset=name, **settings))
    parts = microbatches(batch)
    needed = needed_columns(objective.config, weighs_kl=objective.weighs_kl)
    needed |= loss_columns(objective.config)
    batch = replace(batch, tokens={n: c for n, c in batch.tokens.items() if n in needed})

    def run() -> None:
        evaluate(objective, batch, columns, parts=parts, constant_length=512)

    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    with PeakMemory() as memory:
        run()
    return min(seconds), memory.peak / (4 * NUM_TOKENS)


def forward_seconds(num_tokens: int) -> float:
    """The demo model's log-prob forward over `NUM_TOKENS`, scaled from `num_tokens`."""
    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before anything of Megatron)

    # isort: split
    from torch.distributed import HashStore

    from grpo_megatron.batching.manifest import StepFacts
    from grpo_megatron.batching.store import SampleRow, SampleTable, finish_step, write_shard
    from grpo_megatron.config.presets import load_preset
    from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
    from grpo_megatron.trainer.megatron.policy import build_policy
    from grpo_megatron.trainer.megatron.process_groups import RankInfo, initialize, seed_everything
    from grpo_megatron.trainer.steps.optimizer_step import logprob_pass, prepare
    from grpo_megatron.types import Completion, Prompt, RolloutGroup, VersionSpan

    layout = TrainerConfig(
        num_ranks=1, precision="float32", num_threads=1, max_tokens_per_microbatch=MICROBATCH_TOKENS
    )
    initialize(layout, RankInfo(0, 0, 1), HashStore())
    seed_everything(0)
    policy = build_policy(
        load_preset("tiny-qwen3-moe").hf | {"vocab_size": 96}, layout, OptimizerConfig()
    )
    length = NUM_TOKENS // NUM_SAMPLES
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "step"
        working = directory.with_name("step.tmp")
        working.mkdir()
        groups, rows = [], []
        for i in range(num_tokens // length):
            completion = Completion(
                rng.integers(0, 96, length).astype(np.int32),
                np.zeros(length, np.float32),
                (VersionSpan(0, 0, length),),
                "stop",
                "",
            )
            groups.append(RolloutGroup(Prompt(str(i), "d", "", (1,), ""), (completion,), 0))
            rows.append(SampleRow(0, i, i, 0, 0.0))
        shard = write_shard(working / "rollout-0.safetensors", groups)
        finish_step(directory, [shard], rows, StepFacts())
        table = SampleTable(directory)
        batch = prepare(layout, table, np.arange(len(table)))
        logprob_pass(policy, batch)
        started = time.perf_counter()
        logprob_pass(policy, batch)
        return (time.perf_counter() - started) * NUM_TOKENS / table.completion_lengths.sum()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--presets", nargs="*", default=list(PRESETS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--forward-tokens", type=int, default=65_536)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    forward = forward_seconds(arguments.forward_tokens)
    print(f"log-prob forward of the demo model, {NUM_TOKENS:,} tokens: {forward:.1f} s")
    batch, columns = random_batch()
    worst = {"share": 0.0, "copies": 0.0}
    for name in arguments.presets:
        seconds, copies = measured(name, batch, columns, arguments.repeats)
        share = seconds / forward
        worst = {"share": max(worst["share"], share), "copies": max(worst["copies"], copies)}
        print(
            f"{name:24s} {seconds:6.3f} s  {share:7.2%} of the forward  {copies:5.2f} copies",
            flush=True,
        )
    print(
        json.dumps(
            {"worst_share": round(worst["share"], 5), "worst_copies": round(worst["copies"], 2)}
        )
    )


if __name__ == "__main__":
    main()
