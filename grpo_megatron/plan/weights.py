"""Every weight of a rank, in Megatron's order, as closed forms of the model's sizes.

The counts are those of the plain layers (`trainer/layer_specs.py`); Transformer Engine's fused
modules have the same ones. Multi-token-prediction layers are not built.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import megatron_settings, model_fields
from grpo_megatron.plan.layout import layout_sizes


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter of a rank."""

    numel: int
    is_expert: bool = False
    is_shared: bool = False
    """A tied embedding over pipeline stages: it gets a gradient bucket of its own."""
    is_router: bool = False


@dataclass(frozen=True)
class Sizes:
    """What the closed forms are made of: a model (`[megatron]` names) and a trainer layout."""

    model: Mapping[str, Any]
    vocab_size: int
    is_tied: bool
    trainer: TrainerConfig
    moe_layers: frozenset[int]
    yarn_positions: int = 0
    """Positions whose rotary angles latent attention tabulates."""

    @cached_property
    def layout(self):
        return layout_sizes(self.trainer)

    @property
    def hidden(self) -> int:
        return self.model["hidden_size"]

    @property
    def tp(self) -> int:
        return self.trainer.tensor_parallel_size

    @property
    def etp(self) -> int:
        return self.layout.expert_tensor_parallel_size

    @property
    def pp(self) -> int:
        return self.trainer.pipeline_parallel_size

    @property
    def num_chunks(self) -> int:
        """Model chunks a pipeline rank."""
        return self.trainer.virtual_pipeline_parallel_size or 1

    @property
    def num_local_experts(self) -> int:
        return (self.model.get("num_moe_experts") or 0) // self.trainer.expert_parallel_size

    @property
    def vocab_rows(self) -> int:
        """Rows of the vocabulary on a tensor-parallel rank; the last one's padding included."""
        return -(-self.vocab_size // self.tp)

    @property
    def element_bytes(self) -> int:
        return {"float32": 4, "bfloat16": 2}[self.trainer.precision]

    def layers_of_stages(self) -> list[int]:
        """Layers of every pipeline stage."""
        first, last = self.trainer.first_stage_layers, self.trainer.last_stage_layers
        num_inner = self.pp - sum(given is not None for given in (first, last))
        left = self.model["num_layers"] - (first or 0) - (last or 0)
        layers = [left // max(num_inner, 1)] * self.pp
        if first is not None:
            layers[0] = first
        if last is not None:
            layers[-1] = last
        return layers

    def layers_of_chunk(self, stage: int, chunk: int) -> range:
        """Indices of a model chunk's layers."""
        sizes = [layers // self.num_chunks for layers in self.layers_of_stages()]
        start = chunk * sum(sizes) + sum(sizes[:stage])
        return range(start, start + sizes[stage])


def sizes_of(hf: Mapping[str, Any], vocab_size: int, trainer: TrainerConfig) -> Sizes:
    """From a config.json (or a preset's `[hf]` table) and a layout that obeys the rules."""
    fields = model_fields(hf)
    model = megatron_settings(family_of(hf["model_type"]), fields)
    return Sizes(model, vocab_size, bool(fields["tie_word_embeddings"]), trainer,
                 frozenset(i for i, is_moe in enumerate(fields["moe_layers"]) if is_moe),
                 fields["rope"].get("original_max_position_embeddings", 0))


def weights_of_chunk(s: Sizes, stage: int, chunk: int) -> list[Weight]:
    """The parameters of one model chunk of a rank of pipeline stage `stage`, in order."""
    is_first, is_last = stage == chunk == 0, (stage, chunk) == (s.pp - 1, s.num_chunks - 1)
    table = Weight(s.vocab_rows * s.hidden, is_shared=s.is_tied and s.pp > 1)
    weights = [table] if is_first else []
    for layer in s.layers_of_chunk(stage, chunk):
        weights += _layer(s, layer in s.moe_layers)
    if is_last:
        weights.append(Weight(s.hidden))
        if not (is_first and s.is_tied):
            weights.append(table)
    return weights


def _layer(s: Sizes, is_moe: bool) -> list[Weight]:
    norm = Weight(s.hidden)
    mlp = _experts(s) if is_moe else _mlp(s, s.model["ffn_hidden_size"] // s.tp)
    attention = _latent(s) if s.model.get("multi_latent_attention") else _grouped_query(s)
    return [norm, *map(Weight, attention), norm, *mlp]


def _grouped_query(s: Sizes) -> list[int]:
    m, head = s.model, s.model["kv_channels"]
    query, key = (m[name] * head // s.tp for name in ("num_attention_heads", "num_query_groups"))
    sizes = [query * s.hidden, (query + 2 * key) * s.hidden]
    sizes += [query + 2 * key] if m.get("add_qkv_bias") else []
    return sizes + ([head, head] if m.get("qk_layernorm") else [])


def _latent(s: Sizes) -> list[int]:
    m, heads = s.model, s.model["num_attention_heads"] // s.tp
    query = heads * (m["qk_head_dim"] + m["qk_pos_emb_head_dim"])
    rank, latent = m["q_lora_rank"], m["kv_lora_rank"]
    sizes = [heads * m["v_head_dim"] * s.hidden]
    sizes += [rank * s.hidden, query * rank] if rank else [query * s.hidden]
    sizes += [(latent + m["qk_pos_emb_head_dim"]) * s.hidden,
              heads * (m["qk_head_dim"] + m["v_head_dim"]) * latent]
    return [*sizes, *([rank] if rank else []), latent]


def _mlp(s: Sizes, width: int, **kind: bool) -> list[Weight]:
    return [Weight(2 * width * s.hidden, **kind), Weight(width * s.hidden, **kind)]


def _experts(s: Sizes) -> list[Weight]:
    m = s.model
    width, shared = m["moe_ffn_hidden_size"] // s.etp, m.get("moe_shared_expert_intermediate_size")
    weights = [Weight(m["num_moe_experts"] * s.hidden, is_router=True)]
    weights += _mlp(s, width, is_expert=True) * s.num_local_experts
    return weights + (_mlp(s, shared // s.tp) if shared else [])
