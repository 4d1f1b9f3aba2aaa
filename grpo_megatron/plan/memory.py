"""A recipe's plan: memory of every stage's fullest rank, and what a step moves and writes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.passes import has_reference
from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import ModelConfig, RolloutConfig, RunConfig
from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.devices import DEFAULT_DEVICE, DEVICES, device_bytes
from grpo_megatron.plan.engine_arguments import MEMORY_SHARE
from grpo_megatron.plan.engine_share import EngineShares, engine_shares, setting_of_share
from grpo_megatron.plan.fp8_weights import bytes_of
from grpo_megatron.plan.lora import engine_layers, max_lora_rank
from grpo_megatron.plan.model_facts import configuration_of, facts_from_hf, origin_of
from grpo_megatron.plan.publishing import PublishPlan, plan_publish
from grpo_megatron.plan.rank_bytes import (
    HOST_BYTES_PER_PARAMETER,
    bytes_per_parameter,
    inference_bytes,
    static_bytes,
)
from grpo_megatron.plan.step_memory import step_bytes
from grpo_megatron.plan.weights import ELEMENT_BYTES, Sizes, Weight, sizes_of, weights_of_chunk

_GIB = 2**30
_SAVED_OPTIMIZER_BYTES = 12
"""Of a trained parameter in a checkpoint: a float32 weight and Adam's two moments."""
_TOKEN_ID_BYTES = 4
_LOGPROB_BYTES = 4
CRITIC = "critic_"
"""Before the names of components that a critic holds beside the policy's."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Memory of the fullest rank of a pipeline stage."""

    stage: int
    rank: int
    parts: dict[str, int]  # bytes by component

    @property
    def total(self) -> int:
        """Bytes of all components."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run needs, before anything is started."""

    stages: tuple[RankMemory, ...]
    usable_bytes: int | None  # of a GPU, for the trainer; None on a CPU
    engine: dict[str, int]
    """Of a GPU: bytes of weights and KV cache; tokens of a server's cache. Empty without
    engines."""
    shares: EngineShares | None
    """Of a GPU that an engine may take; None on a CPU, and without engines."""
    publish: PublishPlan | None  # None without engines
    numbers: dict[str, float]  # of the run; tokens and what follows from them at full length

    @property
    def worst(self) -> RankMemory:
        """The rank that needs the most memory."""
        return max(self.stages, key=lambda rank: rank.total)


def plan_of(config: RunConfig, device: str = DEFAULT_DEVICE, *, worst_only: bool = False) -> Plan:
    """Return the plan of a valid recipe; `device` is a name in `devices.toml`. `worst_only`:
    without the stages that another one is always as full as."""
    sizes = policy_sizes(config)
    memory: int | None = None
    usable: int | None = None
    if config.placement.gpus_per_node:
        memory = device_bytes(device)
        usable = _usable_of_gpu(memory)
        if config.shares_gpus:
            usable -= int(_utilisation(config) * memory)
    work = workload_of(config, sizes)
    pp = config.trainer.pipeline_parallel_size
    wanted = list(range(pp))
    if worst_only:
        wanted = sizes.first_stages()
    stages = tuple(_fullest(config, sizes, work, stage) for stage in wanted)
    fullest = max(rank.total for rank in stages)
    engine, shares, publish = _plan_of_engines(config, memory, fullest)
    numbers = _numbers(config, sizes, work["num_microbatches"])
    if offloads_optimizer(config) and config.trains:
        numbers["optimizer_on_a_host_bytes"] = _host_bytes(config, sizes)
    if config.adapter_domains and sizes.lora is not None and config.placement.gpus_per_node:
        numbers["adapters_on_a_host_bytes"] = _host_bytes_of_domains(config, stages)
    if sizes.lora is not None:
        of_weights = config.model_copy(update={"lora": None})
        numbers["fullest_rank_without_adapters_bytes"] = _worst_total(of_weights, device)
    return Plan(
        stages,
        usable,
        engine=engine,
        shares=shares,
        publish=publish,
        numbers=numbers,
    )


def _plan_of_engines(
    config: RunConfig, gpu_bytes: int | None, fullest: int
) -> tuple[dict[str, int], EngineShares | None, PublishPlan | None]:
    """Return what `Plan` has of engines: `engine`, `shares` and `publish`.

    gpu_bytes: of a GPU's memory, None on a CPU; fullest: bytes of the fullest trainer rank."""
    if config.num_replicas == 0:
        return {}, None, None
    hf, _ = configuration_of(config.model)
    vocab_size = vocabulary_of(hf, config.model)
    of_worker = _engine_bytes(config, hf, vocab_size)
    shares: EngineShares | None = None
    if gpu_bytes is not None:
        needed = of_worker.beside_cache + config.rollout.max_model_len * of_worker.token
        shares = engine_shares(config, gpu_bytes, needed, _usable_of_gpu(gpu_bytes) - fullest)
    published = of_worker.weights
    if config.engine_adapters:
        published = len(config.engine_adapters) * _adapter_bytes(config, hf, vocab_size)
    engine = _engine(config, of_worker, gpu_bytes)
    return engine, shares, plan_publish(config, published)


def policy_sizes(config: RunConfig, layout: TrainerConfig | None = None) -> Sizes:
    """Return the sizes of the model that a run's trainer builds: with the head of a reward model,
    with one of values beside the output layer, with adapters.

    layout: of ranks, where it is not the recipe's."""
    hf, _ = configuration_of(config.model)
    if layout is None:
        layout = config.trainer
    return sizes_of(
        hf,
        vocabulary_of(hf, config.model),
        layout,
        lora_of(config),
        num_scalars=config.num_scalars,
        has_value_head=config.policy_has_value_head,
    )


def whole_model(config: RunConfig) -> Sizes:
    """Return the sizes of the same model on one rank, without adapters."""
    layout = TrainerConfig(vision_tower=config.trainer.vision_tower)
    return policy_sizes(config.model_copy(update={"lora": None}), layout)


def _usable_of_gpu(memory: int) -> int:
    """Return bytes that a trainer can use of a GPU that is its own."""
    return int((memory - DEVICES["context"] * _GIB) * (1 - DEVICES["gaps"]))


def _worst_total(config: RunConfig, device: str) -> int:
    """Return bytes of a recipe's fullest rank."""
    return plan_of(config, device, worst_only=True).worst.total


def offloads_optimizer(config: RunConfig) -> bool:
    """Whether the optimizer's state is in the memory of hosts; without a GPU none moves."""
    return config.trainer.offload_optimizer and config.placement.gpus_per_node > 0


def _host_bytes(config: RunConfig, s: Sizes) -> int:
    """Return bytes of optimizers in the memory of a node with as many ranks as it can have."""
    parameters = 0
    for stage in range(s.trainer.pipeline_parallel_size):
        parameters = max(parameters, _parameters_of_state(config, s, stage))
    if config.has_own_critic:
        parameters *= 2
    ranks = min(config.placement.gpus_per_node, config.trainer.num_ranks)
    return ranks * parameters * HOST_BYTES_PER_PARAMETER


def _host_bytes_of_domains(config: RunConfig, stages: Sequence[RankMemory]) -> int:
    """Return bytes of optimizers in the memory of a node with as many ranks as it can have, where
    every domain has adapters of its own: GPUs have the state of one domain, hosts that of all."""
    of_rank = max(rank.parts["optimizer"] for rank in stages)
    if config.trainer.precision == "float32":  # two moments; the third copy is the weight itself
        of_rank = of_rank * 3 // 2
    ranks = min(config.placement.gpus_per_node, config.trainer.num_ranks)
    return ranks * len(config.adapter_domains) * of_rank


def _parameters_of_state(config: RunConfig, s: Sizes, stage: int) -> int:
    """Return weights of which the fullest rank of a stage has the optimizer state."""
    on_gpus = replace(s, trainer=s.trainer.model_copy(update={"offload_optimizer": False}))
    static = fullest_static(on_gpus, stage, frozen_routers=has_frozen_routers(config), on_gpu=True)
    of_one = bytes_per_parameter(s.symbols["element"])
    return static.parts["optimizer"] // of_one.optimizer


MEMORY_RULES = RuleSet()
"""Their checks take the run and its plan."""


def memory_problems(config: RunConfig, plan: Plan) -> list[Violation]:
    """Return what does not fit; nothing is known of a CPU's memory."""
    return list(MEMORY_RULES.violations(config, plan, config=config))


@MEMORY_RULES.rule("trainer_memory")
def the_fullest_rank_fits(config: RunConfig, plan: Plan) -> Violation | None:
    """Refuse a trainer layout that does not fit into the GPUs."""
    worst = plan.worst
    if plan.usable_bytes is None or worst.total <= plan.usable_bytes:
        return None
    offloading = ""
    of_optimizers = worst.parts["optimizer"] + worst.parts.get(f"{CRITIC}optimizer", 0)
    if of_optimizers and worst.total - of_optimizers <= plan.usable_bytes and config.lora is None:
        offloading = (
            f", or set trainer.offload_optimizer: {of_optimizers / _GIB:.1f} GiB go to the host"
        )
    beside_engine = ""
    smaller = "a layout that fits"
    if config.shares_gpus:
        beside_engine = f" beside an engine with {_utilisation(config):.0%} of the GPU"
        smaller = "a layout that needs less"
    remedy = (
        f"use {smaller}, more trainer nodes, or fewer trainer.max_tokens_per_microbatch{offloading}"
    )
    if config.shares_gpus and plan.shares is not None:
        remedy = _remedy_of_shares(config, plan.shares, remedy)
    return Violation(
        "trainer.num_ranks",
        f"rank {worst.rank} (pipeline stage {worst.stage}) needs {worst.total / _GIB:.1f} GiB and "
        f"has {plan.usable_bytes / _GIB:.1f} GiB{beside_engine}",
        remedy=remedy,
        related=(
            "trainer.max_tokens_per_microbatch",
            "trainer.recompute",
            "trainer.offload_optimizer",
            "placement.mode",
            "rollout.engine_arguments",
        ),
    )


def _remedy_of_shares(config: RunConfig, shares: EngineShares, otherwise: str) -> str:
    """Return the share of a GPU that is enough for an engine and leaves the trainer enough; else
    that there is none, and what to do `otherwise`."""
    if shares.largest is not None:
        return f"set {setting_of_share(config.rollout, shares.largest)}"
    left = "nothing"
    if shares.most > 0:
        left = f"at most {shares.most:.0%}"
    return (
        f"no share of a GPU is enough for both: an engine needs {shares.least:.0%} and this "
        f"trainer leaves {left}; {otherwise}, a larger rollout.tensor_parallel_size, or "
        "placement.mode='separate'"
    )


@MEMORY_RULES.rule("engine_memory")
def a_sequence_fits_into_the_cache(config: RunConfig, plan: Plan) -> Violation | None:
    """Refuse engines whose cache is shorter than the longest sequence."""
    if not plan.engine:
        return None
    kv_tokens = plan.engine["kv_tokens"]
    longest = config.rollout.max_model_len
    if kv_tokens >= longest:
        return None
    larger_share = ""
    if plan.shares is not None and plan.shares.largest is not None:
        larger_share = f", or set {setting_of_share(config.rollout, plan.shares.largest)}"
    return Violation(
        "rollout.tensor_parallel_size",
        f"{plan.engine['weights'] / _GIB:.1f} GiB of weights a GPU leave room for the keys and "
        f"values of {kv_tokens} tokens, and a sequence may have {longest}",
        remedy=f"raise rollout.tensor_parallel_size or lower rollout.max_model_len{larger_share}",
        related=("rollout.max_model_len", "rollout.engine_arguments"),
    )


def vocabulary_of(hf: Mapping[str, Any], model: ModelConfig) -> int:
    """Return tokens of the configured model, whose config.json is `hf`."""
    return hf.get("vocab_size") or _made_vocabulary(origin_of(model))


def _made_vocabulary(model: ModelConfig) -> int:
    """Return tokens of a preset's own tokenizer: padding, end of text, characters, fillers."""
    assert model.preset is not None  # a checkpoint's config.json tells
    table = load_preset(model.preset).tokenizer
    multiple = int(table.get("pad_to_multiple", 32))
    return -(-(2 + len(table["alphabet"])) // multiple) * multiple


class Workload(TypedDict):
    """What a rank computes in an optimizer step, as `step_bytes` takes it."""

    tokens: int  # of a micro-batch
    num_microbatches: int
    replayed: bool  # routes
    on_gpu: bool
    trains: bool
    patches: int  # of the images of a micro-batch


def workload_of(config: RunConfig, s: Sizes) -> Workload:
    """Return the workload of a rank, for `step_bytes`; all samples are as long as they may be, and
    those of a model that sees have prompts that are all images, and no images in common."""
    t = config.trainer
    length = config.rollout.max_model_len
    samples = _samples_of_update(config)
    mine = -(-samples // s.trainer.dp)
    if _keeps_pairs(config):
        mine += mine % 2
    packed = samples_in_microbatch(config)
    prompt = max(length - config.rollout.max_new_tokens, 0)
    patches_of_sample = prompt * s.symbols.get("patches_of_token", 0)
    return {
        "tokens": min(t.max_tokens_per_microbatch, mine * length),
        "num_microbatches": -(-mine // packed),
        "replayed": config.routing.replay != "none",
        "on_gpu": config.placement.gpus_per_node > 0,
        "trains": config.trains,
        "patches": min(packed, mine) * patches_of_sample,
    }


def samples_in_microbatch(config: RunConfig) -> int:
    """Return how many samples of full length a micro-batch holds, at least 1; both answers of a
    pair share one."""
    count = config.trainer.max_tokens_per_microbatch // config.rollout.max_model_len
    if _keeps_pairs(config):
        count -= count % 2
    return max(count, 1)


def _keeps_pairs(config: RunConfig) -> bool:
    """Whether the samples of a step are pairs of answers, which are never apart."""
    return config.trains_preferences and config.compares_pairs


def _samples_of_update(config: RunConfig) -> int:
    """Most samples of an optimizer step, which has whole groups."""
    batch = config.batch
    prompts = -(-batch.num_prompts // batch.updates_per_rollout)
    if config.allocation is None:
        return prompts * _samples_of_prompt(config)
    others = (batch.num_prompts - prompts) * config.allocation.base_samples_per_prompt
    return min(prompts * config.largest_group, samples_of_step(config) - others)


def samples_of_step(config: RunConfig) -> int:
    """Most samples of a step; of a data set with several responses a row, as if each had one."""
    size = _samples_of_prompt(config)
    if config.sampling.dynamic:  # the groups that are kept may be the large ones
        size = config.largest_group
    return config.batch.num_prompts * size


def _samples_of_prompt(config: RunConfig) -> int:
    """Return how many answers of a prompt are trained: a pair, what a row has, or a group."""
    if _keeps_pairs(config):
        return 2
    if config.uses_dataset:  # labelled answers, and those with labels of their steps, too
        return 1
    return config.batch.num_samples_per_prompt


def _recorded_samples(config: RunConfig) -> int:
    """Return most samples of a step in the sample store: KTO has there, beside each labelled
    answer, the one to another prompt of which its baseline is made."""
    samples = samples_of_step(config)
    if config.trains_preferences and config.preferences.rows == "labelled":
        samples *= 2
    return samples


def _fullest(config: RunConfig, s: Sizes, work: Workload, stage: int) -> RankMemory:
    """Return what the fullest rank of a stage needs. A critic's step, which comes after the
    policy's and has no logits, is never higher than that."""
    if not config.trains:
        first_rank = stage * s.trainer.num_ranks // s.trainer.pipeline_parallel_size
        held = inference_bytes(s, stage)
        parts = {
            "weights": held["weights"],
            "gradients": 0,
            "optimizer": 0,
            "buffers": held["buffers"],
        }
        return RankMemory(stage, first_rank, parts | step_bytes(s, stage, **work))
    static = fullest_static(
        s, stage, frozen_routers=has_frozen_routers(config), on_gpu=work["on_gpu"]
    )
    parts = dict(static.parts)
    parts |= bytes_of_domains(config, s, stage)
    if config.has_own_critic:
        of_critic = fullest_static(
            replace(s, num_scalars=1),
            stage,
            frozen_routers=has_frozen_routers(config),
            on_gpu=work["on_gpu"],
        )
        for name, num_bytes in of_critic.parts.items():
            parts[f"{CRITIC}{name}"] = num_bytes
    return RankMemory(stage, static.rank, parts | step_bytes(s, stage, **work))


def bytes_of_domains(config: RunConfig, s: Sizes, stage: int) -> dict[str, int]:
    """Return the bytes of a rank's copies of the adapters of all domains, as a part `adapters`;
    empty where domains have none of their own."""
    if not config.adapter_domains or s.lora is None:
        return {}
    trained = 0
    for chunk in range(s.num_chunks):
        trained += _num_trained(weights_of_chunk(s, stage, chunk))
    num_elements = len(config.adapter_domains) * trained
    return {"adapters": int(s.symbols["element"]) * num_elements}


def lora_of(config: RunConfig) -> LoraConfig | None:
    """Return the adapters of a run whose memory they decide: a cold start trains all weights
    first."""
    if config.cold_start is not None:
        return None
    return config.lora


def has_frozen_routers(config: RunConfig) -> bool:
    """Whether routers have neither gradients nor optimizer state."""
    return config.routing.router_policy == "freeze_weights"


def fullest_static(s: Sizes, stage: int, *, frozen_routers: bool, on_gpu: bool) -> RankMemory:
    """Return what the fullest rank of a stage holds from start to end."""
    count = s.trainer.num_ranks // s.trainer.pipeline_parallel_size
    overlaps = s.trainer.overlap_communication
    if overlaps is None:
        overlaps = on_gpu
    static = {}
    for rank in (0, count - 1):  # shards differ by padding only
        static[rank] = static_bytes(
            s,
            stage,
            rank,
            frozen_routers=frozen_routers,
            overlaps=overlaps,
            offloads=on_gpu and s.trainer.offload_optimizer,
        )
    rank = max(static, key=lambda rank: sum(static[rank].values()))
    return RankMemory(stage, stage * count + rank, static[rank])


class _Parameters(NamedTuple):
    """Numbers of parameters of a whole model."""

    policy: int  # without adapters, with heads
    adapters: int  # of all domains, where each has its own
    trained: int  # of both
    critic: int  # of a critic of its own

    @property
    def held(self) -> int:
        """Of policy and adapters."""
        return self.policy + self.adapters


def _count_parameters(config: RunConfig, whole: Sizes) -> _Parameters:
    weights = weights_of_chunk(whole, 0, 0)
    adapters = 0
    trained = _num_trained(weights)
    if config.lora is not None:
        without_head = replace(whole, lora=config.lora, has_value_head=False)
        adapters = _num_trained(weights_of_chunk(without_head, 0, 0))
        adapters *= max(1, len(config.adapter_domains))
        of_head = int(whole.symbols["hidden"]) * whole.has_value_head
        trained = adapters + of_head
    if not config.trains:
        trained = 0
    critic = 0
    if config.has_own_critic:
        of_critic = weights_of_chunk(replace(whole, num_scalars=1), 0, 0)
        critic = sum(weight.numel for weight in of_critic)
    policy = sum(weight.numel for weight in weights)
    return _Parameters(policy, adapters, trained, critic)


def _num_trained(weights: Sequence[Weight]) -> int:
    return sum(weight.numel for weight in weights if weight.is_trained)


def _checkpoint_bytes(config: RunConfig, parameters: _Parameters, element: int) -> int:
    """Return bytes of a checkpoint. element: of a weight of the model."""
    of_policy = element * parameters.held + _SAVED_OPTIMIZER_BYTES * parameters.trained
    of_critic = (element + _SAVED_OPTIMIZER_BYTES) * parameters.critic
    # without adapters the model is its own reference, for as long as that stays the first one
    is_reference_there = config.lora is not None and config.objective.reference_interval == 0
    of_reference = 0
    if has_reference(config) and not is_reference_there:
        of_reference = element * parameters.policy
    return of_policy + of_critic + of_reference


def _store_bytes(config: RunConfig, whole: Sizes, num_tokens: int) -> int:
    """Return bytes of a step in the sample store, at full length: ids, log-probs and routes."""
    token_bytes = _TOKEN_ID_BYTES + _LOGPROB_BYTES
    if config.records_routes:
        expert_id_bytes = 1
        if whole.symbols["experts"] > 256:
            expert_id_bytes = 2
        num_moe_layers = sum(whole.layers_of(0, 0))
        token_bytes += num_moe_layers * whole.symbols["top_k"] * expert_id_bytes
    return num_tokens * token_bytes


def _numbers(config: RunConfig, s: Sizes, num_microbatches: int) -> dict[str, float]:
    """Return what `Plan.numbers` has. s: the model on the ranks of the recipe."""
    whole = whole_model(config)
    element = s.symbols["element"]
    parameters = _count_parameters(config, whole)
    found: dict[str, float] = {
        "parameters": parameters.policy,
        "trained_parameters": parameters.trained,
    }
    if parameters.critic:
        found["critic_parameters"] = parameters.critic
    num_waits = s.trainer.pipeline_parallel_size - 1  # of a stage, in micro-batches of a chunk
    num_computed = num_microbatches * s.num_chunks
    tokens = samples_of_step(config) * config.rollout.max_model_len
    recorded_tokens = _recorded_samples(config) * config.rollout.max_model_len
    found |= {
        "microbatches_per_update": num_microbatches,
        "bubble_fraction": num_waits / (num_computed + num_waits),
        "tokens_per_step": tokens,
        "computed_tokens_per_step": _computed_tokens(config),
    }
    if config.num_replicas:
        published = weights_of_chunk(replace(whole, has_value_head=False), 0, 0)
        found["publish_bytes"] = bytes_of(published, config.rollout.fp8, element)
    return found | {
        "checkpoint_bytes": _checkpoint_bytes(config, parameters, element),
        "sample_store_bytes": _store_bytes(config, whole, recorded_tokens),
    }


def _computed_tokens(config: RunConfig) -> int:
    """Return tokens of a step of which the trainer computes a prompt once for all of its samples,
    at full length; a group that no micro-batch holds has its prompt in several."""
    samples = samples_of_step(config)
    length = config.rollout.max_model_len
    if not config.trainer.share_prefixes:
        return samples * length
    completion = min(config.rollout.max_new_tokens, length - 1)
    return config.batch.num_prompts * (length - completion) + samples * completion


def engine_layout(rollout: RolloutConfig) -> TrainerConfig:
    """Return how vLLM splits a model, as a trainer would: experts over all workers of a server and
    the rest by TP; key-value heads are repeated where there are fewer."""
    return TrainerConfig(
        num_ranks=rollout.num_workers,
        tensor_parallel_size=rollout.tensor_parallel_size,
        expert_tensor_parallel_size=rollout.num_workers,
        precision=rollout.dtype,
    )


class _EngineBytes(NamedTuple):
    """Bytes of a worker of an engine."""

    weights: int
    adapters: int
    token: int
    """Of the keys and values of one token."""

    @property
    def beside_cache(self) -> float:
        """What a worker on a GPU has beside its cache, a forward pass among it."""
        return self.weights + self.adapters + float(DEVICES["engine"]) * _GIB


def _engine_bytes(config: RunConfig, hf: dict, vocab_size: int) -> _EngineBytes:
    rollout = config.rollout
    s = sizes_of(hf, vocab_size, engine_layout(rollout))
    element = ELEMENT_BYTES[rollout.dtype]
    weights = bytes_of(weights_of_chunk(s, 0, 0), rollout.fp8, element)
    adapters = 0
    if config.engine_adapters:  # each in its slot; as it was published, and as vLLM keeps it
        of_one = _slot_bytes(config, hf, vocab_size) + 2 * _adapter_bytes(config, hf, vocab_size)
        adapters = len(config.engine_adapters) * of_one
    per_layer = s.symbols.get("latent_rope") or 2 * max(s.symbols["key"], s.model["kv_channels"])
    return _EngineBytes(weights, adapters, per_layer * s.model["num_layers"] * element)


def _engine(config: RunConfig, of_worker: _EngineBytes, memory: int | None) -> dict[str, int]:
    """Return what `Plan.engine` has. memory: bytes of a GPU, None on a CPU."""
    cache = int(config.rollout.kv_cache_gib * _GIB)
    if memory:
        cache = max(int(_utilisation(config) * memory - of_worker.beside_cache), 0)
    found = {"weights": of_worker.weights}
    if of_worker.adapters:
        found["adapters"] = of_worker.adapters
    return found | {"kv_cache": cache, "kv_tokens": cache // of_worker.token}


def engine_cache_bytes(config: RunConfig, gpu_bytes: int) -> int:
    """Return bytes of keys and values in each worker of an engine, on a GPU with `gpu_bytes` of
    memory: what weights, and a forward pass, leave of the share that vLLM takes."""
    hf, _ = configuration_of(config.model)
    of_worker = _engine_bytes(config, hf, vocabulary_of(hf, config.model))
    return _engine(config, of_worker, gpu_bytes)["kv_cache"]


_PARTS_OF_ENGINE_LAYER = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
)
"""Layers of Hugging Face's that are one of vLLM's, in which each has a slot if one of them has."""


def _slot_bytes(config: RunConfig, hf: dict, vocab_size: int) -> int:
    """Return bytes of the slots for one adapter that each worker of an engine has.

    A of a layer that is split by rows, and B of one that is split by columns, are whole there."""
    lora = config.lora
    assert lora is not None  # engines have adapters
    targets = set(engine_layers(lora, facts_from_hf(hf)))
    for parts in _PARTS_OF_ENGINE_LAYER:
        if targets.intersection(parts):
            targets.update(parts)
    slots = LoraConfig(rank=max_lora_rank(lora.rank), targets=tuple(sorted(targets)))
    return _trained_bytes(hf, vocab_size, engine_layout(config.rollout), slots)


def _adapter_bytes(config: RunConfig, hf: dict, vocab_size: int) -> int:
    """Return bytes of one whole adapter, which each worker of an engine gets in a publish."""
    return _trained_bytes(
        hf, vocab_size, TrainerConfig(precision=config.trainer.precision), config.lora
    )


def _trained_bytes(
    hf: dict, vocab_size: int, layout: TrainerConfig, lora: LoraConfig | None
) -> int:
    """Return bytes of the adapters of dense layers on a rank of a layout without pipeline
    stages."""
    weights = weights_of_chunk(sizes_of(hf, vocab_size, layout, lora), 0, 0)
    trained = sum(w.numel for w in weights if w.is_trained and w.kind != "expert")
    return ELEMENT_BYTES[layout.precision] * trained


def _utilisation(config: RunConfig) -> float:
    """Share of a GPU that vLLM takes."""
    given = config.rollout.engine_argument(MEMORY_SHARE)
    return float(given or DEVICES["utilisation"])
