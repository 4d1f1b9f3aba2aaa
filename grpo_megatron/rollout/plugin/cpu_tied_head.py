"""CPU: the output layer of tied embeddings must be prepacked again after an update.

Defect (vLLM 0.32.0, model_loader/reload/layerwise.py, `finalize_layerwise_processing`):
a tied output layer receives no tensor of its own, so an update does not process it, and it goes on
multiplying with the packed copy of the weights of the first load: wrong log-probs, no error."""


def apply() -> None:
    from vllm.model_executor.model_loader.reload import layerwise

    original = layerwise.finalize_layerwise_processing

    def finalize_layerwise_processing(model, model_config):
        original(model, model_config)
        for head in tied_heads(model):
            head.quant_method.process_weights_after_loading(head)

    layerwise.finalize_layerwise_processing = finalize_layerwise_processing


def tied_heads(model) -> list:
    """Output layers whose weight is that of an embedding."""
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    layers = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    heads = [layer for layer in layers if isinstance(layer, ParallelLMHead)]
    embeddings = {layer.weight.data_ptr() for layer in layers if layer not in heads}
    return [head for head in heads if head.weight.data_ptr() in embeddings]
