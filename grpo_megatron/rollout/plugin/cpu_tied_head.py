"""CPU: the output layer of tied embeddings must be prepacked again after an update.

Defect (vLLM 0.32.0, model_loader/reload/layerwise.py, `finalize_layerwise_processing`):
a tied output layer receives no tensor of its own, so an update does not process it, and it goes on
multiplying with the packed copy of the weights of the first load: wrong log-probs, no error."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead


def apply() -> None:
    """Prepack tied output layers again at the end of every update."""
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise.finalize_layerwise_processing

    def finalize_layerwise_processing(model: torch.nn.Module, model_config: ModelConfig) -> None:
        original(model, model_config)
        for head in tied_heads(model):
            head.quant_method.process_weights_after_loading(head)

    layerwise.finalize_layerwise_processing = finalize_layerwise_processing


def tied_heads(model: torch.nn.Module) -> list[ParallelLMHead]:
    """Find the output layers whose weight is that of an embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    heads = []
    embeddings = set()  # where their weights begin in memory
    for layer in model.modules():
        if isinstance(layer, ParallelLMHead):  # a subclass of the other
            heads.append(layer)
        elif isinstance(layer, VocabParallelEmbedding):
            embeddings.add(layer.weight.data_ptr())
    return [head for head in heads if head.weight.data_ptr() in embeddings]
