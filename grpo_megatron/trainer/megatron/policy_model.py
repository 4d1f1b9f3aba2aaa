"""GPTModel whose last stage answers with token log-probs instead of logits."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import get_tensor_model_parallel_group

from grpo_megatron.batching.row_images import RowImages
from grpo_megatron.device_copies import to_device
from grpo_megatron.trainer.lora.attach import ModelAdapters
from grpo_megatron.trainer.lora.checkpoint import sharded_adapters
from grpo_megatron.trainer.megatron.context_parallel import OwnTokens, found_by_all
from grpo_megatron.trainer.megatron.deep_features import DeepFeatures, with_deep_features
from grpo_megatron.trainer.megatron.reward_head import RewardHead
from grpo_megatron.trainer.megatron.row_context import row_of
from grpo_megatron.trainer.megatron.vision_tower import ImageFeatures
from grpo_megatron.trainer.vocab_parallel.divergence import TeacherTokens, divergence
from grpo_megatron.trainer.vocab_parallel.logprobs import policy_states, token_logprobs


class PolicyModel(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """`forward(..., own=own)` returns fp32 [2, n]: log-probs, entropies, of all policy tokens.

    `own` says which positions' next tokens are wanted here; what context-parallel ranks find on
    theirs comes together. With `own.kept`, log-probs are over the kept sets, and a third row is
    over everything; with `squared_probs`, a last row sums squared probabilities; with `teachers`, a
    last row sums their divergences; with `values`, a last row is what the value head says at the
    position before each token. Megatron would make logits for all positions."""

    real_vocab_size: int  # without the padding, which gets probability 0
    logprob_chunk_tokens: int
    keep_logits: bool = False
    temperature: float = 1.0

    await_weight: Callable[[torch.Tensor], None] | None = None
    """Returns once a weight is whole, where forwards gather weights; None: they are."""

    answers_states: bool = False
    """What the output layer would get of this rank's policy tokens, [m, H], instead."""
    adapters: ModelAdapters | None = None
    """Of LoRA; None: all weights are trained."""
    has_reward_head: bool = False
    image_features: ImageFeatures | None = None
    """Of a model that sees, on the first pipeline stage."""
    mrope_axes: tuple[slice, slice] | None = None
    """Which angles of a head go by positions in height and in width; None: all go by one."""
    score: RewardHead
    """Of a reward model: each row is one of its scalars at the position before each policy token; a
    row of 0 follows a single one."""
    has_value_head: bool = False
    value_head: RewardHead
    """Of a critic that shares the policy's layers, on the last pipeline stage."""
    _own: OwnTokens
    _squared_probs: bool = False
    _values: bool = False
    _teachers: Sequence[TeacherTokens] = ()

    def forward(
        self,
        *args: Any,
        own: OwnTokens,
        squared_probs: bool = False,
        values: bool = False,
        teachers: Sequence[TeacherTokens] = (),
        images: RowImages | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Compute what the class says on the last pipeline stage, hidden states on the others.

        images: of the row. Raises DataError where one cannot be read."""
        self._own = own
        self._squared_probs = squared_probs
        self._values = values
        self._teachers = teachers
        row = row_of(kwargs["packed_seq_params"])
        row.axes = self.mrope_axes
        if self.image_features is not None:
            embedded, deep = self._embedded(self.image_features, args[0], args[1], images)
            kwargs["decoder_input"] = embedded
            row.deep = deep
        output: torch.Tensor = super().forward(*args, **kwargs)
        return output

    def _embedded(
        self,
        image_features: ImageFeatures,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        images: RowImages | None,
    ) -> tuple[torch.Tensor, DeepFeatures | None]:
        """Embed the tokens of a row, int64 [1, T], those of images as what is seen in them:
        [T, 1, H], or this rank's part of it under sequence parallelism; and what is added to it
        after the first layers, if the tower makes such features."""
        embedded: torch.Tensor = self.embedding(input_ids=tokens, position_ids=position_ids)
        if images is None:
            return image_features.without_images(embedded), None
        features, *deep_levels = image_features.of(images)
        first = 0
        if self.config.sequence_parallel:
            first = get_tensor_model_parallel_group().rank() * len(embedded)
        places = images.places - first
        is_here = (places >= 0) & (places < len(embedded))
        where = to_device(torch.from_numpy(places[is_here]), embedded.device)
        which = to_device(torch.from_numpy(images.features[is_here]), embedded.device)
        seen = features.index_select(0, which).to(embedded.dtype)
        embedded = embedded.index_copy(0, where, seen[:, None])
        if not deep_levels:
            return embedded, None
        return with_deep_features(
            embedded, where, [level.index_select(0, which) for level in deep_levels]
        )

    def output_weight(self) -> torch.Tensor:
        """Return this rank's rows of the output layer, [V / TP, H]."""
        weight: torch.Tensor
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        else:
            weight = self.output_layer.weight
        if self.await_weight is not None:
            self.await_weight(weight)
        return weight

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Describe every parameter for Megatron's checkpoints."""
        is_last: bool = self.post_process  # type: ignore[has-type]
        if self.has_reward_head:
            self.post_process = False  # Megatron would look for the output layer of a last stage
        try:
            described: dict[str, Any] = super().sharded_state_dict(prefix, *args, **kwargs)
        finally:
            self.post_process = is_last
        if self.adapters is not None:  # their layers take them for weights that are not split
            described.update(sharded_adapters(self, prefix))
        return described

    def _postprocess(
        self,
        hidden_states: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Answer in place of Megatron's logits."""
        if not self.post_process:
            return hidden_states
        own = self._own
        states = policy_states(
            hidden_states, own.predicting, sequence_parallel=self.config.sequence_parallel
        )
        if self.answers_states:
            return states
        if self.has_reward_head:
            scalars = self.score(states)
            if len(scalars) == 1:
                scalars = torch.cat([scalars, torch.zeros_like(scalars)])
            return found_by_all(scalars, own)
        weight = self.output_weight()
        found = token_logprobs(
            states,
            weight,
            own.targets,
            vocab_size=self.real_vocab_size,
            temperature=self.temperature,
            chunk_tokens=self.logprob_chunk_tokens,
            kept=own.kept,
            squared_probs=self._squared_probs,
            keep_logits=self.keep_logits,
        )
        answer = torch.stack(found)
        if self._values:
            answer = torch.cat([answer, self.value_head(states)])
        teachers = [teacher for teacher in self._teachers if teacher.is_whole]
        if not teachers:
            return found_by_all(answer, own)
        total = torch.zeros_like(found[0])
        group = get_tensor_model_parallel_group()
        for teacher in teachers:
            weighted = teacher.weight * divergence(states, weight, teacher, group)
            total = total.index_add(0, teacher.rows, weighted)
        return found_by_all(torch.cat([answer.detach(), total[None]]), own)
