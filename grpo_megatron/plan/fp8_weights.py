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
from grpo_megatron.plan.weights import Weight

BLOCK = 128
"""Rows, and columns, that have one scale."""
NUMBER_BYTES = 1 + 4 / BLOCK**2
"""Of a number in FP8, with its share of a float32 scale."""
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


def bytes_of(weights: Iterable[Weight], fp8: str, element: int) -> int:
    """Return bytes of `weights` where `rollout.fp8` is `fp8`, and other numbers have `element`
    bytes."""
    num_bytes = 0.0
    for weight in weights:
        if fp8 == "blockwise" and weight.is_matrix:
            num_bytes += weight.numel * NUMBER_BYTES
        else:
            num_bytes += weight.numel * element
    return int(num_bytes)


# --- what the sizes of a model must be


@dataclass(frozen=True)
class _Width:
    """Rows or columns of weights that ranks or workers share."""

    what: str
    size: int
    parts: int
    field: str
    """What divides them."""

    @property
    def is_told_elsewhere(self) -> bool:
        """Whether the parts are no whole numbers, which the rules of layouts refuse."""
        return self.size % self.parts != 0

    @property
    def has_whole_blocks(self) -> bool:
        """Whether every part is made of whole blocks."""
        return self.size // self.parts % BLOCK == 0

    @property
    def remedy(self) -> str:
        """Fewer parts that would be whole blocks; empty: the model's own width is none."""
        for parts in range(self.parts - 1, 0, -1):
            if self.parts % parts == 0 and self.size % (parts * BLOCK) == 0:
                return f"divide it by {parts} ({self.field}), or set rollout.fp8=none"
        return ""


@FP8_RULES.rule("fp8_blocks")
def parts_are_whole_blocks(run: RunConfig, model: ModelFacts) -> list[Violation]:
    """Refuse a part of a weight that ends within a block: it would have no scale of its own."""
    found = []
    for width in (*_widths_of_engine(run.rollout, model), *_widths_of_trainer(run, model)):
        if width.is_told_elsewhere or width.has_whole_blocks:
            continue
        divided = ""
        if width.parts > 1:
            divided = f" / {width.parts} = {width.size // width.parts}"
        found.append(
            Violation(
                "rollout.fp8",
                f"blocks of FP8 weights are {BLOCK} x {BLOCK}, and the {width.what} is "
                f"{width.size}{divided}, which is no multiple of {BLOCK}",
                nearest=("none",),
                remedy=width.remedy,
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
        # vLLM makes its own matrices of this projection, block by block
        yield _Width("rank of latent attention's vector", model.latent_rank, 1, "model")
        yield _latent_key_values(model, tp, field)
        if model.query_rank:  # vLLM puts this projection above another one
            yield _Width("rank of latent attention's queries", model.query_rank, 1, "model")
        if tp > 1:
            yield from _latent_queries_and_values(model, tp, field)
    else:
        queries = model.num_heads * model.head_dim
        keys = model.num_kv_heads * model.head_dim
        yield _Width("width of queries on a worker", queries, tp, field)
        # where there are fewer heads than workers, each head is on several
        yield _Width("width of keys on a worker", keys, min(tp, model.num_kv_heads), field)
    if model.has_dense_layers:
        yield _Width("MLP width on a worker", model.intermediate_size, tp, field)
    if model.is_moe:
        width = model.moe_intermediate_size
        yield _Width("expert width on a worker", width, rollout.expert_parts, field)
    if model.shared_expert_intermediate_size:
        width = model.shared_expert_intermediate_size
        yield _Width("width of shared experts on a worker", width, tp, field)


def _widths_of_trainer(run: RunConfig, model: ModelFacts) -> Iterator[_Width]:
    """Widths that tensor-parallel ranks share; what one rank has as a whole may end anywhere."""
    trainer = run.trainer
    tp = trainer.tensor_parallel_size
    field = "trainer.tensor_parallel_size"
    if tp > 1:
        if model.is_mla:
            yield _latent_key_values(model, tp, field)
            yield from _latent_queries_and_values(model, tp, field)
        else:
            keys = model.num_kv_heads * model.head_dim
            yield _Width("width of keys on a rank", keys, tp, field)
        if model.has_dense_layers:
            yield _Width("MLP width on a rank", model.intermediate_size, tp, field)
        if model.shared_expert_intermediate_size:
            width = model.shared_expert_intermediate_size
            yield _Width("width of shared experts on a rank", width, tp, field)
    if model.is_moe and trainer.etp > 1:
        field = "trainer.expert_tensor_parallel_size"
        yield _Width("expert width on a rank", model.moe_intermediate_size, trainer.etp, field)


def _latent_key_values(model: ModelFacts, tp: int, field: str) -> _Width:
    """What latent attention makes of its vector."""
    width = model.num_heads * model.latent_key_value_dim
    return _Width("width of latent attention's keys and values", width, tp, field)


def _latent_queries_and_values(model: ModelFacts, tp: int, field: str) -> Iterator[_Width]:
    """What tensor parallelism splits of latent attention besides."""
    queries = model.num_heads * model.latent_query_dim
    values = model.num_heads * model.latent_value_dim
    yield _Width("width of latent attention's queries", queries, tp, field)
    yield _Width("width of latent attention's values", values, tp, field)


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
