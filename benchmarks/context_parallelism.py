"""Training steps of long rows on ranks that share them, against one rank that has them alone.

    python benchmarks/context_parallelism.py [--ranks 2 ...] [--tokens 8192] [--recompute none]

Both are the trainer's own step (`Training.run`: packing, Megatron-Core, loss, gradients, Adam),
fp32, gloo, one thread a rank, on a dense model of hidden size 512, 8 heads on 4 key-value heads and
4 layers; two samples of `--tokens` tokens, a row for each. Memory is the peak of the tensors that a
step makes, of the rank that has most. Seconds are those of the processor, of the busiest rank, so
that other work beside it changes little; waiting for the others is not among them. Prints both as
shares of one rank's, and how far losses and gradient norms are apart; exit code 1 where two ranks
need more than 0.6 of the memory, or the norm differs by more than 1e-5.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shared_prefix import DENSE, Case, PeakMemory, recipe, write_samples  # before Megatron

# isort: split
import torch.multiprocessing
from torch.distributed import FileStore

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.config.run import RunConfig
from grpo_megatron.trainer.megatron.policy import Policy, build_policy
from grpo_megatron.trainer.megatron.process_groups import (
    RankInfo,
    initialize,
    seed_everything,
    shutdown,
)
from grpo_megatron.trainer.steps.references import References
from grpo_megatron.trainer.steps.rl_update import Training
from grpo_megatron.weights.gather import all_gathered

MOST_MEMORY = {2: 0.6}
NORM_TOLERANCE = 1e-5
PROMPT = 256


def config_of(num_ranks: int, tokens: int, recompute: str) -> RunConfig:
    """Plain GRPO, a sample a row, every row shared by all ranks."""
    case = Case((PROMPT, PROMPT), (tokens - PROMPT, tokens - PROMPT), 2)
    config = recipe(case, share_prefixes=False)
    layout = config.trainer.model_copy(
        update={
            "num_ranks": num_ranks,
            "context_parallel_size": num_ranks,
            "max_tokens_per_microbatch": tokens,
            "recompute": recompute,
        }
    )
    return config.model_copy(update={"trainer": layout})


def train(rank: int, config: RunConfig, folder: Path) -> None:
    """Take a step for the memory and one for the seconds; rank 0 writes what all found."""
    num_ranks = config.trainer.num_ranks
    store = FileStore(str(folder / f"store_{num_ranks}"), num_ranks)
    initialize(config.trainer, RankInfo(rank, rank, num_ranks), store)
    seed_everything(1)
    table = SampleTable(folder / "step_000001")
    hf = {**DENSE, "max_position_embeddings": config.trainer.max_tokens_per_microbatch}
    policy = build_policy(hf, config.trainer, config.optimizer)
    with PeakMemory() as memory:
        _, loss, norm = _step(config, policy, table)
    seconds, _, _ = _step(config, policy, table)
    found = all_gathered((int(memory.peak), seconds))
    if rank == 0:
        torch.save((found, loss, norm), folder / f"found_{num_ranks}.pt")
    shutdown()


def _step(config: RunConfig, policy: Policy, table: SampleTable) -> tuple[float, float, float]:
    """Seconds of the processor, loss and gradient norm."""
    started = time.process_time()
    report = Training(config, policy, References(config), table, {}).run(0, 1)
    return time.process_time() - started, report.losses[0], report.grad_norms[0]


def measure(config: RunConfig, folder: Path) -> dict[str, Any]:
    """Start the ranks of a layout and wait for them."""
    num_ranks = config.trainer.num_ranks
    torch.multiprocessing.start_processes(
        train, (config, folder), nprocs=num_ranks, start_method="spawn"
    )
    found, loss, norm = torch.load(folder / f"found_{num_ranks}.pt")
    return {
        "bytes": max(peak for peak, _ in found),
        "seconds": max(seconds for _, seconds in found),
        "loss": loss,
        "norm": norm,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[2])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--recompute", choices=("none", "selective", "full"), default="none")
    options = parser.parse_args()
    has_failed = False
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root)
        completion = options.tokens - PROMPT
        case = Case((PROMPT, PROMPT), (completion, completion), 2)
        write_samples(folder / "step_000001", case, DENSE["vocab_size"])
        one = measure(config_of(1, options.tokens, options.recompute), folder)
        print(f"1 rank: {one['bytes'] / 2**20:.0f} MiB, {one['seconds']:.1f} s", flush=True)
        for num_ranks in options.ranks:
            found = measure(config_of(num_ranks, options.tokens, options.recompute), folder)
            memory = found["bytes"] / one["bytes"]
            difference = abs(found["norm"] / one["norm"] - 1)
            has_failed |= memory > MOST_MEMORY.get(num_ranks, 1.0) or difference > NORM_TOLERANCE
            seconds = found["seconds"] / one["seconds"]
            loss_difference = abs(found["loss"] - one["loss"])
            print(
                f"{num_ranks} ranks: {found['bytes'] / 2**20:.0f} MiB, {found['seconds']:.1f} s; "
                f"memory {memory:.2f} of one rank's, seconds {seconds:.2f}, losses differ by "
                f"{loss_difference:.0e}, gradient norms by {difference:.0e}",
                flush=True,
            )
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
