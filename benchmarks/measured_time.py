"""Predicted against measured seconds of the trainer's passes on a GPU.

    python benchmarks/measured_time.py                                  # of the H200 that ran them
    python benchmarks/measured_time.py runs/prove/prove.json --device h100-80g    # of your own

Reads what the part `speed` of `grpo-megatron prove` has found. No constant was fitted to any of it.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.timing.constants import shipped_constants
from grpo_megatron.plan.timing.lengths import fixed
from grpo_megatron.plan.timing.published import error_of
from grpo_megatron.plan.timing.trainer import (
    Machine,
    TrainerLoad,
    TrainerSeconds,
    trainer_seconds,
    trainer_work,
)
from grpo_megatron.plan.weights import sizes_of
from grpo_megatron.prove.shapes import QWEN3_0_6B, QWEN3_4B, qwen3_30b_a3b, with_layers

FIRST_RUN = Path(__file__).parent / "gpu" / "h200-first-run.json"
SHARED_SHARE = 0.75
"""Of the tokens of the first run's rows up to `LONGEST_SHARED`: their samples had a common prompt,
which was computed once and counted twice."""
LONGEST_SHARED = 16384
NUM_SAMPLES = 2
MODELS = {"Qwen3-0.6B": QWEN3_0_6B, "Qwen3-4B": QWEN3_4B, "Qwen3-30B-A3B": qwen3_30b_a3b()}
FIGURE = re.compile(
    r"(?P<model>Qwen3-[\w.-]+)(, (?P<layers>\d+) of \d+ layers)?(?P<again>, recomputed)?, "
    r"(?P<tokens>\d+) tokens a GPU: (?P<what>log-probs \(forward\)|forward and backward|optimizer)"
)


@dataclass(frozen=True)
class Measured:
    """Seconds of one pass over one micro-batch."""

    model: str
    num_layers: int
    tokens: int
    what: str
    seconds: float
    computed_share: float
    """Of the tokens."""
    recompute: str

    @property
    def shape(self) -> dict[str, Any]:
        """config.json of what was computed."""
        return with_layers(MODELS[self.model], self.num_layers)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("file", nargs="?", type=Path, default=FIRST_RUN)
    arguments.add_argument("--device", default="h200")
    chosen = arguments.parse_args()
    print("error\tpredicted_s\tmeasured_s\ttokens\twhat\tmodel")
    errors: dict[str, list[float]] = {}
    rows = list(measurements(chosen.file))
    if not rows:
        raise SystemExit(f"error: {chosen.file} has no figure of {', '.join(MODELS)}")
    for measured in sorted(rows, key=lambda row: (row.what, row.tokens)):
        predicted = predicted_s(measured, chosen.device)
        error = error_of(predicted, measured.seconds)
        sign = "+" if predicted > measured.seconds else "-"
        print(
            f"{sign}{error:.0%}\t{predicted:.3f}\t{measured.seconds:.3f}\t{measured.tokens}\t"
            f"{measured.what}\t{measured.model} ({measured.num_layers} layers)"
        )
        errors.setdefault(f"{measured.what}, {measured.tokens} tokens", []).append(error)
    for name, found in errors.items():
        print(f"{name}: median error {statistics.median(found):.0%}, worst {max(found):.0%}")


def measurements(file: Path) -> Iterator[Measured]:
    """Read the figures of the part `speed`."""
    is_first_run = file.name == FIRST_RUN.name
    for figure in _figures(json.loads(file.read_text("utf-8"))):
        found = FIGURE.fullmatch(figure["what"])
        if found is None or figure["unit"] == "MFU":
            continue
        model = found["model"]
        tokens = int(found["tokens"])
        number = float(figure["value"].replace(",", ""))
        seconds = tokens / number
        if figure["unit"] == "ms":
            seconds = number / 1000
        recompute = "none"
        if found["again"] or is_first_run:
            recompute = "full"
        computed_share = 1.0
        if is_first_run and tokens <= LONGEST_SHARED:
            computed_share = SHARED_SHARE
        yield Measured(
            model=model,
            num_layers=int(found["layers"] or MODELS[model]["num_hidden_layers"]),
            tokens=tokens,
            what=found["what"],
            seconds=seconds,
            computed_share=computed_share,
            recompute=recompute,
        )


def _figures(page: dict[str, Any]) -> list[dict[str, str]]:
    """Return the figures of `speed`, of a page of the kit or of the first run's record."""
    for part in page.get("parts", []):
        if part["part"] == "speed":
            return list(part["figures"])
    for outcome in page.get("outcomes", []):
        if outcome["part"] == "speed":
            return list(outcome["evidence"]["figures"])
    raise SystemExit("error: the file has no part `speed`; grpo-megatron prove --only speed")


def predicted_s(measured: Measured, device: str) -> float:
    """Return what `plan` would say of the pass."""
    trainer = TrainerConfig(
        precision="bfloat16",
        recompute=measured.recompute,
        max_tokens_per_microbatch=measured.tokens,
    )
    sizes = sizes_of(measured.shape, measured.shape["vocab_size"], trainer)
    load = TrainerLoad(
        num_samples=NUM_SAMPLES,
        num_updates=1,
        lengths=fixed(measured.tokens // NUM_SAMPLES, "measured"),
        max_tokens_per_microbatch=measured.tokens,
        max_tokens_per_logprob_microbatch=measured.tokens,
        num_logprob_passes=1,
        computed_share=measured.computed_share,
    )
    constants = shipped_constants()
    machine = Machine(constants, constants.device(device), gpus_per_node=1)
    work = trainer_work(sizes, load, constants["attention_backward_ratio"])
    return _pass_s(trainer_seconds(work, machine), measured.what)


def _pass_s(seconds: TrainerSeconds, what: str) -> float:
    if what == "optimizer":
        return seconds.optimizer_s
    if what == "forward and backward":
        return seconds.forward_backward_s
    return seconds.logprobs_s


if __name__ == "__main__":
    main()
