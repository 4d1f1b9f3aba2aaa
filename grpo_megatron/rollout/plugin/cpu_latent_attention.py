"""CPU: latent attention of every size, with prefix caching.

Gaps (vLLM 0.32.0): a step's metadata refuses latent vectors of other than 320, 512 or 576 elements
at the first request (mla_attention.py:1717), and the kernel that decodes is compiled for 512 + 64
only (v1/attention/backends/mla/cpu_mla.py). Prefix caching is switched off (platforms/cpu.py:526),
and expert routes are refused without it, though cached prefixes are read by plain torch operations
that a CPU has (mla_attention.py, mla/prefill/cpu_sdpa.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.attention.mla_attention import (
        MLACommonBackend,
        MLACommonMetadata,
    )
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

KERNEL_SIZES = (512, 64)  # kv_lora_rank, qk_rope_head_dim


def apply() -> None:
    """Let latent attention take any size, and keep prefix caching where it was asked for."""
    _allow_other_sizes()
    _decode_other_sizes()
    _keep_prefix_caching()


def _allow_other_sizes() -> None:
    from vllm.model_executor.layers.attention.mla_attention import MLACommonBackend

    def get_supported_head_sizes(cls: type[MLACommonBackend]) -> list[int]:
        return []  # any

    MLACommonBackend.get_supported_head_sizes = classmethod(get_supported_head_sizes)


def _decode_other_sizes() -> None:
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

    original = CPUMLAImpl.forward_mqa

    def forward_mqa(
        self: CPUMLAImpl,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if (self.kv_lora_rank, self.qk_rope_head_dim) == KERNEL_SIZES:
            by_kernel: tuple[torch.Tensor, torch.Tensor | None]
            by_kernel = original(self, q, kv_c_and_k_pe_cache, attn_metadata, layer)
            return by_kernel
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        decode = attn_metadata.decode
        out = decode_latent(
            q,
            kv_c_and_k_pe_cache,
            decode.block_table,
            decode.seq_lens,
            self.kv_lora_rank,
            self.scale,
        )
        return out, None  # no log-sum-exp, as the kernel

    CPUMLAImpl.forward_mqa = forward_mqa


def decode_latent(
    queries: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    kv_lora_rank: int,
    scale: float,
) -> torch.Tensor:
    """Attend from one token of each request to all of its latent vectors.

    `queries` [requests, heads, size], `cache` [blocks, block size, size], `block_table` [requests,
    blocks], `lengths` [requests]. Returns [requests, heads, kv_lora_rank]. One request at a time:
    what a request gets does not depend on those beside it."""
    block_size = cache.size(1)
    out = queries.new_empty(*queries.shape[:2], kv_lora_rank)
    for row, length in enumerate(lengths.tolist()):
        num_blocks = -(-length // block_size)
        latents = cache[block_table[row, :num_blocks].long()].flatten(0, 1)[:length].float()
        scores = queries[row].float() @ latents.T * scale
        out[row] = scores.softmax(-1) @ latents[:, :kv_lora_rank]
    return out


def _keep_prefix_caching() -> None:
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: type[CpuPlatform], vllm_config: VllmConfig) -> None:
        wanted = vllm_config.cache_config.enable_prefix_caching
        original(cls, vllm_config)
        vllm_config.cache_config.enable_prefix_caching = wanted

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
