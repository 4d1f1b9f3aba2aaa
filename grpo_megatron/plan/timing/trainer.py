"""Seconds of a trainer's step.

a pass      operations / (peak x efficiency) + bytes / (bandwidth x efficiency) on the GPU, or
            what the host needs to launch its layers where that is more; and its collectives
a pipeline  micro-batches x slowest stage + the other stages once, divided by VPP: with equal
            stages (m + (PP - 1) / VPP) x a stage, of which (PP - 1) / (m VPP) is the bubble
a step      passes without gradients, forward and backward, what is left of the gradients'
            reduction, the optimizer, and the gathering of weights"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from grpo_megatron.plan.rank_bytes import bytes_per_parameter, shard_counts
from grpo_megatron.plan.timing.constants import Constants, DeviceSpeed
from grpo_megatron.plan.timing.lengths import Lengths, num_microbatches
from grpo_megatron.plan.timing.tower import Images
from grpo_megatron.plan.timing.work import (
    Amounts,
    MicroBatchSize,
    RankParameters,
    StageWork,
    parameters_of_rank,
    stages_work,
)
from grpo_megatron.plan.weights import Sizes

_MOST_PACKED = 1024
"""Samples whose packing is tried out; more are packed alike."""


@dataclass(frozen=True, slots=True)
class Machine:
    """A device, how many of them a node has, and the constants."""

    constants: Constants
    device: DeviceSpeed
    gpus_per_node: int
    attention_share: float = 1.0
    """Of `attention_efficiency`: less with kernels of an older architecture."""

    @property
    def domain(self) -> int:
        """GPUs that talk without the network."""
        if self.device.domain > 8:
            return self.device.domain
        return max(min(self.device.domain, self.gpus_per_node), 1)

    def link_bytes_per_s(self, span: int) -> float:
        """Return what a rank sends a second to ranks up to `span` ranks away."""
        if span <= self.domain:
            return self.device.link_bytes_per_s * self.constants["link_efficiency"]
        return self.network_bytes_per_s

    @property
    def network_bytes_per_s(self) -> float:
        """What a rank sends a second to other nodes."""
        return self.device.network_bytes_per_s * self.constants["network_efficiency"]

    @property
    def memory_bytes_per_s(self) -> float:
        """What kernels read and write a second."""
        return self.device.memory_bytes_per_s * self.constants["memory_efficiency"]

    @property
    def host_slowdown(self) -> float:
        """How much longer the host takes than the one of a DGX."""
        if self.device.host == "arm":
            return self.constants["arm_host_slowdown"]
        return 1.0

    @property
    def step_overhead_s(self) -> float:
        """What a step takes beside its phases."""
        if self.device.architecture == "cpu":
            return self.constants["cpu_step_overhead_s"]
        return self.constants["step_overhead_s"] * self.host_slowdown

    def flops(self, sizes: Sizes) -> float:
        """Peak of the trainer's precision."""
        is_gpu = self.device.architecture != "cpu"
        if sizes.trainer.precision == "float32" and is_gpu:
            return self.device.flops * self.constants["float32_share"]
        return self.device.flops


@dataclass(frozen=True, slots=True)
class TrainerLoad:
    """What a trainer does in a step."""

    num_samples: int
    num_updates: int
    """Optimizer steps; each trains an equal part of the samples."""
    lengths: Lengths
    max_tokens_per_microbatch: int
    """Of a rank's forward and backward, as a recipe counts them: before context parallelism."""
    max_tokens_per_logprob_microbatch: int
    """Of a rank's passes without gradients."""
    num_logprob_passes: int
    """Without gradients: of the old policy, of references."""
    computed_share: float = 1.0
    """Of all tokens: less where prompts are shared."""
    images_per_sample: float = 0.0
    """Images that are computed for each sample, all of its prompt; 0: the model does not see."""
    is_packed: bool = True
    """Whether a micro-batch holds several samples."""
    is_sft: bool = False
    """Whether the loss is a plain cross-entropy."""
    gathers_weights: bool = False
    """Whether weights are sharded over all ranks and gathered in every pass (FSDP)."""
    has_host_optimizer: bool = False
    """Whether Adam and its state are on the host."""


@dataclass(frozen=True, slots=True)
class TrainerSeconds:
    """Seconds of the trainer in a step."""

    logprobs_s: float
    """Passes without gradients."""
    forward_backward_s: float
    """With the pipeline's bubble."""
    gradient_sync_s: float
    """Reduction of gradients and gathering of weights that nothing hides."""
    optimizer_s: float
    num_microbatches: int
    """Of an update."""
    bubble_fraction: float
    """Share of `forward_backward_s` in which a rank of the slowest stage waits for others."""

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.logprobs_s + self.forward_backward_s + self.gradient_sync_s + self.optimizer_s

    def before(self, critic: Self) -> Self:
        """Add what a critic of the policy's layout takes after it, on the same micro-batches."""
        busy_s = self.forward_backward_s * (1 - self.bubble_fraction)
        busy_s += critic.forward_backward_s * (1 - critic.bubble_fraction)
        train_s = self.forward_backward_s + critic.forward_backward_s
        return replace(
            self,
            logprobs_s=self.logprobs_s + critic.logprobs_s,
            forward_backward_s=train_s,
            gradient_sync_s=self.gradient_sync_s + critic.gradient_sync_s,
            optimizer_s=self.optimizer_s + critic.optimizer_s,
            bubble_fraction=1 - busy_s / train_s,
        )


@dataclass(frozen=True, slots=True)
class TrainerWork:
    """What a trainer does in a step, before anything is said of a machine."""

    sizes: Sizes
    load: TrainerLoad
    stages: tuple[StageWork, ...]
    """Of a micro-batch with gradients."""
    num_microbatches: int
    logprob_stages: tuple[StageWork, ...]
    """Of a micro-batch without gradients; empty where there is no such pass."""
    num_logprob_microbatches: int
    parameters: tuple[RankParameters, ...]
    """Of a rank of each stage."""


def trainer_work(s: Sizes, load: TrainerLoad, attention_backward_ratio: float) -> TrainerWork:
    """Return the amounts of a step with the layout of `s`."""
    of_update = load.num_samples / load.num_updates
    mine = max(of_update / s.trainer.dp, 1.0)
    batch, count = _micro_batches(load, mine, load.max_tokens_per_microbatch)
    logprob_stages: tuple[StageWork, ...] = ()
    passes = 0
    if load.num_logprob_passes:
        other, passes = _micro_batches(load, mine, load.max_tokens_per_logprob_microbatch)
        logprob_stages = tuple(stages_work(s, other, attention_backward_ratio))
    stages = range(s.trainer.pipeline_parallel_size)
    return TrainerWork(
        sizes=s,
        load=load,
        stages=tuple(stages_work(s, batch, attention_backward_ratio)),
        num_microbatches=count,
        logprob_stages=logprob_stages,
        num_logprob_microbatches=passes,
        parameters=tuple(parameters_of_rank(s, stage) for stage in stages),
    )


def trainer_seconds(work: TrainerWork, machine: Machine) -> TrainerSeconds:
    """Return the seconds of these amounts on a machine."""
    load = work.load
    times = []
    for stage, of_stage in enumerate(work.stages):
        times.append(_train_seconds(work, stage, of_stage, machine))
    num_chunks = work.sizes.num_chunks
    train_s = load.num_updates * pipeline_seconds(times, work.num_microbatches, num_chunks)
    ideal_s = load.num_updates * work.num_microbatches * max(times)

    logprobs_s = 0.0
    if work.logprob_stages:
        times = []
        for stage, of_stage in enumerate(work.logprob_stages):
            times.append(_forward_seconds(work, stage, of_stage, machine))
        once_s = pipeline_seconds(times, work.num_logprob_microbatches, num_chunks)
        logprobs_s = load.num_logprob_passes * load.num_updates * once_s

    return TrainerSeconds(
        logprobs_s=logprobs_s,
        forward_backward_s=train_s,
        gradient_sync_s=load.num_updates * _sync_seconds(work, machine),
        optimizer_s=load.num_updates * _optimizer_seconds(work, machine),
        num_microbatches=work.num_microbatches,
        bubble_fraction=1 - ideal_s / train_s,
    )


def _micro_batches(load: TrainerLoad, mine: float, capacity: int) -> tuple[MicroBatchSize, int]:
    """Return the mean micro-batch of a rank that has `mine` samples, and how many it has."""
    tried = min(math.ceil(mine), _MOST_PACKED)
    count: float = tried
    if load.is_packed:
        room = capacity / load.computed_share
        count = num_microbatches(load.lengths.samples(tried), room)
    count = math.ceil(count * math.ceil(mine) / tried)
    in_one = mine / count
    tokens = load.computed_share * load.lengths.total * in_one
    images = None
    if load.images_per_sample:
        images = Images(load.images_per_sample * in_one, load.lengths.prompt)
    return (
        MicroBatchSize(
            tokens=tokens,
            squares=load.computed_share * load.lengths.mean_square * in_one,
            policy_tokens=tokens,
            images=images,
        ),
        count,
    )


def pipeline_seconds(stages_s: Sequence[float], num_microbatches: int, num_chunks: int) -> float:
    """Return the seconds of micro-batches through stages that take `stages_s` for one each: the
    slowest is never idle but while the first and the last one pass the other stages, which
    interleaved chunks make shorter (arXiv:2104.04473)."""
    slowest_s = max(stages_s)
    others_s = sum(stages_s) - slowest_s
    return num_microbatches * slowest_s + others_s / num_chunks


def _train_seconds(work: TrainerWork, stage: int, of_stage: StageWork, machine: Machine) -> float:
    s = work.sizes
    both = pass_seconds(s, of_stage.forward, machine, is_sft=work.load.is_sft)
    both += pass_seconds(s, of_stage.backward, machine, is_sft=work.load.is_sft)
    if not work.load.gathers_weights:
        return both
    element: int = s.symbols["element"]
    elements = work.parameters[stage].total
    # gathered twice in the weights' type, gradients scattered in float32
    return max(both, (2 * element + 4) * elements / machine.link_bytes_per_s(s.trainer.num_ranks))


def _forward_seconds(work: TrainerWork, stage: int, of_stage: StageWork, machine: Machine) -> float:
    s = work.sizes
    seconds = pass_seconds(s, of_stage.forward, machine, is_sft=work.load.is_sft)
    if not work.load.gathers_weights:
        return seconds
    element: int = s.symbols["element"]
    size = element * work.parameters[stage].total
    return max(seconds, size / machine.link_bytes_per_s(s.trainer.num_ranks))


def pass_seconds(s: Sizes, amounts: Amounts, machine: Machine, *, is_sft: bool) -> float:
    """Return the seconds of one pass of a micro-batch through a stage."""
    c = machine.constants
    launch_s = amounts.dense_layers * c["layer_launch_s"]
    launch_s += amounts.moe_layers * c["moe_layer_launch_s"]
    compute_s = compute_seconds(s, amounts, machine, is_sft=is_sft)
    return max(compute_s, launch_s * machine.host_slowdown) + collective_seconds(
        s, amounts, machine
    )


def compute_seconds(s: Sizes, amounts: Amounts, machine: Machine, *, is_sft: bool) -> float:
    """Return what a GPU needs for a pass, all kernels one after the other."""
    c = machine.constants
    peak = machine.flops(s)
    matrix_peak = peak
    if s.trainer.fp8 != "none":
        matrix_peak *= c["fp8_speedup"]
    seconds = amounts.matrix_flops / (matrix_peak * c["matrix_efficiency"])
    seconds += amounts.tower_flops / (peak * c["matrix_efficiency"])
    expert_s = amounts.expert_flops / (matrix_peak * c["expert_efficiency"])
    seconds += expert_s * expert_imbalance(s, c["expert_load_variation"])
    attention_efficiency = c["attention_efficiency"] * machine.attention_share
    seconds += amounts.attention_flops / (peak * attention_efficiency)
    logit_passes = c["logit_passes"]
    if is_sft:
        logit_passes = c["sft_logit_passes"]
    num_bytes = amounts.weight_bytes
    num_bytes += c["activation_passes"] * amounts.kept_bytes
    num_bytes += logit_passes * amounts.logit_bytes
    return seconds + num_bytes / machine.memory_bytes_per_s


def expert_imbalance(s: Sizes, variation: float) -> float:
    """Return the busiest expert-parallel rank's tokens, in those of the mean rank.

    Loads of experts with standard deviation `variation` (in mean loads), independent; the largest
    of n normal numbers is about sqrt(2 ln n) deviations above their mean."""
    ranks = s.trainer.expert_parallel_size
    if ranks == 1 or not s.symbols["experts"]:
        return 1.0
    experts = s.symbols["experts"] // ranks
    return 1 + variation / math.sqrt(experts) * math.sqrt(2 * math.log(ranks))


def collective_seconds(s: Sizes, amounts: Amounts, machine: Machine) -> float:
    """Return what a pass waits for other ranks; those of one domain use NVLink, others the network,
    both at the same time."""
    t = s.trainer
    tp = t.tensor_parallel_size
    seconds = amounts.tensor_bytes / machine.link_bytes_per_s(tp)
    span = tp * t.context_parallel_size
    seconds += amounts.context_bytes / machine.link_bytes_per_s(span)
    seconds += amounts.expert_tensor_bytes / machine.link_bytes_per_s(t.etp)
    seconds += amounts.pipeline_bytes / machine.link_bytes_per_s(t.num_ranks)
    near, far = all_to_all_bytes(amounts.expert_bytes, t.expert_parallel_size, machine.domain)
    imbalance = expert_imbalance(s, machine.constants["expert_load_variation"])
    near_s = near / machine.link_bytes_per_s(1)
    far_s = far / machine.network_bytes_per_s
    return seconds + imbalance * max(near_s, far_s)


def all_to_all_bytes(num_bytes: float, num_ranks: int, domain: int) -> tuple[float, float]:
    """Split what a rank sends to `num_ranks` ranks, itself among them, in equal parts: bytes to
    ranks of its own domain, and to others."""
    near_ranks = min(num_ranks, domain)
    of_one = num_bytes / num_ranks
    return of_one * (near_ranks - 1), of_one * (num_ranks - near_ranks)


def _sync_seconds(work: TrainerWork, machine: Machine) -> float:
    """Return the seconds in which an update reduces the gradients of the fullest stage, in float32,
    and gathers its weights."""
    if work.load.gathers_weights:
        return 0.0
    s = work.sizes
    t = s.trainer
    replicas, expert_replicas = shard_counts(t)
    longest_s = 0.0
    for parameters in work.parameters:
        seconds = 0.0
        for elements, ranks, inner in (
            (parameters.trained_dense, replicas, t.tensor_parallel_size),
            (parameters.trained_experts, expert_replicas, t.etp * t.expert_parallel_size),
        ):
            size = (4 + s.symbols["element"]) * elements * (ranks - 1) / ranks
            seconds += size / machine.link_bytes_per_s(inner * ranks)
        longest_s = max(longest_s, seconds)
    share = 1.0
    if t.overlap_communication is not False:
        share = machine.constants["exposed_gradient_share"]
    return share * longest_s


def _optimizer_seconds(work: TrainerWork, machine: Machine) -> float:
    """Adam reads gradients, reads and writes its state, writes weights."""
    s = work.sizes
    t = s.trainer
    replicas, expert_replicas = shard_counts(t)
    if not t.distributed_optimizer:
        replicas = 1
        expert_replicas = 1
    of_one = bytes_per_parameter(s.symbols["element"])
    moved = of_one.gradients + 2 * of_one.optimizer + of_one.weights
    longest = 0.0
    for parameters in work.parameters:
        of_rank = parameters.trained_dense / replicas
        of_rank += parameters.trained_experts / expert_replicas
        longest = max(longest, of_rank)
    if not work.load.has_host_optimizer:
        return longest * moved / machine.memory_bytes_per_s
    c = machine.constants
    carried = of_one.gradients + of_one.weights
    return longest * (moved / c["host_adam_bytes_per_s"] + carried / c["host_bytes_per_s"])
