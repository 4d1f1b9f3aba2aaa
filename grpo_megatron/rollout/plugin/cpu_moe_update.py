"""CPU: expert weights of an update must be prepacked like those of the first load.

Defect (vLLM 0.32.0, model_executor/layers/fused_moe/unquantized_fused_moe_method.py:191):
`_setup_kernel` lets the experts prepack their weights only when it builds the kernel. An update
copies the plain layout over the packed one: scrambled weights, wrong log-probs, no error."""


def apply() -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    cls = method.UnquantizedFusedMoEMethod
    original = cls._setup_kernel

    def _setup_kernel(self, layer, w13, w2) -> None:
        is_update = self.moe_kernel is not None
        original(self, layer, w13, w2)
        if is_update and self.unquantized_backend == UnquantizedMoeBackend.CPU:
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)

    cls._setup_kernel = _setup_kernel
