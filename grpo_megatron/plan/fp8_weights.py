"""Which weights engines keep in FP8 with `rollout.fp8 = "blockwise"`, and what they may be.

Those of the matrix products of layers, as in DeepSeek-V3's checkpoints; norms, routers, embeddings,
the output layer and biases keep the type of the engine. vLLM reads them as it reads such a
checkpoint, so nothing of it is the engine's to round."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_megatron.config.rules.rule_set import RuleSet, Violation
from grpo_megatron.config.run import RolloutConfig, RunConfig
from grpo_megatron.plan.family import family_of
from grpo_megatron.plan.hf_config import unified
from grpo_megatron.plan.model_facts import ModelFacts
from grpo_megatron.plan.weights import ELEMENT_BYTES, Weight

BLOCK = 128
"""Rows, and columns, that have one scale."""
SCALE_BYTES = 4
"""Of a block's scale, a float32."""
_QUANTISED = re.compile(r"decoder\.layers\.\d+\..*\blinear_\w+\.weight\d*")
"""Megatron's global names of the weights of matrix products, experts in one module numbered."""

FP8_RULES = RuleSet()
"""Their checks take the run and the facts of its model; for runs with `rollout.fp8` only."""


def is_quantised(parameter: str) -> bool:
    """Whether engines keep a parameter, by its global Megatron name, in FP8."""
    return _QUANTISED.fullmatch(parameter) is not None


def published_weights(rollout: RolloutConfig, hf: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of config.json as an engine must read them to take what a publish sends.

    hf: of the checkpoint. What that says of its own files does not matter: engines never read
    them."""
    if rollout.fp8 == "blockwise":
        return {"quantization_config": _quantisation_config(hf)}
    if hf.get("quantization_config") is not None:
        return {"quantization_config": None}
    return {}


def _quantisation_config(hf: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": list(_unquantised_modules(hf)),
    }


def _unquantised_modules(hf: Mapping[str, Any]) -> Iterator[str]:
    """Name the modules of layers that vLLM would quantise and a publish does not: routers."""
    family = family_of(hf["model_type"])
    for parameter, tensor in family.layer.items():
        if not parameter.endswith("router.weight"):
            continue
        assert isinstance(tensor, str)
        template = family.layer_prefix + tensor.removesuffix(".weight")
        for layer in range(unified(hf)["num_hidden_layers"]):
            yield template.format(layer=layer)


def engine_bytes(weights: Iterable[Weight], rollout: RolloutConfig) -> int:
    """Return bytes of `weights` as engines keep them, and as they are published."""
    element = ELEMENT_BYTES[rollout.dtype]
    num_bytes = 0
    for weight in weights:
        if rollout.fp8 == "blockwise" and weight.is_matrix:
            num_bytes += weight.numel + weight.numel * SCALE_BYTES // BLOCK**2
        else:
            num_bytes += weight.numel * element
    return num_bytes


# --- what the sizes of a model must be


@dataclass(frozen=True)
class _Width:
    """Rows or columns of weights that ranks or workers share."""

    what: str
    size: int
    parts: int
    field: str


@FP8_RULES.rule("fp8_blocks")
def parts_are_whole_blocks(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse a part of a weight that ends within a block: it would have no scale of its own."""
    found = []
    for width in (*_widths_of_engine(run.rollout, model), *_widths_of_trainer(run, model)):
        if width.size % width.parts or width.size // width.parts % BLOCK == 0:
            continue  # the first is told by the rules of layouts
        divided = ""
        if width.parts > 1:
            divided = f" / {width.parts} = {width.size // width.parts}"
        found.append(
            Violation(
                "rollout.fp8",
                f"blocks of FP8 weights are {BLOCK} x {BLOCK}, and the {width.what} is "
                f"{width.size}{divided}, which is no multiple of {BLOCK}",
                nearest=("none",),
                related=(width.field,),
            )
        )
    return found


def _widths_of_engine(rollout: RolloutConfig, model: ModelFacts) -> Iterator[_Width]:
    """Widths of vLLM's layers, which joins projections of one input in one weight."""
    field = "rollout.tensor_parallel_size"
    tp = rollout.tensor_parallel_size
    yield _Width("hidden size", model.hidden_size, 1, "model")
    if model.is_mla:
        yield from _latent_widths(model, tp, field)
        # vLLM makes a copy of this projection that it does not multiply by in FP8
        yield _Width("rank of latent attention's vector", model.latent_rank, 1, "model")
        of_heads = model.num_heads * model.latent_key_value_dim
        yield _Width("width of what latent attention makes of its vector", of_heads, tp, field)
        if model.query_rank:  # vLLM puts this projection above another one
            yield _Width("rank of latent attention's queries", model.query_rank, 1, "model")
    else:
        yield _Width("width of queries on a worker", model.num_heads * model.head_dim, tp, field)
        kept = max(model.num_kv_heads // tp, 1) * model.head_dim
        yield _Width("width of keys on a worker", kept, 1, field)
    if model.has_dense_layers:
        yield _Width("MLP width on a worker", model.intermediate_size, tp, field)
    if model.is_moe:
        width = model.moe_intermediate_size
        yield _Width("expert width on a worker", width, rollout.expert_parts, field)
    if model.shared_expert_intermediate_size:
        width = model.shared_expert_intermediate_size
        yield _Width("width of shared experts on a worker", width, tp, field)


def _widths_of_trainer(run: RunConfig, model: ModelFacts) -> Iterator[_Width]:
    """Widths that tensor-parallel ranks share."""
    trainer = run.trainer
    tp = trainer.tensor_parallel_size
    field = "trainer.tensor_parallel_size"
    if model.is_mla:
        yield from _latent_widths(model, tp, field)
    else:
        yield _Width("width of keys on a rank", model.num_kv_heads * model.head_dim, tp, field)
    if model.has_dense_layers:
        yield _Width("MLP width on a rank", model.intermediate_size, tp, field)
    if model.is_moe:
        etp = "trainer.expert_tensor_parallel_size"
        yield _Width("expert width on a rank", model.moe_intermediate_size, trainer.etp, etp)
    if model.shared_expert_intermediate_size:
        width = model.shared_expert_intermediate_size
        yield _Width("width of shared experts on a rank", width, tp, field)


def _latent_widths(model: ModelFacts, tp: int, field: str) -> Iterator[_Width]:
    """Widths of latent attention that tensor parallelism splits; its down projections are whole
    everywhere."""
    if tp == 1:
        return
    widths = {
        "width of latent attention's queries": model.latent_query_dim,
        "width of what latent attention makes of its vector": model.latent_key_value_dim,
        "width of latent attention's values": model.latent_value_dim,
    }
    for what, of_head in widths.items():
        yield _Width(what, model.num_heads * of_head, tp, field)


@FP8_RULES.rule("fp8_dtype")
def gpus_compute_beside_fp8_in_bfloat16(run: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse float32 beside FP8 on GPUs, where vLLM has no kernel for it."""
    if run.rollout.dtype == "bfloat16" or run.placement.gpus_per_node == 0:
        return None
    return Violation(
        "rollout.dtype",
        "vLLM multiplies by weights in FP8 on GPUs with activations in bfloat16 only",
        nearest=("bfloat16",),
        related=("rollout.fp8",),
    )


@FP8_RULES.rule("fp8_model")
def towers_are_not_quantised(run: RunConfig, model: ModelFacts) -> Violation | None:
    """Refuse a model that sees: vLLM would quantise its tower, of which no scales are published."""
    if not model.sees_images:
        return None
    return Violation(
        "rollout.fp8",
        "a vision tower is published as it is, and vLLM would expect it in FP8",
        nearest=("none",),
        related=("model",),
    )
