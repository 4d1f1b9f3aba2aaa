"""CPU: rotary embeddings of tensors that have a dimension for heads.

Defect (vLLM 0.32.0, `RotaryEmbedding.forward_cpu`, rotary_embedding/base.py:298): the kernel
wants [tokens, heads * size], and takes the second last dimension for the tokens. Latent attention
hands over [tokens, heads, size] (layers/mla.py, models/deepseek_v2.py): the heads of the first
token are rotated as if they were tokens, all other tokens of the query are not, without an error.
"""


def apply() -> None:
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    original = RotaryEmbedding.forward_cpu

    def forward_cpu(self, positions, query, key=None):
        if query.dim() < 3:
            return original(self, positions, query, key)
        # Either may be a slice of a wider tensor; the kernel works in place, on these.
        flat_query = query.flatten(1)
        flat_key = None if key is None else key.flatten(1)
        original(self, positions, flat_query, flat_key)
        rotated_key = None if key is None else flat_key.view(key.shape)
        return flat_query.view(query.shape), rotated_key

    RotaryEmbedding.forward_cpu = forward_cpu
