"""GPTModel whose last stage answers with token log-probs instead of logits."""

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig

from grpo_megatron.plan.hf_config import model_fields
from grpo_megatron.trainer.layer_specs import block_spec
from grpo_megatron.trainer.logprobs import Kept, token_logprobs
from grpo_megatron.trainer.rope import rotary


class PolicyModel(GPTModel):
    """`forward(..., labels=targets, loss_mask=rows)` returns fp32 [2, n]: log-probs, entropies.

    `rows` int64 [n] are the positions whose next token is wanted, `targets` int64 [n] those
    tokens. With `kept`, log-probs are over the kept sets, and a third row is over everything.
    Overrides Megatron's post-processing because it would make logits for all positions."""

    real_vocab_size: int
    temperature: float = 1.0
    logprob_chunk_tokens: int = 1024

    _kept: Kept | None = None

    def forward(self, *args, kept: Kept | None = None, **kwargs):
        self._kept = kept
        return super().forward(*args, **kwargs)

    def _postprocess(self, hidden_states, *args, labels=None, loss_mask=None, **kwargs):
        if not self.post_process:
            return hidden_states
        weight = (self.shared_embedding_or_output_weight()
                  if self.share_embeddings_and_output_weights else self.output_layer.weight)
        return torch.stack(token_logprobs(
            hidden_states, weight, loss_mask, labels, vocab_size=self.real_vocab_size,
            temperature=self.temperature, sequence_parallel=self.config.sequence_parallel,
            chunk_tokens=self.logprob_chunk_tokens, kept=self._kept))


def padded_vocab_size(vocab_size: int, tensor_parallel_size: int) -> int:
    """Megatron splits the vocabulary evenly; the padding gets probability 0."""
    return -(-vocab_size // tensor_parallel_size) * tensor_parallel_size


def build_chunk(config: TransformerConfig, hf: dict[str, Any], *, pre_process: bool,
                post_process: bool, vp_stage: int | None) -> PolicyModel:
    """One model chunk of this pipeline stage, randomly initialised."""
    rope = model_fields(hf)["rope"]
    model = PolicyModel(
        config, block_spec(config, vp_stage),
        vocab_size=padded_vocab_size(hf["vocab_size"], config.tensor_model_parallel_size),
        max_sequence_length=hf.get("max_position_embeddings", 0), pre_process=pre_process,
        post_process=post_process, position_embedding_type="rope",
        rotary_base=rope["theta"], rotary_percent=rope["percent"], vp_stage=vp_stage,
        share_embeddings_and_output_weights=hf.get("tie_word_embeddings", False))
    if not config.multi_latent_attention:
        model.rotary_pos_emb.inv_freq = rotary(rope, config.kv_channels)[0]
    model.real_vocab_size = hf["vocab_size"]
    return model
