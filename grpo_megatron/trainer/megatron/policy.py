"""The policy on this rank: model chunks, gradient buffers, optimizer, and its weights by name."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig
from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.trainer.megatron.layer_specs import block_spec
from grpo_megatron.trainer.megatron.model_config import transformer_config
from grpo_megatron.trainer.megatron.platform import HAS_CUDA
from grpo_megatron.trainer.megatron.policy_model import PolicyModel
from grpo_megatron.trainer.megatron.rope import rotary
from grpo_megatron.trainer.megatron.upstream_fixes import mark_expert_parameters
from grpo_megatron.trainer.routing.router_replay import RouteReplay
from grpo_megatron.weights.gather import Shard, ShardedModel
from grpo_megatron.weights.parameters import TensorMap, rules_for

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

    @property
    def models(self) -> list[PolicyModel]:
        return unwrap_model(list(self.chunks))

    @cached_property
    def sharded(self) -> ShardedModel:
        """All weights, under global names."""
        return ShardedModel(
            tensor_map(self.hf, self.config),
            list(local_shards(self.chunks, self.config.num_moe_experts or 0)),
        )

    def kernels(self) -> str:
        """Which classes compute here, for the log: fused ones are used where they are installed."""
        wanted = ("core_attention", "linear_qkv", "experts", "input_layernorm")
        found = {
            name: type(child)
            for model in self.models
            for module in model.modules()
            for name, child in module.named_children()
            if name in wanted
        }
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        found["optimizer"] = type(next(part.optimizer for part in parts if part.optimizer))
        return ", ".join(
            f"{name} {kind.__module__}.{kind.__qualname__}" for name, kind in found.items()
        )

    def reset_optimizer(self, optimizer: OptimizerConfig) -> None:
        """Forget moments and steps; take over betas, epsilon and weight decay."""
        for part in getattr(self.optimizer, "chained_optimizers", [self.optimizer]):
            if part.optimizer is None:
                continue
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                group.update(
                    betas=(optimizer.beta1, optimizer.beta2),
                    eps=optimizer.eps,
                    weight_decay=optimizer.weight_decay * group.get("wd_mult", 1.0),
                )
            part.config.clip_grad = optimizer.clip_grad

    def set_learning_rate(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group.get("lr_mult", 1.0)


def state_tensors(policy: Policy) -> list[torch.Tensor]:
    """Parameters and buffers of this rank's model, in a fixed order."""
    return [
        tensor.data for model in policy.models for tensor in (*model.parameters(), *model.buffers())
    ]


def tensor_map(hf: dict[str, Any], config: TransformerConfig) -> TensorMap:
    return TensorMap(
        rules_for(hf["model_type"]),
        config.num_attention_heads,
        config.num_query_groups,
        config.kv_channels,
        hf["vocab_size"],
        hf.get("tie_word_embeddings", False),
    )


def build_policy(
    hf: dict[str, Any],
    layout: TrainerConfig,
    optimizer: OptimizerConfig,
    router_policy: str = "freeze_bias",
    temperature: float = 1.0,
) -> Policy:
    """Model with random weights, wrapped for data parallelism, and its optimizer."""
    config = transformer_config(hf, layout)
    if router_policy != "none":
        config.moe_router_bias_update_rate = 0.0
    distributed = layout.distributed_optimizer
    ddp_config = ddp.DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=HAS_CUDA,
    )  # a gather in the next forward is too late to publish
    chunks = []
    for index, model in enumerate(build_models(config, hf, layout)):
        model.temperature = temperature
        for module in model.modules():
            if router_policy == "freeze_weights" and isinstance(module, TopKRouter):
                module.requires_grad_(False)
        wrapped = Float16Module(config, model) if config.bf16 else model
        chunks.append(
            ddp.DistributedDataParallel(config, ddp_config, wrapped, disable_bucketing=index > 0)
        )
        chunks[-1].broadcast_params()
    megatron_optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=optimizer.lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.beta1,
            adam_beta2=optimizer.beta2,
            adam_eps=optimizer.eps,
            clip_grad=optimizer.clip_grad,
            use_distributed_optimizer=distributed,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
        ),
        chunks,
    )
    config.grad_scale_func = megatron_optimizer.scale_loss
    config.finalize_model_grads_func = ddp.finalize_model_grads
    if ddp_config.overlap_grad_reduce:
        syncs = [c.no_sync for c in chunks]  # Megatron takes a list of several only
        config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
    return Policy(hf, config, chunks, megatron_optimizer, RouteReplay(unwrap_model(chunks), config))


def build_models(
    config: TransformerConfig, hf: dict[str, Any], layout: TrainerConfig
) -> list[PolicyModel]:
    """This rank's model chunks with random weights, neither wrapped nor with an optimizer."""
    models = []
    rope = model_fields(hf)["rope"]
    parts = config.tensor_model_parallel_size
    for chunk in range(layout.virtual_pipeline_parallel_size or 1):
        stage = chunk if layout.virtual_pipeline_parallel_size else None
        first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage)
        model = PolicyModel(
            config,
            block_spec(config, stage),
            vp_stage=stage,
            pre_process=first,
            post_process=last,
            vocab_size=-(-hf["vocab_size"] // parts) * parts,  # split evenly
            max_sequence_length=hf.get("max_position_embeddings", 0),
            position_embedding_type="rope",
            rotary_base=rope["theta"],
            rotary_percent=rope["percent"],
            share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False),
        )
        if not config.multi_latent_attention:
            model.rotary_pos_emb.inv_freq = rotary(rope, config.kv_channels)[0]
        model.real_vocab_size = hf["vocab_size"]
        model.logprob_chunk_tokens = layout.logprob_chunk_tokens
        mark_expert_parameters(model)
        models.append(model.to(torch.cuda.current_device()) if HAS_CUDA else model)
    return models


def local_shards(chunks: Sequence[torch.nn.Module], num_experts: int) -> Iterator[Shard]:
    """Every parameter and selection bias of this rank's chunks; layers and experts made global."""
    experts = parallel_state.get_expert_model_parallel_group()
    first_expert = num_experts // experts.size() * experts.rank()
    for model in unwrap_model(list(chunks)):
        numbers = [layer.layer_number - 1 for layer in model.decoder.layers]
        for name, parameter in _weights(model):
            name = _LAYER.sub(lambda m, n=numbers: f"decoder.layers.{n[int(m[1])]}.", name)
            name = _LOCAL_EXPERT.sub(lambda m: m[1] + str(int(m[2]) + first_expert), name)
            yield _shard(name, parameter)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    for name, buffer in model.named_buffers():
        if name.endswith(".expert_bias"):
            # Float16Module has rounded it; the router makes it fp32 again only when it is used
            buffer.data = buffer.data.float()
            yield name, buffer


def _shard(name: str, parameter: torch.Tensor) -> Shard:
    group = (
        parallel_state.get_expert_tensor_parallel_group()
        if ".experts." in name
        else parallel_state.get_tensor_model_parallel_group()
    )
    if group.size() == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return Shard(name, parameter)
    dim = 1 if "linear_fc2" in name else parameter.partition_dim
    return Shard(name, parameter, dim, group.size(), group.rank(), group)
