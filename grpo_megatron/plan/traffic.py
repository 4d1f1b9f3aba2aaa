"""Bytes that a rank's collectives move in a training step.

By kind, group and type; kinds and groups are called as `grpo_megatron.trace.collectives` calls
them. Bytes are those of a call's larger side (the result of an all-gather, the input of a
reduce-scatter), of an all-to-all the input. Scalars (norms, losses, metrics) are left out."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from grpo_megatron.config.lora import LoraConfig
from grpo_megatron.plan.rank_bytes import gradient_elements
from grpo_megatron.plan.weights import Sizes, adapters_of_part, product, weights_of_chunk

Key = tuple[str, str, str]
"""Kind, group, type."""
Traffic = Counter[Key]
"""Bytes."""
_OfLayer = Callable[[Traffic, bool], None]
_SHAPE_BYTES = 24
"""Of a shape, three int64, that one pipeline stage tells the next before a tensor."""


@dataclass(frozen=True)
class Step:
    """A rank's part of an optimizer step."""

    stage: int
    place: int
    """Number among the ranks of its stage."""
    tokens: int
    """Of a micro-batch, padded: all that context-parallel ranks share."""
    policy_tokens: int
    """Of a micro-batch: those whose log-probs are wanted."""
    own_policy_tokens: int
    """Those that this context-parallel rank looks at."""
    on_gpu: bool


def forward_traffic(s: Sizes, step: Step, num_microbatches: int) -> Traffic:
    """Return the traffic of a pass without gradients, such as that of the old policy."""
    return _Rank(s, step).forward(num_microbatches)


def layers_traffic(s: Sizes, step: Step, num_microbatches: int) -> Traffic:
    """Return the traffic of the layers' forward alone, as full recomputation has it."""
    return _Rank(s, step).layers_again(num_microbatches)


def backward_traffic(s: Sizes, step: Step, num_microbatches: int) -> Traffic:
    """Return the traffic of a backward pass alone, without layers that are computed again and
    without sums of gradients."""
    return _Rank(s, step).backward(num_microbatches)


def gradient_traffic(
    s: Sizes, step: Step, num_microbatches: int, *, frozen_routers: bool
) -> Traffic:
    """Return the traffic of forward and backward, and of what is summed after them."""
    rank = _Rank(s, step)
    found = rank.forward(num_microbatches)
    if s.trainer.recompute == "full":
        found += rank.layers_again(num_microbatches)
    found += rank.backward(num_microbatches)
    found += rank.summed_gradients(frozen_routers=frozen_routers)
    return found


def update_traffic(s: Sizes, step: Step, *, frozen_routers: bool, overlaps: bool) -> Traffic:
    """Return the traffic of the optimizer: every rank gets the weights that others have updated."""
    found: Traffic = Counter()
    if not s.trainer.distributed_optimizer:
        return found
    dense, experts = gradient_elements(
        s, step.stage, frozen_routers=frozen_routers, overlaps=overlaps
    )
    times = 1
    has_experts = bool(s.symbols["experts"])
    if s.lora is not None:
        has_experts = experts > 0  # with adapters of their own
    if not overlaps and has_experts:
        times = 2  # each of Megatron's two optimizers gathers everything
    element = s.symbols["element"]
    dtype = s.trainer.precision
    found["all-gather", "dp", dtype] += times * dense * element
    found["all-gather", "edp", dtype] += times * experts * element
    return +found


class _Rank:
    """Sizes of one rank's messages."""

    def __init__(self, s: Sizes, step: Step):
        t = s.trainer
        self.s = s
        self.t = t
        self.step = step
        self.dtype = t.precision
        self.element = s.symbols["element"]
        self.tp = t.tensor_parallel_size
        self.splits_sequences = t.sp and self.tp > 1
        self.cp = t.context_parallel_size
        self.tokens = step.tokens // self.cp
        hidden = s.symbols["hidden"]
        self.whole = self.tokens * hidden * self.element
        own_tokens = self.tokens
        if self.splits_sequences:
            own_tokens //= self.tp
        self.own_tokens = own_tokens
        self.boundary = own_tokens * hidden * self.element
        self.pp = t.pipeline_parallel_size
        self.is_first = step.stage == 0
        self.is_last = step.stage == self.pp - 1

    # --- passes

    def forward(self, num_microbatches: int) -> Traffic:
        """Return one forward pass over the micro-batches."""
        found: Traffic = Counter()
        self._layers(found, self._forward_of_layer)
        if self.is_first and self.tp > 1:
            self._add_up(found, self.whole)
        if self.is_last and self.tp > 1:
            if self.splits_sequences:
                found["all-gather", "tp", self.dtype] += self.whole
            if not self.s.has_reward_head:
                # maximum, denominator, target and entropy of every token
                found["all-reduce", "tp", "float32"] += 4 * 4 * self.step.own_policy_tokens
        if self.is_last and self.cp > 1:  # log-probs and entropies, or at least two scalars
            numbers = max(self.s.num_scalars, 2)
            found["all-reduce", "cp", "float32"] += 4 * numbers * self.step.policy_tokens
        self._boundaries(found, "receive", "send")
        return _times(found, num_microbatches)

    def layers_again(self, num_microbatches: int) -> Traffic:
        """Return the layers' forward, computed again before their backward."""
        found: Traffic = Counter()
        self._layers(found, self._forward_of_layer)
        return _times(found, num_microbatches)

    def backward(self, num_microbatches: int) -> Traffic:
        """Return one backward pass over the micro-batches."""
        found: Traffic = Counter()
        if self.t.recompute == "selective":
            self._layers(found, self._keys_and_values)
        self._layers(found, self._backward_of_layer)
        if self.is_first and self.splits_sequences and self.s.lora is None:
            found["all-gather", "tp", self.dtype] += self.whole
        if self.is_last and self.tp > 1:
            self._add_up(found, self.whole)
        self._boundaries(found, "send", "receive")
        return _times(found, num_microbatches)

    def _layers(self, found: Traffic, of_layer: _OfLayer) -> None:
        for is_moe in self.s.layers_of_stage(self.step.stage):
            of_layer(found, is_moe)

    def _boundaries(self, found: Traffic, before: str, after: str) -> None:
        """Tensors, and their shapes, that chunks exchange with the stage before and after."""
        chunks = self.s.num_chunks
        num_before = chunks - self.is_first
        num_after = chunks - self.is_last
        for kind, count in ((before, num_before), (after, num_after)):
            found[kind, "pp", self.dtype] += count * self.boundary
            found[kind, "pp", "int64"] += count * _SHAPE_BYTES

    # --- a layer

    def _forward_of_layer(self, found: Traffic, is_moe: bool) -> None:
        self._layer(found, is_moe, backward=False)

    def _backward_of_layer(self, found: Traffic, is_moe: bool) -> None:
        self._layer(found, is_moe, backward=True)

    def _layer(self, found: Traffic, is_moe: bool, *, backward: bool) -> None:
        self._adapters(found, is_moe, backward=backward)
        self._attention(found, backward=backward)
        if is_moe:
            self._experts(found, backward=backward)
        has_mlp = (
            not is_moe or self.s.symbols["shared"] > 0
        )  # a dense layer's own, or a shared expert
        if has_mlp:
            self._split_pair(found, backward=backward)

    def _adapters(self, found: Traffic, is_moe: bool, *, backward: bool) -> None:
        """What tensor ranks exchange between A and B; those of routed experts exchange nothing."""
        if self.tp == 1:
            return
        for part in (self.s.attention, _mlp_of(is_moe)):
            for adapter in adapters_of_part(self.s, part):
                size = self.tokens * adapter.rank * self.element
                brings_together = (adapter.split == "rows") != backward
                if adapter.split == "none":
                    continue
                if adapter.split == "columns" and not backward:  # the norms of its rows
                    found["all-reduce", "tp", "float32"] += 4 * adapter.num_magnitudes
                if self.splits_sequences and brings_together:
                    found["all-gather", "tp", self.dtype] += size
                elif self.splits_sequences:
                    found["reduce-scatter", "tp", self.dtype] += size
                elif not brings_together:
                    found["all-reduce", "tp", self.dtype] += size

    def _attention(self, found: Traffic, *, backward: bool) -> None:
        if backward and self.cp > 1:
            found["reduce-scatter", "cp", self.dtype] += self._bytes_of_keys()
        elif self.cp > 1:
            self._keys_and_values(found, is_moe=False)
        if self.s.attention == "latent" and self.tp > 1:
            self._latent_attention(found, backward=backward)
        else:
            self._split_pair(found, backward=backward)

    def _keys_and_values(self, found: Traffic, is_moe: bool) -> None:
        """Every context-parallel rank gets those of all."""
        if self.cp > 1:
            found["all-gather", "cp", self.dtype] += self._bytes_of_keys()

    def _bytes_of_keys(self) -> int:
        """Return the bytes of one layer's keys and values of all tokens of a micro-batch; latent
        attention pads values to the size of keys."""
        name = "key"
        if self.s.attention == "latent":
            name = "query"
        found: int = 2 * self.step.tokens * self.s.symbols[name] * self.element
        return found

    def _latent_attention(self, found: Traffic, *, backward: bool) -> None:
        """Queries (or their latent vectors), keys' and values' latent vectors and the keys' rotary
        part are made of own tokens and gathered; needs sequence parallelism."""
        symbols = self.s.symbols
        of_token = self.tokens * self.element
        latents = (product("q_rank", symbols) + symbols["latent"]) * of_token
        rotary = (symbols["latent_rope"] - symbols["latent"]) * of_token
        if not product("q_rank", symbols):
            latents += self.whole
        if backward:
            found["all-gather", "tp", self.dtype] += self.whole + latents
            found["reduce-scatter", "tp", self.dtype] += latents + rotary
        else:
            found["all-gather", "tp", self.dtype] += latents + rotary
            found["reduce-scatter", "tp", self.dtype] += self.whole

    def _split_pair(self, found: Traffic, *, backward: bool) -> None:
        """A matrix split by columns, and one by rows."""
        if self.tp == 1:
            return
        if not self.splits_sequences:
            found["all-reduce", "tp", self.dtype] += self.whole
            return
        if backward:  # the second's gradient, the first's input again, the first's gradient
            times = 2
            if self.s.lora is not None:  # the first's weight has no gradient
                times = 1
            found["all-gather", "tp", self.dtype] += times * self.whole
            found["reduce-scatter", "tp", self.dtype] += self.whole
        else:
            found["all-gather", "tp", self.dtype] += self.whole
            found["reduce-scatter", "tp", self.dtype] += self.whole

    def _add_up(self, found: Traffic, size: int) -> None:
        """Sum what all tensor ranks have a part of."""
        kind = "all-reduce"
        if self.splits_sequences:
            kind = "reduce-scatter"
        found[kind, "tp", self.dtype] += size

    def _experts(self, found: Traffic, *, backward: bool) -> None:
        """Tokens to their experts' ranks and back."""
        t = self.t
        hidden = self.s.symbols["hidden"]
        etp = t.etp
        sent = self.own_tokens * self.s.symbols["top_k"]
        received = self._received(sent)
        rows = received * etp
        there_and_back = sent + received
        of_probabilities = sent
        if backward:
            of_probabilities = received
        if t.expert_parallel_size > 1:
            found["all-to-all", "ep", self.dtype] += there_and_back * hidden * self.element
            found["all-to-all", "ep", "float32"] += of_probabilities * 4
        if not backward and etp * t.expert_parallel_size > 1:
            ranks = etp * t.expert_parallel_size
            found["all-gather", "ep_etp", "int64"] += 8 * self.s.symbols["experts"] * ranks
        if etp == 1:
            return
        gather, scatter = "all-gather", "reduce-scatter"
        if not self.step.on_gpu:  # what gloo has not
            gather, scatter = "all-to-all", "all-reduce"
        if backward:
            found[gather, "etp", "float32"] += rows * hidden * 4
            found[scatter, "etp", self.dtype] += rows * hidden * self.element
            found[scatter, "etp", "float32"] += rows * 4
        else:
            found[gather, "etp", self.dtype] += rows * hidden * self.element
            found[gather, "etp", "float32"] += rows * 4
            found[scatter, "etp", "float32"] += rows * hidden * 4

    def _received(self, sent: int) -> int:
        """Return rows that a rank's experts get from one rank of every other rank's part: evenly
        spread, the first experts take what is left."""
        ep = self.t.expert_parallel_size
        num_experts: int = self.s.symbols["experts"]
        own = num_experts // ep
        first = self.step.place // self.t.etp % ep * own
        each, left = divmod(sent, num_experts)
        with_one_more = min(max(left - first, 0), own)
        return ep * (each * own + with_one_more)

    # --- gradients

    def summed_gradients(self, *, frozen_routers: bool) -> Traffic:
        """After the last backward: over data parallelism, and where ranks share a weight."""
        s = self.s
        found: Traffic = Counter()
        overlaps = self.t.overlap_communication
        if overlaps is None:
            overlaps = self.step.on_gpu
        dense, experts = gradient_elements(
            s, self.step.stage, frozen_routers=frozen_routers, overlaps=overlaps
        )
        kind = "all-reduce"
        if self.t.distributed_optimizer:
            kind = "reduce-scatter"
        found[kind, "dp", "float32"] += 4 * dense
        found[kind, "edp", "float32"] += 4 * experts
        found["all-reduce", "tp", "float32"] += 4 * self._whole_weights(frozen_routers)
        if s.model.get("moe_router_enable_expert_bias"):
            counts = s.symbols["experts"] * sum(s.layers_of_stage(self.step.stage))
            found["all-reduce", "tp_dp", self.dtype] += self.element * counts
        for chunk in range(s.num_chunks):
            for weight in weights_of_chunk(s, self.step.stage, chunk):
                if weight.kind == "shared" and weight.is_trained:
                    found["all-reduce", "embd", "float32"] += 4 * weight.numel
                if weight.kind == "tower" and weight.is_trained and self.tp > 1:
                    found["all-reduce", "tp", "float32"] += 4 * weight.numel
        return +found

    def _whole_weights(self, frozen_routers: bool) -> int:
        """Return elements of weights that every tensor rank has whole and sees a part of the tokens
        of."""
        if self.tp == 1:
            return 0
        if self.s.lora is not None:
            return self._whole_adapters(self.s.lora)
        symbols = self.s.symbols
        of_heads = 2 * product("head_norm", symbols)
        of_latents = 0
        for form in ("q_rank hidden", "q_rank", "latent_rope hidden", "latent"):
            of_latents += product(form, symbols)
        if not self.splits_sequences:
            return of_heads * len(self.s.layers_of_stage(self.step.stage))
        total = 0
        for is_moe in self.s.layers_of_stage(self.step.stage):
            total += 2 * symbols["hidden"] + of_heads + of_latents
            if is_moe and not frozen_routers:
                total += symbols["experts"] * symbols["hidden"]
        if self.is_last:
            total += symbols["hidden"]
        return total

    def _whole_adapters(self, lora: LoraConfig) -> int:
        """Return elements of adapters of which every tensor rank has a part of the gradient."""
        if not self.splits_sequences:
            return 0
        total = 0
        for is_moe in self.s.layers_of_stage(self.step.stage):
            for part in (self.s.attention, _mlp_of(is_moe)):
                for adapter in adapters_of_part(self.s, part):
                    total += adapter.num_whole(is_split=True)
            if is_moe and lora.experts == "shared":
                for adapter in adapters_of_part(self.s, "expert"):
                    total += adapter.num_whole(is_split=self.t.etp > 1)
        return total


def _mlp_of(is_moe: bool) -> str:
    """Return what every token passes beside attention, as `closed_forms.toml` names it."""
    if is_moe:
        return "shared"
    return "mlp"


def _times(traffic: Traffic, count: int) -> Traffic:
    return Counter({key: size * count for key, size in traffic.items() if size})
