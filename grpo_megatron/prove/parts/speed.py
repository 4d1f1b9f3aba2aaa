"""Part `speed`: tokens per second and MFU of the trainer's passes, for released models' shapes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    "sample; a backward pass has twice as many. Activations are kept where `plan` says that they "
    "fit; what is computed again where they do not (recompute = full, a third of the training pass "
    "more) is not counted. Expected shares are what others publish of Megatron-Core on H100s, less "
    "a quarter for that."
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
    folder: str

    @property
    def has_experts(self) -> bool:
        return self.kind == "experts"


@dataclass(frozen=True, slots=True)
class _Measurement:
    """Micro-batches of a shape whose activations are kept, or computed again."""

    shape: _Shape
    tokens: Sequence[int]
    recompute: str

    @property
    def name(self) -> str:
        if self.recompute == "none":
            return self.shape.name
        return f"{self.shape.name}, recomputed"


def run(job: Job) -> None:
    """Measure every shape that fits, each in ranks of its own: the next one needs their memory."""
    for shape in _shapes(job):
        for measurement in _measurements(job, shape):
            try:
                _measure(job, measurement)
            except TrainerError as error:  # the others may compute
                job.recorder.check(f"{measurement.name}: it computes", False, str(error))
    note = _MFU_NOTE
    if job.conditions.device != "cuda":
        note = "The GPU pretends: seconds are a CPU's, of tiny models. The figures mean nothing."
    job.recorder.note(note)


def _shapes(job: Job) -> list[_Shape]:
    # a prompt that is computed once for all of its samples would count for each of them
    table: TrainerTable = {"precision": "bfloat16", "share_prefixes": False}
    conditions = job.conditions
    if conditions.device != "cuda":
        tiny = models(NARROW)
        return [
            _Shape("tiny dense", "dense", tiny["dense"], table, (64, 128), "dense"),
            _Shape("tiny experts", "experts", tiny["moe"], table, (64, 128), "experts"),
        ]
    tokens = (4096, 16384, 65536)
    num_experts = int(qwen3_30b_a3b()["num_experts"])
    expert_ranks = math.gcd(num_experts, conditions.num_gpus)
    with_experts = {**table, "expert_parallel_size": expert_ranks}
    wanted = [
        _Shape("Qwen3-0.6B", "dense", QWEN3_0_6B, table, tokens, "0.6B"),
        _Shape("Qwen3-4B", "dense", QWEN3_4B, table, tokens, "4B"),
        _Shape("Qwen3-30B-A3B", "experts", qwen3_30b_a3b(), with_experts, tokens, "30B-A3B"),
    ]
    found = []
    for shape in wanted:
        fitting = _fitting(job, shape)
        if fitting is not None:
            found.append(fitting)
    return found


def _fitting(job: Job, shape: _Shape) -> _Shape | None:
    """Return the shape with as many layers as fit, at its longest micro-batch; None where none
    does."""
    num_layers = _num_layers(job, shape, max(shape.tokens), "full")
    if num_layers == 0:
        job.recorder.impossible(f"{shape.name} fits", "not even one of its layers does, by `plan`")
        return None
    whole = shape.hf["num_hidden_layers"]
    name = shape.name
    if num_layers < whole:
        name = f"{shape.name}, {num_layers} of {whole} layers"
    return replace(shape, name=name, hf=with_layers(shape.hf, num_layers))


def _num_layers(job: Job, shape: _Shape, tokens: int, recompute: str) -> int:
    """Return how many of the shape's layers fit, by `plan`: all, a half, a quarter, ..."""
    conditions = job.conditions
    return layers_that_fit(
        job.folder / shape.folder / f"plan-{tokens}-{recompute}",
        shape.hf,
        {
            **shape.trainer,
            "recompute": recompute,
            "num_ranks": conditions.num_gpus,
            "max_tokens_per_microbatch": tokens,
        },
        num_samples=_SAMPLES_PER_GPU * conditions.num_gpus,
        longest=tokens // _SAMPLES_PER_GPU,
        num_gpus=conditions.num_gpus,
        memory_bytes=int(_USABLE * conditions.memory_bytes),
    )


def _measurements(job: Job, shape: _Shape) -> list[_Measurement]:
    """Activations are kept where they fit, and computed again where they do not."""
    if job.conditions.device != "cuda":
        return [_Measurement(shape, shape.tokens, "full")]
    kept = []
    for tokens in shape.tokens:
        if _num_layers(job, shape, tokens, "none") == shape.hf["num_hidden_layers"]:
            kept.append(tokens)
    again = [tokens for tokens in shape.tokens if tokens not in kept]
    found = [_Measurement(shape, kept, "none"), _Measurement(shape, again, "full")]
    return [measurement for measurement in found if measurement.tokens]


def _measure(job: Job, measurement: _Measurement) -> None:
    num_gpus = 1
    if job.conditions.device == "cuda":
        num_gpus = job.conditions.num_gpus
    shape = measurement.shape
    folder = job.folder / shape.folder
    steps = []
    for tokens in measurement.tokens:
        half = tokens // _SAMPLES_PER_GPU // 2
        step = write_step(
            folder / f"samples-{tokens}",
            shape.hf,
            Lengths(prompt=half, shortest=half, longest=half),
            num_groups=num_gpus,
            group_size=_SAMPLES_PER_GPU,
        )
        steps.append(step)
    request = MeasureSpeed(
        hf=dict(shape.hf),
        samples=steps,
        trainer={
            **shape.trainer,
            "recompute": measurement.recompute,
            "max_tokens_per_microbatch": max(measurement.tokens),
        },
        repeats=2,
        replays_routes=shape.has_experts,
    )
    ranks = on_this_machine(num_gpus)
    place = folder / f"ranks-{measurement.recompute}"
    asked = Asked([request], MeasuredSpeed, place, ranks, patience_s=200.0)
    for tokens, times in zip(measurement.tokens, asked.answer().times, strict=True):
        _record(job, measurement, tokens, num_gpus, times)


def _record(job: Job, measurement: _Measurement, tokens: int, num_gpus: int, times: Times) -> None:
    """Record tokens per second and MFU of each pass on one micro-batch a GPU."""
    recorder = job.recorder
    shape = measurement.shape
    samples = _SAMPLES_PER_GPU * num_gpus
    length = tokens // _SAMPLES_PER_GPU
    forward = forward_flops(shape.hf, [length] * samples, samples * (length // 2))
    peak = peak_flops(job.conditions.gpu_name)
    passes = {
        "log-probs (forward)": (times.logprobs_s, forward),
        "forward and backward": (times.train_s, forward * (1 + _BACKWARD)),
        "backward": (times.train_s - times.logprobs_s, forward * _BACKWARD),
    }
    where = f"{measurement.name}, {tokens} tokens a GPU"
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
