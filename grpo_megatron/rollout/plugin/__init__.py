"""vLLM plugin: what released vLLM lacks on a CPU, and a weight-transfer backend over gloo.

vLLM calls `register` (entry point `vllm.general_plugins`) in the API server, the engine core and
every worker. Each run-time fix has its own module, which says where the defect is.
"""

_registered = False


def register() -> None:
    """Install everything once per process.

    Raises:
        SetupError: This vLLM is not a version that the fixes were tested with.
    """
    global _registered
    if _registered:
        return
    from grpo_megatron.rollout.plugin.supported import require_supported_vllm

    require_supported_vllm()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from grpo_megatron.rollout.plugin import engine_orphans, whole_outputs

    WeightTransferEngineFactory.register_engine(
        "gloo", "grpo_megatron.rollout.plugin.gloo_engine", "GlooWeightTransferEngine"
    )
    engine_orphans.apply()
    whole_outputs.apply()
    if current_platform.is_cpu():
        from grpo_megatron.rollout.plugin import (
            cpu_eager_layers,
            cpu_moe_update,
            cpu_routed_experts,
        )

        cpu_eager_layers.apply()
        cpu_moe_update.apply()
        cpu_routed_experts.apply()
    _registered = True
