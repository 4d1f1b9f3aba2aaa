"""What a trainer rank computes, reads and sends for a micro-batch: amounts, no seconds.

    operations of a matrix        2 x its elements x its tokens, twice that in the backward; once
                                  where it is frozen beside adapters, which have no gradient of it
    operations of attention       heads x (width of keys + width of values) x sum of squared lengths
                                  (of the causal half), 2.5 times that in the backward
    bytes of weights              each once a pass, and twice in the backward, which adds a gradient
                                  in float32 to its buffer; of a frozen one there is none
    bytes of activations          what a layer keeps (`plan.step_memory`), several times
    bytes of collectives          `plan.traffic`, by the links that they take

Everything is of one rank; what tensor, expert and context parallelism split is split."""

import itertools
from dataclasses import dataclass, fields

from grpo_megatron.plan.step_memory import kept_bytes
from grpo_megatron.plan.timing.tower import Images, tower_amounts
from grpo_megatron.plan.traffic import (
    Step,
    Traffic,
    backward_traffic,
    forward_traffic,
    layers_traffic,
)
from grpo_megatron.plan.weights import (
    FORMS,
    Sizes,
    adapters_of_part,
    is_matrix,
    product,
    weights_of_chunk,
)

_OF_OWN_TOKENS = {"q_rank hidden", "latent_rope hidden", "experts hidden"}
"""Matrices that every tensor-parallel rank has whole, for its own tokens under sequence
parallelism: the projections to latent vectors and the router."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """What a rank computes and moves in one pass of a micro-batch through the layers of a pipeline
    stage."""

    matrix_flops: float = 0.0
    """Of dense matrices: attention's, MLPs', routers', shared experts', the output layer's."""
    expert_flops: float = 0.0
    """Of routed experts, evenly loaded."""
    tower_flops: float = 0.0
    """Of matrices of a vision tower, which FP8 leaves as they are."""
    attention_flops: float = 0.0
    """Of queries with keys and of weights with values."""
    weight_bytes: float = 0.0
    """Read, of matrices and experts; in a backward written gradients too."""
    kept_bytes: float = 0.0
    """That layers keep of their activations."""
    logit_bytes: float = 0.0
    """Of the logits in float32."""
    tensor_bytes: float = 0.0
    """A rank sends to its tensor-parallel ranks."""
    context_bytes: float = 0.0
    """A rank sends to its context-parallel ranks: keys and values."""
    expert_bytes: float = 0.0
    """A rank sends to its expert-parallel ranks, itself among them."""
    expert_tensor_bytes: float = 0.0
    """A rank sends to the tensor-parallel ranks of its experts."""
    pipeline_bytes: float = 0.0
    """A rank sends to the next stage."""
    dense_layers: float = 0.0
    """Layers with an MLP, to be launched."""
    moe_layers: float = 0.0
    """Layers with experts, to be launched."""

    def __add__(self, other: "Amounts") -> "Amounts":
        """Return both, one after the other."""
        sums = {}
        for field in fields(self):
            sums[field.name] = getattr(self, field.name) + getattr(other, field.name)
        return Amounts(**sums)


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """What is in a micro-batch, before context parallelism splits it."""

    tokens: float
    squares: float
    """Sum of the squared lengths of its samples."""
    policy_tokens: float
    """Whose log-probs are wanted."""
    images: Images | None = None
    """For a model that sees."""


@dataclass(frozen=True, slots=True)
class StageWork:
    """A pipeline stage's passes of one micro-batch."""

    forward: Amounts
    backward: Amounts
    """With what is computed again."""


def stage_work(s: Sizes, stage: int, batch: MicroBatchSize, backward_ratio: float) -> StageWork:
    """Return what a rank of `stage` does for a micro-batch; `backward_ratio`: of attention."""
    layers = _layer_amounts(s, stage, batch)
    ends = _end_amounts(s, stage, batch)
    adapters = _adapter_amounts(s, stage, batch)
    step = _step(s, stage, batch)
    forward = layers + ends + adapters + _sent(s, forward_traffic(s, step, 1))
    is_frozen = s.lora is not None
    backward = _differentiated(layers + ends, s, backward_ratio, is_frozen=is_frozen)
    backward += _differentiated(adapters, s, backward_ratio)
    backward += _sent(s, backward_traffic(s, step, 1))
    if s.trainer.recompute == "full":
        backward += layers + adapters + _sent(s, layers_traffic(s, step, 1))
    if stage == 0 and batch.images is not None:
        tower = _forward_of_tower(s, batch.images)
        forward += tower
        if s.trainer.vision_tower == "trained":
            backward += _differentiated(tower, s, backward_ratio)
            if s.trainer.recompute == "full":
                backward += tower
    return StageWork(forward, backward)


def _forward_of_tower(s: Sizes, images: Images) -> Amounts:
    found = tower_amounts(s, images)
    return Amounts(
        tower_flops=found.matrix_flops,
        attention_flops=found.attention_flops,
        weight_bytes=found.weight_bytes,
        kept_bytes=found.kept_bytes,
        dense_layers=found.num_blocks,
    )


def stages_work(s: Sizes, batch: MicroBatchSize, backward_ratio: float) -> list[StageWork]:
    """Return the work of every stage; stages with equal layers share theirs."""
    found: list[StageWork] = []
    known: dict[tuple[bool, ...], StageWork] = {}
    last = s.trainer.pipeline_parallel_size - 1
    for stage in range(last + 1):
        layers = tuple(s.layers_of_stage(stage))
        is_inner = stage not in (0, last)
        if is_inner and layers in known:
            found.append(known[layers])
            continue
        work = stage_work(s, stage, batch, backward_ratio)
        if is_inner:
            known[layers] = work
        found.append(work)
    return found


def matrix_elements(s: Sizes, *, is_moe: bool) -> tuple[int, int]:
    """Return elements of a layer's dense matrices on a rank, of attention and of the MLP or the
    router and shared experts: those that all tokens of a micro-batch meet, and those that a rank's
    own do."""
    parts = [s.attention]
    if is_moe:
        parts += ["router", "shared"]
    else:
        parts.append("mlp")
    of_all = 0
    of_own = 0
    for part in parts:
        for form in FORMS["weights"][part]:
            if form in _OF_OWN_TOKENS:
                of_own += product(form, s.symbols)
            elif is_matrix(form):
                of_all += product(form, s.symbols)
    return of_all, of_own


def expert_elements(s: Sizes) -> int:
    """Return elements of one routed expert on a rank."""
    return sum(product(form, s.symbols) for form in FORMS["weights"]["expert"])


def adapter_elements(s: Sizes, *, is_moe: bool) -> tuple[int, int]:
    """Return elements of a layer's adapters on a rank, A and B of each: of those that every token
    of a micro-batch meets, and of those of one routed expert."""
    of_attention = _elements_of_adapters(s, s.attention)
    if not is_moe:
        return of_attention + _elements_of_adapters(s, "mlp"), 0
    of_shared = _elements_of_adapters(s, "shared")
    return of_attention + of_shared, _elements_of_adapters(s, "expert")


def _elements_of_adapters(s: Sizes, part: str) -> int:
    adapters = adapters_of_part(s, part)
    return sum(adapter.rank * (adapter.num_inputs + adapter.num_outputs) for adapter in adapters)


def attention_widths(s: Sizes) -> int:
    """Width of a head's keys and of its values together."""
    if s.attention == "latent":
        widths = ("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
        return sum(int(s.model[width]) for width in widths)
    return 2 * int(s.model["kv_channels"])


def model_flops(whole: Sizes, tokens: float, squares: float) -> float:
    """Operations of a forward and a backward of the whole model, nothing computed twice: 6 for each
    element that a token meets, 4 where it is frozen beside adapters, and of attention what
    causality leaves. What MFU is a share of."""
    of_weight = 6
    if whole.lora is not None:
        of_weight = 4
    total = 0.0
    for is_moe in whole.layers_of(0, 0):
        elements = sum(matrix_elements(whole, is_moe=is_moe))
        in_adapters, of_expert = adapter_elements(whole, is_moe=is_moe)
        if is_moe:
            elements += whole.symbols["top_k"] * expert_elements(whole)
            in_adapters += whole.symbols["top_k"] * of_expert
        total += (of_weight * elements + 6 * in_adapters) * tokens
        total += 3 * whole.symbols["heads"] * attention_widths(whole) * squares
    if whole.has_reward_head:
        return total  # a scalar is one product a token
    of_output: int = whole.symbols["vocabulary"] * whole.symbols["hidden"]
    return total + of_weight * of_output * tokens


def _layer_amounts(s: Sizes, stage: int, batch: MicroBatchSize) -> Amounts:
    """Return the forward of a stage's layers, without collectives."""
    t = s.trainer
    tokens = batch.tokens / t.context_parallel_size
    squares = batch.squares / t.context_parallel_size
    own_tokens = tokens
    if t.sp:
        own_tokens /= t.tensor_parallel_size
    element = s.symbols["element"]
    total = Amounts()
    for is_moe, layers in itertools.groupby(sorted(s.layers_of_stage(stage))):
        count = len(list(layers))
        of_all, of_own = matrix_elements(s, is_moe=is_moe)
        expert_flops = 0.0
        held = of_all + of_own
        dense_layers = count
        moe_layers = 0
        if is_moe:
            dense_layers = 0
            moe_layers = count
            rows = own_tokens * s.symbols["top_k"] * t.etp
            expert_flops = 2 * expert_elements(s) * rows
            held += expert_elements(s) * (s.symbols["experts"] // t.expert_parallel_size)
        total += Amounts(
            matrix_flops=count * 2 * (of_all * tokens + of_own * own_tokens),
            expert_flops=count * expert_flops,
            attention_flops=count * s.symbols["heads"] * attention_widths(s) * squares,
            weight_bytes=count * held * element,
            kept_bytes=count * kept_bytes(s, max(round(batch.tokens), 1), is_moe=is_moe),
            dense_layers=dense_layers,
            moe_layers=moe_layers,
        )
    return total


def _adapter_amounts(s: Sizes, stage: int, batch: MicroBatchSize) -> Amounts:
    """Return the forward of the adapters beside a stage's layers, without collectives. What they
    keep is among that of the layers."""
    t = s.trainer
    tokens = batch.tokens / t.context_parallel_size
    own_tokens = tokens
    if t.sp:
        own_tokens /= t.tensor_parallel_size
    total = Amounts()
    for is_moe in s.layers_of_stage(stage):
        of_all, of_expert = adapter_elements(s, is_moe=is_moe)
        held = of_all
        rows = 0.0
        if is_moe:
            rows = own_tokens * s.symbols["top_k"] * t.etp
            held += of_expert * (s.symbols["experts"] // t.expert_parallel_size)
        total += Amounts(
            matrix_flops=2 * of_all * tokens,
            expert_flops=2 * of_expert * rows,
            weight_bytes=held * s.symbols["element"],
        )
    return total


def _end_amounts(s: Sizes, stage: int, batch: MicroBatchSize) -> Amounts:
    """Return the output layer and the loss, on the last stage."""
    if stage != s.trainer.pipeline_parallel_size - 1 or s.has_reward_head:
        return Amounts()  # a value is one number a token
    tokens = batch.policy_tokens / s.trainer.context_parallel_size
    elements = s.symbols["vocabulary"] * s.symbols["hidden"]
    return Amounts(
        matrix_flops=2 * elements * tokens,
        weight_bytes=elements * s.symbols["element"],
        logit_bytes=4 * s.symbols["vocabulary"] * tokens,
    )


def _differentiated(
    forward: Amounts, s: Sizes, backward_ratio: float, *, is_frozen: bool = False
) -> Amounts:
    """Return the backward of these passes, without collectives. is_frozen: their weights have no
    gradients, so that only those of their inputs are computed."""
    element = s.symbols["element"]
    gradients = forward.weight_bytes / element * 8  # read and written in float32
    products = 2  # gradients of the inputs, and of the weights
    if is_frozen:
        gradients = 0.0
        products = 1
    return Amounts(
        matrix_flops=products * forward.matrix_flops,
        expert_flops=products * forward.expert_flops,
        tower_flops=products * forward.tower_flops,
        attention_flops=backward_ratio * forward.attention_flops,
        weight_bytes=forward.weight_bytes + gradients,
        kept_bytes=2 * forward.kept_bytes,
        logit_bytes=forward.logit_bytes,
        dense_layers=forward.dense_layers,
        moe_layers=forward.moe_layers,
    )


def _step(s: Sizes, stage: int, batch: MicroBatchSize) -> Step:
    t = s.trainer
    multiple = t.tensor_parallel_size * t.context_parallel_size
    tokens = -(-max(round(batch.tokens), 1) // multiple) * multiple
    policy_tokens = round(batch.policy_tokens)
    return Step(
        stage,
        0,
        tokens,
        own_policy_tokens=policy_tokens // t.context_parallel_size,
        policy_tokens=policy_tokens,
        on_gpu=True,
    )


def _sent(s: Sizes, traffic: Traffic) -> Amounts:
    """Return bytes that leave a rank, of a pass's collectives."""
    t = s.trainer
    of_group: dict[str, float] = {}
    for (kind, group, _), size in traffic.items():
        if kind == "receive":
            continue
        of_group[group] = of_group.get(group, 0.0) + _TIMES_SENT.get(kind, 1.0) * size
    tp = t.tensor_parallel_size
    cp = t.context_parallel_size
    return Amounts(
        context_bytes=of_group.get("cp", 0.0) * (cp - 1) / cp,
        tensor_bytes=of_group.get("tp", 0.0) * (tp - 1) / tp,
        expert_bytes=of_group.get("ep", 0.0),
        expert_tensor_bytes=of_group.get("etp", 0.0) * (t.etp - 1) / t.etp,
        pipeline_bytes=of_group.get("pp", 0.0),
    )


_TIMES_SENT = {"all-reduce": 2.0}
"""A ring's all-reduce is a reduce-scatter and an all-gather."""


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Elements of a rank's weights."""

    dense: int
    """That all data-parallel ranks have."""
    experts: int
    trained_dense: int
    """Those of `dense` with gradients."""
    trained_experts: int

    @property
    def total(self) -> int:
        """All weights."""
        return self.dense + self.experts


def parameters_of_rank(s: Sizes, stage: int) -> RankParameters:
    """Count the elements of a rank of a pipeline stage."""
    dense = 0
    experts = 0
    trained_dense = 0
    trained_experts = 0
    for chunk in range(s.num_chunks):
        for weight in weights_of_chunk(s, stage, chunk):
            num_trained = weight.numel * weight.is_trained
            if weight.kind == "expert":
                experts += weight.numel
                trained_experts += num_trained
            else:
                dense += weight.numel
                trained_dense += num_trained
    return RankParameters(dense, experts, trained_dense, trained_experts)
