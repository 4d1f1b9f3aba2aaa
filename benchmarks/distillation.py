"""Memory and time of the full-vocabulary distillation loss, against whole logits.

    python benchmarks/distillation.py [--vocab 151936] [--tokens 2048] [--hidden 512] [--chunk 128]

Both sides compute reverse KL of the same random student to the same random teacher, forward and
backward, from hidden states, in fp32 and in a process of their own. Memory is the peak over what
the process held before the loss: gradients of hidden states and of the output layer are in it, the
same for both, and shown apart. Prints both ratios; exit code 1 where ours needs more than 1/8.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

LIMIT = 1 / 8


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(options: argparse.Namespace) -> dict[str, float]:
    from grpo_megatron.trainer.megatron import platform  # noqa: F401  (before Megatron)

    # isort: split
    import torch

    from grpo_megatron.trainer.vocab_parallel.divergence import (
        DivergenceSettings,
        TeacherTokens,
        divergence,
    )

    class Alone:
        rank, size = staticmethod(lambda: 0), staticmethod(lambda: 1)

    torch.manual_seed(0)
    n, h, v = options.tokens, options.hidden, options.vocab
    hidden, taught = (torch.randn(n, h) / h**0.5 for _ in range(2))
    weight, head = (torch.randn(v, h) for _ in range(2))
    hidden.requires_grad_(), weight.requires_grad_()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)
    rows, settings = torch.arange(n), DivergenceSettings(v, 1.0, options.chunk, 0.0)

    def loss() -> torch.Tensor:
        if options.one == "chunked":
            return divergence(
                hidden, weight, TeacherTokens(rows, 1.0, settings, taught, head), Alone
            ).sum()
        log_p = (hidden @ weight.t()).log_softmax(-1)
        log_q = (taught @ head.t()).log_softmax(-1)
        return (log_p.exp() * (log_p - log_q)).sum()

    before, started = rss_bytes(), time.perf_counter()
    value = loss()
    value.backward()
    return {
        "seconds": time.perf_counter() - started,
        "bytes": peak_bytes() - before,
        "loss": float(value),
        "norm": float(hidden.grad.norm()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("vocab", 151_936), ("tokens", 2048), ("hidden", 512), ("chunk", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", choices=["naive", "chunked"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options)))
        return
    found = {
        side: json.loads(
            subprocess.run(
                [sys.executable, "-W", "ignore", __file__, *sys.argv[1:], "--one", side],
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for side in ("naive", "chunked")
    }
    shared = options.vocab * options.hidden * 4  # the output layer's fp32 gradient, not yet added
    for side, values in found.items():
        print(
            f"{side:>8}: {values['bytes'] / 2**20:8.0f} MiB ({shared / 2**20:.0f} of it one "
            f"gradient of the output layer), {values['seconds']:.2f} s, "
            f"loss {values['loss']:.4f}, |grad| {values['norm']:.5f}"
        )
    parts = {side: max(values["bytes"] - shared, 0) for side, values in found.items()}
    ratio = parts["chunked"] / parts["naive"]
    print(
        f"loss memory chunked / naive {ratio:.4f} (limit {LIMIT}), "
        f"seconds naive / chunked {found['naive']['seconds'] / found['chunked']['seconds']:.2f}"
    )
    sys.exit(ratio > LIMIT)


if __name__ == "__main__":
    main()
