"""The policy on this rank: model chunks, gradient buffers, optimizer, and its weights by name."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from megatron.core import distributed as ddp
from megatron.core import parallel_state
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.config.run import RunConfig
from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.errors import ConfigError
from grpo_megatron.image_settings import ImageSettings
from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.plan.tower import num_deep_levels
from grpo_megatron.trainer.lora.adapter import Adapter
from grpo_megatron.trainer.lora.attach import attach
from grpo_megatron.trainer.megatron import host_optimizer
from grpo_megatron.trainer.megatron.deep_features import add_after_layers
from grpo_megatron.trainer.megatron.kernels import Kernel, attention_is_torch
from grpo_megatron.trainer.megatron.layer_specs import block_spec
from grpo_megatron.trainer.megatron.model_config import kernels_of, transformer_config
from grpo_megatron.trainer.megatron.platform import HAS_CUDA
from grpo_megatron.trainer.megatron.policy_model import PolicyModel
from grpo_megatron.trainer.megatron.reward_head import RewardHead
from grpo_megatron.trainer.megatron.rope import axes_of, rotary
from grpo_megatron.trainer.megatron.upstream_fixes import mark_expert_parameters
from grpo_megatron.trainer.megatron.vision_tower import (
    ImageFeatures,
    build_tower,
    sum_tower_gradients,
)
from grpo_megatron.trainer.routing.router_replay import RouteReplay
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import TensorMap, is_beside_weights, rules_for

_LOCAL_EXPERT = re.compile(r"(local_experts\.|experts\.linear_fc\d\.(?:weight|bias))(\d+)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@dataclass
class Policy:
    """Everything that training changes."""

    hf: dict[str, Any]
    config: TransformerConfig
    chunks: list[ddp.DistributedDataParallel]
    optimizer: Any
    replay: RouteReplay
    lora: LoraConfig | None = None
    """How adapters are trained in place of the weights; None: the weights are trained."""
    settings: OptimizerConfig = field(default_factory=OptimizerConfig)
    """What the optimizer goes by."""

    @property
    def models(self) -> list[PolicyModel]:
        """The model chunks of this rank, without what wraps them."""
        models: list[PolicyModel] = unwrap_model(list(self.chunks))
        return models

    @cached_property
    def sharded(self) -> ShardedModel:
        """All weights, under global names."""
        return ShardedModel(
            tensor_map(self.hf, self.config),
            list(local_shards(self.chunks, self.config.num_moe_experts or 0)),
        )

    @cached_property
    def base(self) -> ShardedModel:
        """All weights as they are without adapters, under global names."""
        shards = [replace(shard, addend=None, prepare=None) for shard in self.sharded.shards]
        return ShardedModel(self.sharded.map, shards)

    @property
    def adapters(self) -> list[Adapter]:
        """The adapters on this rank; none where the weights are trained."""
        found: list[Adapter] = []
        for model in self.models:
            if model.adapters is not None:
                found += model.adapters.all()
        return found

    def begin_magnitudes(self) -> None:
        """Let the magnitudes of DoRA, if there are any, be those of the weights as they are now, so
        that the model computes as without adapters. Collective."""
        for model in self.models:
            if model.adapters is not None:
                model.adapters.begin_magnitudes()
        self.optimizer.reload_model_params()  # its fp32 copies follow

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Compute with the weights alone inside the block, as if no adapter had been trained."""
        models = [model.adapters for model in self.models if model.adapters is not None]
        for adapters in models:
            adapters.enabled = False
        try:
            yield
        finally:
            for adapters in models:
                adapters.enabled = True

    @contextmanager
    def at_temperature(self, temperature: float) -> Iterator[None]:
        """Compute log-probs at `temperature` inside the block, and as before behind it."""
        usual = [model.temperature for model in self.models]
        for model in self.models:
            model.temperature = temperature
        try:
            yield
        finally:
            for model, before in zip(self.models, usual, strict=True):
                model.temperature = before

    def optimizer_class(self) -> type | None:
        """Return the class that holds the moments: Transformer Engine's, Apex' or torch's; None
        where nothing is trained on this rank."""
        parts = self._optimizer_parts()
        if not parts:
            return None
        return host_optimizer.class_of_state(parts[0].optimizer)

    def has_optimizer_on_host(self) -> bool:
        """Say whether the moments are in the memory of the host."""
        parts = self._optimizer_parts()
        return bool(parts) and host_optimizer.is_on_host(parts[0].optimizer)

    # --- weights that the next forward gathers (`TrainerConfig.overlap_communication`)

    def gather_weights(self) -> None:
        """Wait until this rank has all of its weights. Collective over data parallelism."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def _optimizer_parts(self) -> list[Any]:
        """Return Megatron's optimizers of dense and expert parameters, where this rank has any."""
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [part for part in parts if part.optimizer is not None]

    def torch_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers inside of Megatron's, which hold moments and parameters."""
        return [part.optimizer for part in self._optimizer_parts()]

    def release(self) -> None:
        """Let the memory go, now that another policy has taken its place.

        The hooks by which gradients reach their buffers refer back to those through autograd nodes,
        which no collector sees."""
        for chunk in self.chunks:
            chunk.__dict__.clear()
        self.chunks = []
        self.optimizer = None

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Forget moments and steps, and go by other settings from now on."""
        for part in self._optimizer_parts():
            host_optimizer.forget_state(part.optimizer)
            for group in part.optimizer.param_groups:
                group.pop("step", None)  # Transformer Engine's Adam counts here, not in its state
        self.settings = optimizer
        self.apply_settings()

    def apply_settings(self) -> None:
        """Let the optimizer go by `settings`: when it is made, and after a load, for a checkpoint
        has those of the run that wrote it. Biases and weights of norms do not decay."""
        settings = self.settings
        for part in self._optimizer_parts():
            for group in part.optimizer.param_groups:
                group.update(
                    betas=(settings.beta1, settings.beta2),
                    eps=settings.eps,
                    weight_decay=settings.weight_decay * group.get("wd_mult", 1.0),
                )
            part.config.clip_grad = settings.clip_grad

    def set_learning_rate(self, lr: float) -> None:
        """Let the next optimizer steps have the learning rate `lr`, times that of the group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)


def describe_kernels(policy: Policy, layout: TrainerConfig) -> list[Kernel]:
    """Say which kernels compute the policy, and which optimizer it has, if it is trained."""
    kernels = kernels_of(policy.hf, layout)
    kind = policy.optimizer_class()
    if kind is None:
        return kernels
    name = f"{kind.__module__}.{kind.__qualname__}"
    kernels.append(Kernel("optimizer", name, "of those installed"))
    if policy.has_optimizer_on_host():
        kernels.append(Kernel("optimizer state", "host", "trainer.offload_optimizer is true"))
    elif layout.offload_optimizer:
        kernels.append(Kernel("optimizer state", "beside the weights", "no GPU"))
    return kernels


def base_tensors(policy: Policy) -> list[torch.Tensor]:
    """List the parameters and buffers of this rank's language model, in a fixed order: without
    those of adapters and of a value head."""
    left_out = {id(tensor) for tensor in adapter_tensors(policy)}
    for model in policy.models:
        if model.has_value_head:
            left_out.add(id(model.value_head.weight))
    tensors = []
    for model in policy.models:
        for tensor in (*model.parameters(), *model.buffers()):
            if id(tensor) not in left_out:
                tensors.append(tensor.data)
    return tensors


def adapter_tensors(policy: Policy) -> list[torch.nn.Parameter]:
    """List the parameters of this rank's adapters, in a fixed order."""
    parameters: list[torch.nn.Parameter] = []
    for adapter in policy.adapters:
        parameters += adapter.parameters()
    return parameters


def tensor_map(hf: dict[str, Any], config: TransformerConfig) -> TensorMap:
    """Say what the parameters of the model are in Hugging Face's checkpoints.

    Raises ConfigError for a family that is not known or that Megatron-Core cannot compute."""
    return TensorMap(
        rules_for(hf["model_type"]),
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        hf["vocab_size"],
        hf.get("tie_word_embeddings", False),
    )


def policy_of_run(config: RunConfig, hf: dict[str, Any], *, is_cold: bool) -> Policy:
    """Make what a run trains, with random weights. Raises ConfigError as `build_policy`.

    hf: its model's config.json; is_cold: for a cold start, of which adapters and a head of values
    come when it is over."""
    lora = config.lora
    has_value_head = config.policy_has_value_head
    if is_cold:
        lora = None
        has_value_head = False
    temperature = 1.0
    if config.kind != "sft" and not config.trains_preferences:
        temperature = config.rollout.temperature
    return build_policy(
        hf,
        config.trainer,
        config.optimizer,
        router_policy=config.routing.router_policy,
        temperature=temperature,
        lora=lora,
        seed=config.seed,
        num_scalars=config.num_scalars,
        has_value_head=has_value_head,
        trains=config.trains,
    )


def build_policy(
    hf: dict[str, Any],
    layout: TrainerConfig,
    optimizer: OptimizerConfig,
    *,
    router_policy: str = "freeze_bias",
    temperature: float = 1.0,
    lora: LoraConfig | None = None,
    seed: int = 0,
    num_scalars: int = 0,
    has_value_head: bool = False,
    trains: bool = True,
) -> Policy:
    """Make a model with random weights, wrapped for data parallelism, and its optimizer.

    router_policy, temperature: of `RoutingConfig` and `RolloutConfig`; lora: train adapters, which
    begin as `seed` says, and nothing else; num_scalars: answer with so many scalars of a reward
    model's head; has_value_head: can say values beside log-probs, by a head that is trained too;
    trains: False freezes all weights, which then have neither gradients nor optimizer state.

    Raises ConfigError for a family, a field or a value that is not supported."""
    config = transformer_config(hf, layout)
    if router_policy != "none" or lora is not None:
        config.moe_router_bias_update_rate = 0.0
    ddp_config = _ddp_config(layout)
    chunks = []
    for index, model in enumerate(
        build_models(config, hf, layout, has_reward_head=num_scalars > 0)
    ):
        model.temperature = temperature
        if router_policy == "freeze_weights":
            _freeze_routers(model)
        if num_scalars:
            add_reward_head(model, num_scalars, seed)
        if lora is not None:
            add_adapters(model, hf, config, lora, seed)
        if has_value_head:
            add_value_head(model, seed)
        if not trains:
            model.requires_grad_(False)
        chunks.append(_wrapped(model, config, ddp_config, disable_bucketing=index > 0))
    megatron_optimizer = get_megatron_optimizer(
        _optimizer_config(optimizer, layout, config), chunks
    )
    config.grad_scale_func = megatron_optimizer.scale_loss
    config.finalize_model_grads_func = _finalize_gradients
    if ddp_config.overlap_grad_reduce:
        syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = syncs
        if len(syncs) == 1:  # Megatron takes a list of several only
            config.no_sync_func = syncs[0]
    replay = RouteReplay(unwrap_model(chunks), config)
    policy = Policy(hf, config, chunks, megatron_optimizer, replay, lora, optimizer)
    policy.apply_settings()
    return policy


def _wrapped(
    model: PolicyModel,
    config: TransformerConfig,
    ddp_config: ddp.DistributedDataParallelConfig,
    *,
    disable_bucketing: bool,
) -> ddp.DistributedDataParallel:
    """Wrap a chunk for its dtype and for data parallelism; all ranks begin with equal weights."""
    module: torch.nn.Module = model
    if config.bf16:
        module = Float16Module(config, model)
    chunk = ddp.DistributedDataParallel(
        config, ddp_config, module, disable_bucketing=disable_bucketing
    )
    chunk.broadcast_params()
    if ddp_config.overlap_param_gather:
        model.await_weight = _GatheredWeight(chunk)
    return chunk


def _finalize_gradients(
    chunks: list[ddp.DistributedDataParallel], *arguments: Any, **settings: Any
) -> None:
    """Let ranks that have the same weights have the same gradients: as Megatron does, and those of
    a vision tower, which it does not know. Collective."""
    ddp.finalize_model_grads(chunks, *arguments, **settings)
    models: list[PolicyModel] = unwrap_model(chunks)
    sum_tower_gradients(model.visual for model in models if model.image_features is not None)


def _ddp_config(layout: TrainerConfig) -> ddp.DistributedDataParallelConfig:
    """Say how gradients are reduced and weights gathered; by default beside computing on a GPU."""
    overlaps = layout.overlap_communication
    if overlaps is None:
        overlaps = HAS_CUDA
    return ddp.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=layout.distributed_optimizer,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=overlaps and layout.distributed_optimizer,
    )


def _optimizer_config(
    optimizer: OptimizerConfig, layout: TrainerConfig, config: TransformerConfig
) -> MegatronOptimizerConfig:
    """Translate the recipe's optimizer to Megatron's settings."""
    offloading: dict[str, Any] = {}
    if layout.offload_optimizer and HAS_CUDA:
        offloading = host_optimizer.SETTINGS
    return MegatronOptimizerConfig(
        optimizer="adam",
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_eps=optimizer.eps,
        clip_grad=optimizer.clip_grad,
        use_distributed_optimizer=layout.distributed_optimizer,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
        **offloading,
    )


@dataclass(frozen=True)
class _GatheredWeight:
    """Waits for one weight where the layer that owns it is not called, so that its hook is not."""

    chunk: ddp.DistributedDataParallel

    def __call__(self, weight: torch.Tensor) -> None:
        group = self.chunk.param_to_bucket_group.get(weight)
        if group is not None:  # a frozen one is in none
            group.finish_param_sync()


def _freeze_routers(model: torch.nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, TopKRouter):
            module.requires_grad_(False)


def add_adapters(
    model: PolicyModel,
    hf: dict[str, Any],
    config: TransformerConfig,
    lora: LoraConfig,
    seed: int,
) -> None:
    """Freeze a model chunk's weights and put adapters beside them, which begin as `seed` says."""
    named = list(_named_shards(model, config.num_moe_experts or 0))
    model.adapters = attach(model, named, tensor_map(hf, config), lora, seed)


def add_reward_head(model: PolicyModel, num_scalars: int, seed: int) -> None:
    """Put a head of scalars in the place of the output layer, on the last pipeline stage."""
    if not model.post_process:
        return
    del model.output_layer
    model.has_reward_head = True
    model.score = _head(model, num_scalars, seed)


def add_value_head(model: PolicyModel, seed: int) -> None:
    """Put a head of values beside the output layer, on the last pipeline stage."""
    if not model.post_process:
        return
    model.has_value_head = True
    model.value_head = _head(model, 1, seed)


def _head(model: PolicyModel, num_scalars: int, seed: int) -> RewardHead:
    """Make a head of a model chunk, where its weights are."""
    config = model.config
    head = RewardHead(config.hidden_size, num_scalars, config.params_dtype, seed)
    return head.to(next(model.parameters()).device)


def build_models(
    config: TransformerConfig,
    hf: dict[str, Any],
    layout: TrainerConfig,
    *,
    has_reward_head: bool = False,
) -> list[PolicyModel]:
    """Make this rank's model chunks with random weights, neither wrapped nor with an optimizer."""
    models = []
    rope = model_fields(hf)["rope"]
    parts = config.tensor_model_parallel_size
    torch_attention = attention_is_torch(kernels_of(hf, layout))
    stages: list[int | None] = [None]
    if layout.virtual_pipeline_parallel_size:
        stages = list(range(layout.virtual_pipeline_parallel_size))
    for stage in stages:
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = PolicyModel(
            config,
            block_spec(config, stage, torch_attention=torch_attention),
            vp_stage=stage,
            pre_process=first,
            post_process=last,
            vocab_size=-(-hf["vocab_size"] // parts) * parts,  # split evenly
            max_sequence_length=hf.get("max_position_embeddings", 0),
            position_embedding_type="rope",
            rotary_base=rope["theta"],
            rotary_percent=rope["percent"],
            share_embeddings_and_output_weights=not has_reward_head
            and hf.get("tie_word_embeddings", False),
        )
        if not config.multi_latent_attention:
            model.rotary_pos_emb.inv_freq = rotary(rope, config.kv_channels)[0]
        model.mrope_axes = axes_of(rope)
        if first and "vision_config" in hf:
            model.visual = build_tower(
                hf,
                config.params_dtype,
                trains=layout.vision_tower == "trained",
                recomputes=layout.recompute == "full",
            )
            model.image_features = ImageFeatures(
                model.visual,
                ImageSettings.of_model(hf),
                splits_sequences=config.sequence_parallel,
            )
            num_levels = num_deep_levels(hf)
            first_layers = model.decoder.layers[:num_levels]
            if len(first_layers) < num_levels:
                raise ConfigError(
                    f"the first pipeline stage has {len(first_layers)} layers, and the vision "
                    f"tower has features for the first {num_levels}",
                    where="[trainer]",
                    remedy="fewer pipeline stages, or a larger trainer.first_stage_layers",
                )
            add_after_layers(first_layers)
        model.real_vocab_size = hf["vocab_size"]
        model.logprob_chunk_tokens = layout.logprob_chunk_tokens
        model.keep_logits = layout.keep_logits
        mark_expert_parameters(model)
        if HAS_CUDA:
            model.to(torch.cuda.current_device())
        models.append(model)
    return models


def local_shards(chunks: Sequence[torch.nn.Module], num_experts: int) -> Iterator[Shard]:
    """Yield every weight and selection bias of this rank's chunks, under its global name.

    Names of chunks number their own layers and experts; `num_experts` are those of the model. What
    adapters add to a weight is its addend; they are none themselves, nor is a value head."""
    for model in unwrap_model(list(chunks)):
        by_weight = {}
        if model.adapters is not None:
            by_weight = model.adapters.by_weight
        for _, shard in _named_shards(model, num_experts):
            adapted = by_weight.get(shard.name)
            if adapted is not None:
                shard = replace(shard, addend=adapted.addend, prepare=adapted.prepare)
            yield shard


def _named_shards(model: PolicyModel, num_experts: int) -> Iterator[tuple[str, Shard]]:
    """Yield every weight's name within the model, and which part of the whole model it is."""
    experts = parallel_state.get_expert_model_parallel_group()
    first_expert = num_experts // experts.size() * experts.rank()
    layers = [layer.layer_number - 1 for layer in model.decoder.layers]
    for name, parameter in _weights(model):
        if not is_beside_weights(name):
            yield name, _shard(_global_name(name, layers, first_expert), parameter)


def _global_name(name: str, layers: Sequence[int], first_expert: int) -> str:
    """Number layer and expert as the whole model does; layers: of this chunk, from 0."""
    layer = _LAYER.match(name)
    if layer is not None:
        number = layers[int(layer[1])]
        name = f"decoder.layers.{number}.{name[layer.end() :]}"
    expert = _LOCAL_EXPERT.search(name)
    if expert is not None:
        number = int(expert[2]) + first_expert
        name = f"{name[: expert.start(2)]}{number}{name[expert.end(2) :]}"
    return name


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            # Float16Module has rounded it; the router makes it fp32 again only when it is used
            buffer.data = buffer.data.float()
            yield name, buffer


def _shard(name: str, parameter: torch.Tensor) -> Shard:
    """Say which part of the whole weight this rank holds."""
    if ".experts." in name:
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Shard(name, parameter)
    if "linear_fc2" in name:  # of which Transformer Engine's grouped layers say 0
        dim = 1
    else:
        described: Any = parameter  # Megatron's attributes
        dim = described.partition_dim
    return Shard(name, parameter, dim, group.size(), group.rank(), group)
