"""Published times (`published.toml`) and what is predicted for them."""

from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from pydantic import Field

from grpo_megatron import assets
from grpo_megatron.config.base import Strict
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.devices import DEVICES
from grpo_megatron.plan.rank_bytes import bytes_per_parameter, shard_counts
from grpo_megatron.plan.timing.constants import Constants
from grpo_megatron.plan.timing.generation import (
    EngineLoad,
    cache_bytes_per_token,
    decode_amounts,
    generation_seconds,
)
from grpo_megatron.plan.timing.lengths import Lengths, fixed, log_normal
from grpo_megatron.plan.timing.step import StepSeconds
from grpo_megatron.plan.timing.trainer import (
    Machine,
    TrainerLoad,
    TrainerWork,
    trainer_seconds,
    trainer_work,
)
from grpo_megatron.plan.weights import Sizes, sizes_of

_GIB = 2**30
Half = Literal["fitted", "judged"]


class PublishedEngine(Strict):
    """Engines of a published run."""

    num_gpus: int = Field(ge=1)
    """Of all replicas."""
    tensor_parallel_size: int = Field(ge=1)
    """GPUs of a replica."""
    memory_utilisation: float = Field(gt=0, le=1)
    """Share of a GPU's memory."""
    weight_share: float = 1.0
    """Bytes of a weight, in those of bfloat16."""
    is_eager: bool = False
    """Whether steps are launched kernel by kernel, without CUDA graphs."""


class PublishedRow(Strict):
    """One published time."""

    name: str
    source: str
    """Project and file."""
    commit: str
    date: str
    configuration: str
    """What several releases may have times of; halves are made of these."""
    half: Half
    device: str
    gpus_per_node: int = Field(ge=1)
    model: str
    mode: Literal["colocated", "separate", "trainer"]
    """Trainer and engines on the same GPUs, on GPUs of their own, or no engines."""
    staleness: int = Field(ge=0)
    """Versions that answers may be behind."""
    num_prompts: int = Field(ge=1)
    num_samples: int = Field(ge=1)
    num_updates: int = Field(ge=1)
    mean_tokens: float = Field(gt=0)
    """Of a sample, with its prompt."""
    longest_tokens: int = Field(ge=1)
    logprob_tokens: int = Field(ge=1)
    num_logprob_passes: int = Field(ge=0)
    attention: Literal["native", "flash2", "flash3"] = "native"
    """Kernel; native: the fastest of the device's architecture."""
    is_packed: bool = True
    is_sft: bool = False
    gathers_weights: bool = False
    has_host_optimizer: bool = False
    trainer: TrainerConfig
    engine: PublishedEngine | None = None
    broadcasts_weights: bool = False
    """Whether one rank sends all weights to all engines, as NeMo-RL does where they have GPUs of
    their own."""
    seconds: dict[Literal["step_s", "generation_s", "trainer_s"], float]
    """What was published."""
    tokens_per_s_per_gpu: float | None = None
    """The same run, where it was published too."""


class PublishedTimes(Strict):
    """All of them."""

    left_out: dict[str, str]
    """What was published and cannot be predicted, and why."""
    models: dict[str, dict[str, Any]]
    """config.json of models that are no presets."""
    rows: tuple[PublishedRow, ...]


@cache
def published_times() -> PublishedTimes:
    """Return what `published.toml` holds."""
    return PublishedTimes.model_validate(assets.tables(__file__, "published.toml"))


def predict(row: PublishedRow, constants: Constants) -> dict[str, float]:
    """Return predicted seconds under the names of the published ones."""
    found = predict_step(row, constants)
    every = {
        "step_s": found.step_s,
        "generation_s": found.generation_s,
        "trainer_s": found.trainer.total_s,
    }
    return {name: every[name] for name in row.seconds}


def predict_step(row: PublishedRow, constants: Constants) -> StepSeconds:
    """Return the phases of a row's step."""
    machine = _machine(row, constants)
    lengths = _lengths(row, constants)
    work = _work(row, lengths, constants["attention_backward_ratio"])
    trainer = trainer_seconds(work, machine)
    if row.engine is None:
        return StepSeconds(0.0, trainer, 0.0, 0.0, 0.0, 0.0, overlaps=False)
    engine = _sizes(row.model, _engine_layout(row.engine))
    replicas = row.engine.num_gpus / row.engine.tensor_parallel_size
    load_of_engine = EngineLoad(
        num_samples=row.num_samples / replicas,
        num_prompts=max(row.num_prompts / replicas, 1.0),
        lengths=lengths,
        capacity=_capacity(row, row.engine, engine, lengths, constants),
        weight_share=row.engine.weight_share,
        batches_in_flight=max(row.staleness, 1),
        is_eager=row.engine.is_eager,
    )
    weights = decode_amounts(engine, 1e9, 0.0).weight_bytes
    link = machine.link_bytes_per_s(row.trainer.num_ranks)
    if row.broadcasts_weights:
        weights *= row.engine.tensor_parallel_size
        link = machine.device.network_bytes_per_s * float(DEVICES["network"]["share"])
    switch_s = 0.0
    if row.mode == "colocated":
        switch_s = 2 * _state_bytes(work) / constants["host_bytes_per_s"]
    return StepSeconds(
        generation_s=generation_seconds(engine, load_of_engine, machine),
        trainer=trainer,
        publish_s=weights / link,
        pause_s=weights / link,
        switch_s=switch_s,
        overhead_s=machine.step_overhead_s,
        overlaps=row.staleness > 0,
    )


def _load(row: PublishedRow, lengths: Lengths) -> TrainerLoad:
    return TrainerLoad(
        num_samples=row.num_samples,
        num_updates=row.num_updates,
        lengths=lengths,
        max_tokens_per_microbatch=row.trainer.max_tokens_per_microbatch,
        max_tokens_per_logprob_microbatch=row.logprob_tokens,
        num_logprob_passes=row.num_logprob_passes,
        is_packed=row.is_packed,
        is_sft=row.is_sft,
        gathers_weights=row.gathers_weights,
        has_host_optimizer=row.has_host_optimizer,
    )


def error_of(predicted: float, published: float) -> float:
    """Return how far a prediction is off, as a share of what was published."""
    return abs(predicted - published) / published


def errors(rows: Mapping[str, Any], constants: Constants) -> dict[str, float]:
    """Return the error of every published number, by row and name."""
    found = {}
    for name, row in rows.items():
        predicted = predict(row, constants)
        for what, seconds in row.seconds.items():
            found[f"{name} {what}"] = error_of(predicted[what], seconds)
    return found


_WORK: dict[tuple[str, Lengths, float], TrainerWork] = {}
"""What does not depend on the constants that are fitted, by row."""


def _work(row: PublishedRow, lengths: Lengths, ratio: float) -> TrainerWork:
    key = (row.name, lengths, ratio)
    if key not in _WORK:
        _WORK[key] = trainer_work(_sizes(row.model, row.trainer), _load(row, lengths), ratio)
    return _WORK[key]


@cache
def _sizes(model: str, trainer: TrainerConfig) -> Sizes:
    hf = published_times().models.get(model) or load_preset(model).hf
    return sizes_of(hf, hf["vocab_size"], trainer)


@cache
def _engine_layout(engine: PublishedEngine) -> TrainerConfig:
    size = engine.tensor_parallel_size
    return TrainerConfig(num_ranks=size, tensor_parallel_size=size)


def _machine(row: PublishedRow, constants: Constants) -> Machine:
    device = constants.device(row.device)
    share = 1.0
    if row.attention == "flash2" and device.architecture in ("hopper", "blackwell"):
        share = constants[f"flash2_{device.architecture}_share"]
    return Machine(constants, device, row.gpus_per_node, share)


def _lengths(row: PublishedRow, constants: Constants) -> Lengths:
    if row.engine is None:
        return fixed(row.mean_tokens, row.name)
    prompt = constants["prompt_tokens"]
    return log_normal(
        prompt,
        row.mean_tokens - prompt,
        row.longest_tokens - prompt,
        constants["answer_sigma"],
        row.name,
    )


def _capacity(
    row: PublishedRow,
    engine: PublishedEngine,
    sizes: Sizes,
    lengths: Lengths,
    constants: Constants,
) -> int:
    memory = DEVICES["memory"][row.device] * _GIB * engine.memory_utilisation
    weights = decode_amounts(sizes, 1e9, 0.0, engine.weight_share).weight_bytes
    room = max(memory - weights - DEVICES["engine"] * _GIB, 0.0)
    in_cache = room / cache_bytes_per_token(sizes) / lengths.total
    return max(int(min(in_cache, constants["default_max_num_seqs"])), 1)


def _state_bytes(work: TrainerWork) -> float:
    """Weights, gradients and optimizer state of a rank of the first stage."""
    replicas, expert_replicas = shard_counts(work.sizes.trainer)
    of_one = bytes_per_parameter(work.sizes.symbols["element"])
    held = work.parameters[0]
    whole = (of_one.weights + of_one.gradients) * held.total
    sharded = held.dense / replicas + held.experts / expert_replicas
    return whole + of_one.optimizer * sharded
