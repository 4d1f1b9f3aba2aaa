"""Part `layers`: Transformer Engine's layers against torch's.

Both round in bfloat16, each in its own way, so each is held against torch's layers in float32: what
Transformer Engine adds to the error of a gradient has to be about what torch adds."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from grpo_megatron.errors import TrainerError
from grpo_megatron.prove.compare import largest_difference
from grpo_megatron.prove.part import Job, fp8_in_blocks
from grpo_megatron.prove.random_weights import write_model
from grpo_megatron.prove.ranks import WITHOUT_TF32, Asked, on_this_machine
from grpo_megatron.prove.requests import TrainedSteps, TrainerTable, TrainSteps
from grpo_megatron.prove.settings import sizes_for
from grpo_megatron.prove.workload import models, write_step

_TIMES_TORCH = 2.0
"""How many times torch's own error Transformer Engine's may be."""
_ON_TOP = 0.02
"""What may come on top of that, relative to the gradient."""
_FLOAT32_ERROR = 1e-3
_FP8_ERROR = 0.5
"""Relative to the gradient: FP8 has three bits of mantissa."""
_LOGPROB = {"bfloat16": 0.1, "float32": 1e-3, "fp8": 0.5}
"""Largest mean |difference| of log-probs to torch's in float32, in nats."""
_ENGINE_ATTENTION = "bfloat16 with its attention"
_TABLES: dict[str, TrainerTable] = {
    "bfloat16": {"precision": "bfloat16"},
    _ENGINE_ATTENTION: {"precision": "bfloat16", "attention": "transformer_engine"},
    "fp8": {"precision": "bfloat16", "fp8": "blockwise"},
    "float32": {"precision": "float32"},
}


@dataclass(frozen=True)
class _Model:
    """A tiny model that both kinds of layers are computing."""

    name: str
    folder: Path
    precisions: list[str]
    of_torch: Asked[TrainedSteps]
    of_engine: Asked[TrainedSteps]


def run(job: Job) -> None:
    """Compute gradients of each tiny model with both, by Hugging Face names."""
    sizes = sizes_for(job.conditions)
    precisions = ["bfloat16", "float32"]
    if job.conditions.device == "cuda" and not fp8_in_blocks(job.conditions):
        precisions.insert(1, "fp8")
    started = []
    for name, hf in models(sizes.model).items():
        folder = job.folder / name
        has_experts = name != "dense"
        wanted = list(precisions)
        if name == "latent":  # 'auto' does not choose it, see docs/kernels.md
            wanted.append(_ENGINE_ATTENTION)
        samples = write_step(
            folder / "samples",
            hf,
            sizes.lengths,
            num_groups=sizes.num_groups,
            group_size=sizes.group_size,
            with_routes=has_experts,
        )
        model = write_model(folder / "model", hf)
        started.append(_start(name, folder, model, samples, wanted))
    for of_model in started:
        _compare(job, of_model)


def _start(name: str, folder: Path, model: Path, samples: Path, precisions: list[str]) -> _Model:
    """Let ranks begin: torch's layers in float32 and bfloat16, Transformer Engine's in all of
    `precisions`."""

    def request(kind: str, precision: str) -> TrainSteps:
        return TrainSteps(
            model=model,
            samples=samples,
            trainer={**_TABLES[precision], "max_tokens_per_microbatch": 2048},
            replays_routes=name != "dense",
            torch_layers=kind == "torch",
            gradients=_gradients_of(folder, kind, precision).absolute(),
        )

    ranks = on_this_machine(1, WITHOUT_TF32)
    of_torch = [request("torch", "float32"), request("torch", "bfloat16")]
    of_engine = [request("engine", precision) for precision in precisions]
    return _Model(
        name,
        folder,
        precisions,
        Asked(of_torch, TrainedSteps, folder / "torch", ranks),
        Asked(of_engine, TrainedSteps, folder / "engine", ranks),
    )


def _gradients_of(folder: Path, kind: str, precision: str) -> Path:
    return folder / f"{kind}-{precision}.safetensors"


def _compare(job: Job, model: _Model) -> None:
    """Record how far both are from torch in float32."""
    exact, rounded = model.of_torch.answers()
    found = dict(zip(model.precisions, model.of_engine.answers(), strict=True))
    for answer in (exact, rounded):
        if isinstance(answer, TrainerError):
            job.recorder.check(f"{model.name}: torch's layers compute", False, str(answer))
            return
    assert isinstance(exact, TrainedSteps)
    expected = load_file(_gradients_of(model.folder, "torch", "float32"))
    of_torch = load_file(_gradients_of(model.folder, "torch", "bfloat16"))
    torch_errors = errors_by_name(of_torch, expected)
    for precision, answer in found.items():
        told = f"{model.name}, {precision}"
        if isinstance(answer, TrainerError):
            if precision == _ENGINE_ATTENTION:  # nothing rests on it
                job.recorder.impossible(f"{told}: it computes", str(answer))
            else:
                job.recorder.check(f"{told}: it computes", False, str(answer))
            continue
        gradients = load_file(_gradients_of(model.folder, "engine", precision))
        errors = errors_by_name(gradients, expected)
        if precision == _ENGINE_ATTENTION:
            _record_attention(job, told, errors, _allowed("bfloat16", torch_errors))
            continue
        _check_logprobs(job, told, answer, exact, _LOGPROB[precision])
        _check_gradients(job, told, errors, _allowed(precision, torch_errors))


def _allowed(precision: str, torch_errors: Mapping[str, float]) -> dict[str, float]:
    """Return the largest relative error of each gradient."""
    allowed = {}
    for name, error in torch_errors.items():
        allowed[name] = _TIMES_TORCH * error + _ON_TOP
        if precision == "float32":
            allowed[name] = _FLOAT32_ERROR
        elif precision == "fp8":
            allowed[name] = _FP8_ERROR
    return allowed


def errors_by_name(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """Norm of the difference of each gradient, relative to the norm of what was expected; infinite
    where one is missing. A gradient that is expected to be zero is compared as it is."""
    errors = {}
    for name, gradient in expected.items():
        if name not in found or found[name].shape != gradient.shape:
            errors[name] = float("inf")
            continue
        size = float(np.linalg.norm(gradient)) or 1.0
        errors[name] = float(np.linalg.norm(found[name] - gradient)) / size
    return errors


def _check_logprobs(
    job: Job, told: str, found: TrainedSteps, exact: TrainedSteps, most: float
) -> None:
    differences = np.abs(np.array(found.logprobs) - np.array(exact.logprobs))
    mean = float(differences.mean())
    largest = largest_difference(found.logprobs, exact.logprobs)
    job.recorder.check(
        f"{told}: log-probs are those of torch in float32",
        mean <= most,
        f"mean difference {mean:.2g} nats, largest {largest:.2g}, allowed mean {most:g}",
    )


def _record_attention(
    job: Job, told: str, errors: Mapping[str, float], allowed: Mapping[str, float]
) -> None:
    """Record the gradients that are off with what is not chosen: whether it can be, one day."""
    wrong = [name for name in errors if errors[name] > allowed[name]]
    worst = max(errors, key=errors.__getitem__)
    job.recorder.figure(
        f"{told}: gradients that are off", len(wrong), f"of {len(errors)}", "0: it is right here"
    )
    job.recorder.figure(f"{told}: worst, {worst}", errors[worst], "of its norm")
    if wrong:
        job.recorder.note(f"{told}: {', '.join(sorted(wrong))}")


def _check_gradients(
    job: Job, told: str, errors: Mapping[str, float], allowed: Mapping[str, float]
) -> None:
    def excess(name: str) -> float:
        return errors[name] / allowed[name]

    worst = max(errors, key=excess)
    job.recorder.check(
        f"{told}: {len(errors)} gradients are those of torch in float32",
        excess(worst) <= 1.0,
        f"median error {statistics.median(errors.values()):.2g}; worst {worst}: "
        f"{errors[worst]:.2g}, allowed {allowed[worst]:.2g}",
    )
