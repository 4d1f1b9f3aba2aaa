"""Part `speed`: tokens per second and MFU of the trainer's passes, for released models' shapes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_megatron.errors import TrainerError
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.planned import layers_that_fit
from grpo_megatron.prove.ranks import Asked, on_this_machine
from grpo_megatron.prove.requests import MeasuredSpeed, MeasureSpeed, Times, TrainerTable
from grpo_megatron.prove.shapes import (
    QWEN3_0_6B,
    QWEN3_4B,
    forward_flops,
    peak_flops,
    qwen3_30b_a3b,
    with_layers,
)
from grpo_megatron.prove.workload import NARROW, Lengths, models, write_step

_USABLE = 0.85
"""Of a GPU's memory; the rest is for the CUDA context and gaps between blocks."""
_EXPECTED_MFU = {"dense": "0.25 to 0.4", "experts": "0.08 to 0.25"}
_EXPECTED_REPLAY = "below 1.05"
_MFU_NOTE = (
    "MFU: operations of the model by seconds and by the peak of the GPUs in bfloat16. A forward "
    "pass has 2 operations for each weight that a token meets (the output layer's for policy "
    "tokens only) and 2 L^2 for each layer and unit of the heads' width, L the length of a "
    "sample; a backward pass has twice as many. What is computed again (recompute = full, a third "
    "of the training pass more) is not counted. Expected shares are what others publish of "
    "Megatron-Core on H100s, less a quarter for what is computed again; none was measured with "
    "this library."
)
_SAMPLES_PER_GPU = 2
_BACKWARD = 2
"""Operations of a backward pass, by those of a forward pass."""


@dataclass(frozen=True, slots=True)
class _Shape:
    name: str
    kind: str
    hf: Mapping[str, Any]
    trainer: TrainerTable
    tokens: Sequence[int]
    """Of a micro-batch, each a measurement."""

    @property
    def has_experts(self) -> bool:
        return self.kind == "experts"


def run(job: Job) -> None:
    """Measure every shape that fits, each in ranks of its own."""
    for shape in _shapes(job):
        try:
            _measure(job, shape)
        except TrainerError as error:  # the other shapes may compute
            job.recorder.check(f"{shape.name}: it computes", False, str(error))
    note = _MFU_NOTE
    if job.conditions.device != "cuda":
        note = "The GPU pretends: seconds are a CPU's, of tiny models. The figures mean nothing."
    job.recorder.note(note)


def _shapes(job: Job) -> list[_Shape]:
    table: TrainerTable = {"precision": "bfloat16", "recompute": "full"}
    conditions = job.conditions
    if conditions.device != "cuda":
        tiny = models(NARROW)
        return [
            _Shape("tiny dense", "dense", tiny["dense"], table, (64, 128)),
            _Shape("tiny experts", "experts", tiny["moe"], table, (64, 128)),
        ]
    tokens = (4096, 16384, 65536)
    num_experts = int(qwen3_30b_a3b()["num_experts"])
    expert_ranks = math.gcd(num_experts, conditions.num_gpus)
    with_experts = {**table, "expert_parallel_size": expert_ranks}
    wanted = [
        _Shape("Qwen3-0.6B", "dense", QWEN3_0_6B, table, tokens),
        _Shape("Qwen3-4B", "dense", QWEN3_4B, table, tokens),
        _Shape("Qwen3-30B-A3B", "experts", qwen3_30b_a3b(), with_experts, tokens),
    ]
    found = []
    for shape in wanted:
        fitting = _fitting(job, shape)
        if fitting is not None:
            found.append(fitting)
    return found


def _fitting(job: Job, shape: _Shape) -> _Shape | None:
    """The shape with as many layers as fit, at its longest micro-batch; None where none does."""
    conditions = job.conditions
    longest = max(shape.tokens)
    num_layers = layers_that_fit(
        job.folder / shape.name / "plan",
        shape.hf,
        {
            **shape.trainer,
            "num_ranks": conditions.num_gpus,
            "max_tokens_per_microbatch": longest,
        },
        num_samples=_SAMPLES_PER_GPU * conditions.num_gpus,
        longest=longest // _SAMPLES_PER_GPU,
        num_gpus=conditions.num_gpus,
        memory_bytes=int(_USABLE * conditions.memory_bytes),
    )
    if num_layers == 0:
        job.recorder.impossible(f"{shape.name} fits", "not even one of its layers does, by `plan`")
        return None
    whole = shape.hf["num_hidden_layers"]
    name = shape.name
    if num_layers < whole:
        name = f"{shape.name}, {num_layers} of {whole} layers"
    return _Shape(name, shape.kind, with_layers(shape.hf, num_layers), shape.trainer, shape.tokens)


def _measure(job: Job, shape: _Shape) -> None:
    num_gpus = job.conditions.num_gpus
    if job.conditions.device != "cuda":
        num_gpus = 1
    folder = job.folder / shape.name.partition(",")[0]
    steps = []
    for tokens in shape.tokens:
        half = tokens // _SAMPLES_PER_GPU // 2
        step = write_step(
            folder / f"samples-{tokens}",
            shape.hf,
            Lengths(prompt=half, shortest=half, longest=half),
            num_groups=num_gpus,
            group_size=_SAMPLES_PER_GPU,
            with_routes=shape.has_experts,
        )
        steps.append(step)
    request = MeasureSpeed(
        hf=dict(shape.hf),
        samples=steps,
        trainer={**shape.trainer, "max_tokens_per_microbatch": max(shape.tokens)},
        repeats=2,
        replays_routes=shape.has_experts,
    )
    ranks = on_this_machine(num_gpus)
    asked = Asked([request], MeasuredSpeed, folder / "ranks", ranks, patience_s=200.0)
    for tokens, times in zip(shape.tokens, asked.answer().times, strict=True):
        _record(job, shape, tokens, num_gpus, times)


def _record(job: Job, shape: _Shape, tokens: int, num_gpus: int, times: Times) -> None:
    """Record tokens per second and MFU of each pass on one micro-batch a GPU."""
    recorder = job.recorder
    samples = _SAMPLES_PER_GPU * num_gpus
    length = tokens // _SAMPLES_PER_GPU
    forward = forward_flops(shape.hf, [length] * samples, samples * (length // 2))
    peak = peak_flops(job.conditions.gpu_name)
    passes = {
        "log-probs (forward)": (times.logprobs_s, forward),
        "forward and backward": (times.train_s, forward * (1 + _BACKWARD)),
        "backward": (times.train_s - times.logprobs_s, forward * _BACKWARD),
    }
    where = f"{shape.name}, {tokens} tokens a GPU"
    for name, (seconds, operations) in passes.items():
        if seconds <= 0:  # noise of a tiny model
            continue
        recorder.figure(f"{where}: {name}", times.tokens / seconds, "tokens/s")
        if peak is not None:
            share = operations / seconds / (num_gpus * peak)
            expected = _EXPECTED_MFU[shape.kind]
            recorder.figure(f"{where}: {name}", share, "MFU", expected)
    recorder.figure(f"{where}: optimizer", times.optimizer_s * 1000, "ms")
    if times.replayed_train_s:
        recorder.figure(
            f"{where}: replayed routes (R3)",
            times.replayed_train_s / times.train_s,
            "times without",
            _EXPECTED_REPLAY,
        )
    recorder.figure(f"{where}: highest memory", times.peak_bytes / 2**30, "GiB")
