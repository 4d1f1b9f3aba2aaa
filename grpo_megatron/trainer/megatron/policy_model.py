"""GPTModel whose last stage answers with token log-probs instead of logits."""

from collections.abc import Sequence

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import get_tensor_model_parallel_group

from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens, divergence
from grpo_megatron.trainer.vocab_parallel.logprobs import Kept, policy_states, token_logprobs


class PolicyModel(GPTModel):
    """`forward(..., labels=targets, loss_mask=rows)` returns fp32 [2, n]: log-probs, entropies.

    `rows` int64 [n] are the positions whose next token is wanted, `targets` int64 [n] those tokens.
    With `kept`, log-probs are over the kept sets, and a third row is over everything; with
    `teachers`, a last row sums their divergences. Megatron would make logits for all positions."""

    real_vocab_size: int  # without the padding, which gets probability 0
    logprob_chunk_tokens: int
    temperature: float = 1.0

    answers_states: bool = False  # [n, H], what the output layer would get, instead
    _kept: Kept | None = None
    _teachers: Sequence[TeacherTokens] = ()

    def forward(
        self, *args, kept: Kept | None = None, teachers: Sequence[TeacherTokens] = (), **kwargs
    ):
        self._kept = kept
        self._teachers = teachers
        return super().forward(*args, **kwargs)

    def output_weight(self) -> torch.Tensor:
        """This rank's rows of the output layer, [V / TP, H]."""
        return (
            self.shared_embedding_or_output_weight()
            if self.share_embeddings_and_output_weights
            else self.output_layer.weight
        )

    def _postprocess(self, hidden_states, *args, labels=None, loss_mask=None, **kwargs):
        if not self.post_process:
            return hidden_states
        states = policy_states(
            hidden_states, loss_mask, sequence_parallel=self.config.sequence_parallel
        )
        if self.answers_states:
            return states
        weight = self.output_weight()
        found = token_logprobs(
            states,
            weight,
            labels,
            vocab_size=self.real_vocab_size,
            temperature=self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            kept=self._kept,
        )
        if teachers := [t for t in self._teachers if t.is_whole]:
            total = torch.zeros_like(found[0])
            group = get_tensor_model_parallel_group()
            for teacher in teachers:
                total = total.index_add(
                    0, teacher.rows, teacher.weight * divergence(states, weight, teacher, group)
                )
            found = (*(values.detach() for values in found), total)
        return torch.stack(found)
