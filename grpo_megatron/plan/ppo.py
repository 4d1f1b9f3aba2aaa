"""Memory of the models of PPO beside those of GRPO, by the planner's closed forms.

PPO (arXiv:2203.02155) trains a critic as large as the policy, with a value head in the place of the
output layer. GRPO takes the mean of a group for it (arXiv:2402.03300). Activations, KV caches and
the engine are left out: the models of an algorithm are trained one after the other, so that they
are those of one model."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_megatron import assets
from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import ModelConfig, RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.memory import fullest_static, has_frozen_routers, vocabulary_of
from grpo_megatron.plan.model_facts import configuration_of
from grpo_megatron.plan.rank_bytes import (
    BytesPerParameter,
    bytes_per_parameter,
    inference_bytes,
    shard_counts,
)
from grpo_megatron.plan.weights import Sizes, sizes_of, weights_of_chunk

DENSE_SHAPES = assets.tables(__file__, "dense_shapes.toml")
MODELS = ("policy", "critic", "reference", "reward model")
_TRAINED = ("policy", "critic")
_VALUED = ("critic", "reward model")
"""Models with a value head: a number a token."""
ALGORITHMS = {
    "PPO": ("policy", "critic", "reference"),
    "PPO with a reward model": ("policy", "critic", "reference", "reward model"),
    "GRPO with KL": ("policy", "reference"),
    "GRPO without KL": ("policy",),
}
"""The models that each keeps, by name."""


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """One model of an algorithm."""

    model: str
    is_trained: bool
    has_value_head: bool
    parameters: int  # of the whole model
    rank_parameters: int  # of a rank of the comparison's stage
    parts: dict[str, int]  # bytes of that rank by component
    all_ranks: int  # bytes of all ranks together

    @property
    def rank(self) -> int:
        """Bytes of the rank."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class AlgorithmMemory:
    """All models of an algorithm. Every rank of a stage is taken to be as full as its fullest,
    which differs from the others by padding."""

    algorithm: str
    models: tuple[str, ...]
    rank: int  # bytes of the fullest rank
    all_ranks: int
    share_of_ppo: float  # of all ranks


@dataclass(frozen=True, slots=True)
class Comparison:
    """PPO and GRPO at one layout."""

    num_ranks: int
    stage: int  # the pipeline stage that is fullest under PPO
    per_parameter: BytesPerParameter  # of a model that is trained
    optimizer_shards: int  # ranks that share the optimizer state; 1: each has all
    expert_optimizer_shards: int
    models: tuple[ModelMemory, ...]
    algorithms: tuple[AlgorithmMemory, ...]


def comparison_of(config: RunConfig) -> Comparison:
    """PPO and GRPO with the model and the trainer's layout of a valid recipe."""
    hf, _ = configuration_of(config.model)
    return compare(
        hf,
        vocabulary_of(hf, config.model),
        config.trainer,
        frozen_routers=has_frozen_routers(config),
        on_gpu=config.placement.gpus_per_node > 0,
    )


def is_model_name(name: str) -> bool:
    """Whether `comparison_of_model` knows the name."""
    return name in DENSE_SHAPES or name in preset_names()


def comparison_of_model(name: str) -> Comparison:
    """Return the comparison of a model preset at its first recommended layout, or of `7b`, `13b`,
    `70b`."""
    if name in DENSE_SHAPES:
        shape = DENSE_SHAPES[name]
        trainer = TrainerConfig(**shape["trainer"])
        return compare(shape["hf"], shape["hf"]["vocab_size"], trainer)
    preset = load_preset(name)
    trainer = TrainerConfig()
    if preset.layouts:
        trainer = TrainerConfig(**preset.layouts[0]["trainer"])
    return compare(preset.hf, vocabulary_of(preset.hf, ModelConfig(preset=name)), trainer)


def compare(
    hf: Mapping[str, Any],
    vocab_size: int,
    trainer: TrainerConfig,
    *,
    frozen_routers: bool = False,
    on_gpu: bool = True,
) -> Comparison:
    """PPO and GRPO with a model (`config.json`) at a layout that obeys the rules. Critic and reward
    model have the policy's layers."""
    policy = sizes_of(hf, vocab_size, trainer)
    parts = {}
    for model in MODELS:
        sizes = replace(policy, num_scalars=int(model in _VALUED))
        parts[model] = _parts_by_stage(model, sizes, frozen_routers=frozen_routers, on_gpu=on_gpu)
    ranks_per_stage = trainer.num_ranks // trainer.pipeline_parallel_size
    algorithms = _algorithms(parts, ranks_per_stage)
    ppo = _rank_bytes(parts, ALGORITHMS["PPO"])
    stage = ppo.index(max(ppo))

    whole = sizes_of(hf, vocab_size, TrainerConfig())
    models = []
    for model, of_stages in parts.items():
        has_value_head = model in _VALUED
        models.append(
            ModelMemory(
                model,
                is_trained=model in _TRAINED,
                has_value_head=has_value_head,
                parameters=_num_parameters(replace(whole, num_scalars=int(has_value_head)), 0),
                rank_parameters=_num_parameters(
                    replace(policy, num_scalars=int(has_value_head)), stage
                ),
                parts=of_stages[stage],
                all_ranks=ranks_per_stage * sum(_rank_bytes(parts, [model])),
            )
        )
    optimizer_shards = 1
    expert_optimizer_shards = 1
    if trainer.distributed_optimizer:
        optimizer_shards, expert_optimizer_shards = shard_counts(trainer)
    return Comparison(
        num_ranks=trainer.num_ranks,
        stage=stage,
        per_parameter=bytes_per_parameter(policy.symbols["element"]),
        optimizer_shards=optimizer_shards,
        expert_optimizer_shards=expert_optimizer_shards,
        models=tuple(models),
        algorithms=tuple(algorithms),
    )


def _parts_by_stage(
    model: str, sizes: Sizes, *, frozen_routers: bool, on_gpu: bool
) -> list[dict[str, int]]:
    """Return bytes by component of the fullest rank of every pipeline stage."""
    found = []
    for stage in range(sizes.trainer.pipeline_parallel_size):
        if model in _TRAINED:
            static = fullest_static(sizes, stage, frozen_routers=frozen_routers, on_gpu=on_gpu)
            found.append(static.parts)
        else:
            found.append(inference_bytes(sizes, stage))
    return found


def _rank_bytes(
    parts: Mapping[str, Sequence[Mapping[str, int]]], models: Sequence[str]
) -> list[int]:
    """Return bytes of a rank of every stage that holds all of `models`."""
    totals = []
    for of_stage in zip(*[parts[model] for model in models], strict=True):
        totals.append(sum(sum(of_model.values()) for of_model in of_stage))
    return totals


def _algorithms(
    parts: Mapping[str, Sequence[Mapping[str, int]]], ranks_per_stage: int
) -> list[AlgorithmMemory]:
    of_ppo = sum(_rank_bytes(parts, ALGORITHMS["PPO"]))
    found = []
    for algorithm, models in ALGORITHMS.items():
        by_stage = _rank_bytes(parts, models)
        memory = AlgorithmMemory(
            algorithm,
            models,
            rank=max(by_stage),
            all_ranks=ranks_per_stage * sum(by_stage),
            share_of_ppo=sum(by_stage) / of_ppo,
        )
        found.append(memory)
    return found


def _num_parameters(s: Sizes, stage: int) -> int:
    """Count the parameters of a rank of a stage."""
    count = 0
    for chunk in range(s.num_chunks):
        count += sum(weight.numel for weight in weights_of_chunk(s, stage, chunk))
    return count
