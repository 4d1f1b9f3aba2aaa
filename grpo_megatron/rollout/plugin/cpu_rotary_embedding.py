"""CPU: rotary embeddings of tensors that have a dimension for heads.

Defect (vLLM 0.32.0, `RotaryEmbedding.forward_cpu`, rotary_embedding/base.py:298): the kernel
wants [tokens, heads * size], and takes the second last dimension for the tokens. Latent attention
hands over [tokens, heads, size] (layers/mla.py, models/deepseek_v2.py): the heads of the first
token are rotated as if they were tokens, all other tokens of the query are not, without an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding


def apply() -> None:
    """Give the kernel queries and keys without their dimension for heads."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu

    def forward_cpu(
        self: RotaryEmbedding,
        positions: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if query.dim() < 3:
            rotated: tuple[torch.Tensor, torch.Tensor | None]
            rotated = original(self, positions, query, key)
            return rotated
        # Either may be a slice of a wider tensor; the kernel works in place, on these.
        flat_query = query.flatten(1)
        if key is None:
            original(self, positions, flat_query, None)
            return flat_query.view(query.shape), None
        flat_key = key.flatten(1)
        original(self, positions, flat_query, flat_key)
        return flat_query.view(query.shape), flat_key.view(key.shape)

    RotaryEmbedding.forward_cpu = forward_cpu
