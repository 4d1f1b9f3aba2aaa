"""Which kernels compute here: chosen by what is installed and what is computed, each with its why.

None is our own: they are Transformer Engine's, Megatron-Core's or DeepEP's. `policy kernels`
in a rank's log and on the report page is what `choose` returned. docs/kernels.md explains each."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_megatron.config.trainer import TrainerConfig
from grpo_megatron.errors import SetupError
from grpo_megatron.trainer.megatron import platform

FUSED = "fused"
SEPARATE = "separate"
ATTENTION = "attention"
TORCH_SDPA = "torch SDPA"


@dataclass(frozen=True)
class Installed:
    """What there is to choose from."""

    cuda: bool
    transformer_engine: bool
    deep_ep: bool
    hybrid_ep: bool


def installed() -> Installed:
    """Look at this machine. Without a GPU there is nothing that could be used."""
    return Installed(
        cuda=platform.HAS_CUDA,
        transformer_engine=platform.HAS_TRANSFORMER_ENGINE,
        deep_ep=platform.HAS_CUDA and _offers("deep_ep", "Buffer"),
        hybrid_ep=platform.HAS_CUDA and _offers("deep_ep", "HybridEPBuffer"),
    )


@dataclass(frozen=True)
class Kernel:
    """How one part of the model is computed."""

    part: str
    chosen: str
    why: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of Megatron's TransformerConfig."""

    def as_row(self) -> dict[str, str]:
        """Return the kernel as the report page shows it."""
        return {"part": self.part, "chosen": self.chosen, "why": self.why}

    def __str__(self) -> str:
        return f"{self.part} {self.chosen} ({self.why})"


@dataclass(frozen=True)
class Computation:
    """What decides, beside what is installed, whether a kernel computes the right thing."""

    layout: TrainerConfig
    num_experts: int
    latent_attention: bool
    rotary_factor: float
    """Of cosines and sines (YaRN); 1: none."""


def choose(there: Installed, wanted: Computation) -> list[Kernel]:
    """Choose the kernels of a model.

    Raises SetupError where the layout names one that is not installed."""
    kernels = [
        _layers(there),
        _attention(there, wanted),
        _swiglu(there),
        _residual(there),
        _rotation(there, wanted),
        _gradient_accumulation(there),
        _matrix_precision(there, wanted.layout),
    ]
    if wanted.num_experts:
        kernels += [
            _grouped_gemm(there),
            _permutation(there),
            _router(),
            _dispatcher(there, wanted.layout),
        ]
    return kernels


def attention_is_torch(kernels: list[Kernel]) -> bool:
    """Whether torch computes attention, whatever computes the rest of a layer."""
    return any(kernel.part == ATTENTION and kernel.chosen == TORCH_SDPA for kernel in kernels)


def settings_of(kernels: list[Kernel]) -> dict[str, Any]:
    """Join what the kernels ask of Megatron's TransformerConfig."""
    settings: dict[str, Any] = {}
    for kernel in kernels:
        settings |= kernel.settings
    return settings


# --- every layer


def _layers(there: Installed) -> Kernel:
    if there.transformer_engine:
        return Kernel("layers", "Transformer Engine", "it is installed")
    return Kernel("layers", "torch", _without_transformer_engine(there))


def _attention(there: Installed, wanted: Computation) -> Kernel:
    """A gradient of latent attention was wrong on an H200 (cuDNN 9.19, bfloat16, heads of 192 and
    128), see docs/kernels.md. What no kernel of Transformer Engine takes it would compute with a
    matrix of all pairs of tokens."""
    layout = wanted.layout
    impossible = ""
    if not there.transformer_engine:
        impossible = _without_transformer_engine(there)
    elif layout.precision == "float32":
        impossible = "Transformer Engine's kernels take 16 bits only"
    if layout.attention == "transformer_engine" and impossible:
        raise SetupError(
            f"Transformer Engine cannot compute attention: {impossible}",
            where="trainer.attention",
            remedy="set it to 'auto' or 'torch'",
        )
    if layout.attention == "torch":
        return Kernel(ATTENTION, TORCH_SDPA, "trainer.attention")
    if impossible:
        return Kernel(ATTENTION, TORCH_SDPA, impossible)
    if layout.attention == "auto" and wanted.latent_attention:
        why = "gradients of latent attention were seen wrong with Transformer Engine's"
        return Kernel(ATTENTION, TORCH_SDPA, why)
    return Kernel(
        ATTENTION,
        "Transformer Engine",
        "variable lengths: flash-attn or cuDNN, its choice; torch SDPA where neither can",
    )


def _swiglu(there: Installed) -> Kernel:
    return _fused_on_gpus("swiglu", there, {"bias_activation_fusion": there.cuda})


def _residual(there: Installed) -> Kernel:
    return _fused_on_gpus("residual", there, {"bias_dropout_fusion": there.cuda})


def _fused_on_gpus(part: str, there: Installed, settings: dict[str, Any]) -> Kernel:
    """Choose a function of Megatron's that torch compiles."""
    if there.cuda:
        return Kernel(part, FUSED, "compiled by torch", settings)
    return Kernel(part, SEPARATE, "no GPU", settings)


def _rotation(there: Installed, wanted: Computation) -> Kernel:
    """Transformer Engine's rotation of packed sequences knows no factor, and Megatron's call of it
    drops one without a word (rope_utils.py:319), and takes no first positions."""
    if not there.transformer_engine:
        why = _without_transformer_engine(there)
    elif wanted.latent_attention:
        why = "latent attention rotates by itself"
    elif wanted.layout.share_prefixes:
        why = "the fused one lets every branch of a shared prefix begin at position 0"
    elif wanted.layout.context_parallel_size > 1:
        why = "the fused one knows another split of sequences over context-parallel ranks"
    elif wanted.rotary_factor != 1.0:
        why = f"the fused one has no factor of cosines and sines, here {wanted.rotary_factor:g}"
    else:
        return Kernel(
            "rope", FUSED, "Transformer Engine, variable lengths", {"apply_rope_fusion": True}
        )
    return Kernel("rope", SEPARATE, why, {"apply_rope_fusion": False})


def _gradient_accumulation(there: Installed) -> Kernel:
    """Weight gradients go into the fp32 buffer without a matrix of their own in between."""
    settings = {"gradient_accumulation_fusion": there.transformer_engine}
    if there.transformer_engine:
        return Kernel("gradient accumulation", FUSED, "in the weight GEMM", settings)
    return Kernel("gradient accumulation", SEPARATE, _without_transformer_engine(there), settings)


def _matrix_precision(there: Installed, layout: TrainerConfig) -> Kernel:
    """FP8 in blocks of 128, as DeepSeek-V3 was trained; weights and gradients stay as they are."""
    if layout.fp8 == "none":
        return Kernel("matrices", layout.precision, "trainer.fp8 is 'none'")
    if not there.transformer_engine:
        raise SetupError(
            f"FP8 training needs Transformer Engine: {_without_transformer_engine(there)}",
            where="trainer.fp8",
            remedy="set it to 'none', or run in the environment of make setup-gpu, on GPUs",
        )
    settings = {"fp8": "e4m3", "fp8_recipe": layout.fp8}
    return Kernel("matrices", f"fp8 {layout.fp8}", "trainer.fp8", settings)


# --- experts


def _grouped_gemm(there: Installed) -> Kernel:
    if there.transformer_engine:
        return Kernel("experts", "grouped GEMM", "Transformer Engine", {"moe_grouped_gemm": True})
    return Kernel(
        "experts", "one by one", _without_transformer_engine(there), {"moe_grouped_gemm": False}
    )


def _permutation(there: Installed) -> Kernel:
    settings = {"moe_permute_fusion": there.transformer_engine}
    if there.transformer_engine:
        return Kernel("permutation", FUSED, "Transformer Engine", settings)
    return Kernel("permutation", SEPARATE, _without_transformer_engine(there), settings)


def _router() -> Kernel:
    """A fused router chooses inside of its kernel: routes can be neither replayed nor compared."""
    return Kernel(
        "router",
        SEPARATE,
        "routes are replayed and compared in it",
        {"moe_router_fusion": False},
    )


def _dispatcher(there: Installed, layout: TrainerConfig) -> Kernel:
    chosen: str = layout.moe_dispatcher
    why = "trainer.moe_dispatcher"
    problem = _why_not(chosen, there, layout)
    if problem:
        raise SetupError(
            f"the dispatcher {chosen!r} cannot be used: {problem}",
            where="trainer.moe_dispatcher",
            remedy="set it to 'auto' or 'alltoall'",
        )
    if chosen == "auto":
        chosen, why = _best_dispatcher(there, layout)
    settings: dict[str, Any] = {"moe_token_dispatcher_type": "alltoall"}
    if chosen != "alltoall":
        settings = {
            "moe_token_dispatcher_type": "flex",
            "moe_flex_dispatcher_backend": chosen,
        }
    if chosen == "hybridep":  # ranks have micro-batches of different length
        settings["moe_hybridep_pad_uneven_dispatch_inputs"] = True
    return Kernel("dispatcher", chosen, why, settings)


def _best_dispatcher(there: Installed, layout: TrainerConfig) -> tuple[str, str]:
    for name in ("hybridep", "deepep"):
        problem = _why_not(name, there, layout)
        if not problem:
            return name, "it is installed"
    return "alltoall", problem


def _why_not(name: str, there: Installed, layout: TrainerConfig) -> str:
    """Say why the dispatcher cannot be used; empty where it can."""
    if name in ("auto", "alltoall"):
        return ""
    if name == "deepep" and not there.deep_ep:
        return "the package deep_ep is not installed, or there is no GPU"
    if name == "hybridep" and not there.hybrid_ep:
        return "the package deep_ep with HybridEPBuffer is not installed, or there is no GPU"
    if layout.expert_parallel_size * layout.etp == 1:
        return "experts are not split over ranks"
    if layout.precision != "bfloat16":
        return f"it sends bfloat16, and the precision is {layout.precision}"
    return ""


# --- what is there


def _without_transformer_engine(there: Installed) -> str:
    if there.cuda:
        return "Transformer Engine is not installed"
    return "no GPU"


def _offers(module: str, name: str) -> bool:
    """Say whether `module` can be imported and has `name`."""
    try:
        return hasattr(importlib.import_module(module), name)
    except ImportError:
        return False
