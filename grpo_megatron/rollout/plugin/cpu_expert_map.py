"""CPU: experts of an engine worker that has only some of them.

Defect (vLLM 0.32.0, `CPUUnquantizedExperts.apply` of fused_moe/experts/cpu_moe.py): with expert
parallelism a worker is given the numbers of all experts and a map to its own, which it does not
read. It computes with memory behind its weights, or dies by a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts


def apply() -> None:
    """Translate experts before the kernel sees them."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    original = cpu_moe.CPUUnquantizedExperts.apply

    def with_own_experts(
        self: CPUUnquantizedExperts,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *others: Any,
        **named: Any,
    ) -> None:
        if expert_map is not None:
            topk_ids, topk_weights = own_experts(topk_ids, topk_weights, expert_map)
        original(
            self,
            output,
            hidden_states,
            w1,
            w2,
            topk_weights,
            topk_ids,
            activation,
            global_num_experts,
            None,
            *others,
            **named,
        )

    cpu_moe.CPUUnquantizedExperts.apply = with_own_experts


def own_experts(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, expert_map: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Translate experts, int [T, k], to this worker's, with weights, float [T, k].

    Those of other workers become its first, with the weight 0. expert_map: [E], -1: elsewhere."""
    local = expert_map.to(topk_ids.device)[topk_ids.long()]
    elsewhere = local < 0
    ids = local.masked_fill(elsewhere, 0).to(topk_ids.dtype)
    return ids, topk_weights.masked_fill(elsewhere, 0)
