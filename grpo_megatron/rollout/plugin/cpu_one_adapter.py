"""CPU: an engine with one slot computes its adapter by two products of matrices.

Gap (vLLM 0.32.0, lora/ops/torch_ops/lora_ops.py:35): for each token of a batch A and B of its
adapter are copied, [tokens, out, rank] numbers for every layer. And a defect: tokens of a request
without an adapter have index -1, that is the last slot, where others of the batch have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def apply() -> None:
    """Compute the adapter of an engine with one slot without copies of it."""
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    original = PunicaWrapperCPU.add_lora_linear

    def add_lora_linear(
        self: PunicaWrapperCPU,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        if len(lora_a_stacked[0]) != 1 or kwargs:
            original(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        if self.no_lora:
            return
        has_adapter = self.token_lora_indices >= 0
        outputs = y.view(-1, y.shape[-1])
        start = 0
        for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
            low = x.view(-1, x.shape[-1]) @ a[0, 0].t() * scale
            if not has_adapter.all():
                low = low * has_adapter[:, None]
            outputs[:, start : start + size] += low @ b[0, 0].t()
            start += size

    PunicaWrapperCPU.add_lora_linear = add_lora_linear
