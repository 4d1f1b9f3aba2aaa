"""CPU: adapters of an engine are computed by products of matrices, slot by slot.

Gap (vLLM 0.32.0, lora/ops/torch_ops/lora_ops.py:35): for each token of a batch A and B of its
adapter are copied, [tokens, out, rank] numbers for every layer. And a defect: tokens of a request
without an adapter have index -1, that is the last slot, where others of the batch have one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


def apply() -> None:
    """Compute adapters without copies of them, and none where a request has none."""
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
        if kwargs:
            original(self, y, x, lora_a_stacked, lora_b_stacked, scale, output_slices, **kwargs)
            return
        if self.no_lora:
            return
        inputs = x.view(-1, x.shape[-1])
        outputs = y.view(-1, y.shape[-1])
        num_slots = len(lora_a_stacked[0])
        for slot in range(num_slots):
            is_elsewhere = (self.token_lora_indices != slot)[:, None]
            start = 0
            for a, b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                low = inputs @ a[slot, 0].t() * scale
                added = low @ b[slot, 0].t()
                # filled, not multiplied by 0, which would leave NaN
                outputs[:, start : start + size] += added.masked_fill(is_elsewhere, 0.0)
                start += size

    PunicaWrapperCPU.add_lora_linear = add_lora_linear
