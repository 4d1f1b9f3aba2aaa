"""Seconds of generation by replicas of an engine.

A decoding step of `n` sequences reads the weights once (of experts, those that some token meets)
and every sequence's keys and values; a batch takes as many steps as its longest answer has tokens,
in the last of which hardly a sequence is left."""

from dataclasses import dataclass

from grpo_megatron.plan.timing.lengths import Lengths
from grpo_megatron.plan.timing.tower import Images, tower_amounts
from grpo_megatron.plan.timing.trainer import Machine
from grpo_megatron.plan.timing.work import attention_widths, expert_elements, matrix_elements
from grpo_megatron.plan.weights import Sizes


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What one replica generates in a step."""

    num_samples: float
    num_prompts: float
    """Each computed once; its samples share it."""
    lengths: Lengths
    capacity: int
    """Sequences that run at once: as many as the server may, the client asks for and the cache
    holds."""
    weight_share: float = 1.0
    """Bytes of a weight of layers, in those of the engine's type: 0.5 in FP8."""
    is_eager: bool = False
    """Whether kernels are launched one by one, without CUDA graphs."""
    batches_in_flight: float = 1.0
    """Above 1 the engine never runs empty: answers of later steps follow at once."""


@dataclass(frozen=True, slots=True)
class DecodeAmounts:
    """What a rank of a replica reads and computes in one decoding step."""

    weight_bytes: float
    cache_bytes: float
    flops: float


def decode_amounts(
    s: Sizes, num_sequences: float, context: float, weight_share: float = 1.0
) -> DecodeAmounts:
    """Return what a rank of an engine with the layout of `s` reads and computes for a token each of
    sequences with `context` tokens of keys and values."""
    element: int = s.symbols["element"]
    layers = s.layers_of(0, 0)
    num_moe = sum(layers)
    num_dense = len(layers) - num_moe
    elements = s.symbols["vocabulary"] * s.symbols["hidden"]
    active = float(elements)
    if num_dense:
        of_dense = num_dense * sum(matrix_elements(s, is_moe=False))
        elements += of_dense
        active += of_dense
    read = float(elements)
    if num_moe:
        of_moe = num_moe * sum(matrix_elements(s, is_moe=True))
        one = num_moe * expert_elements(s)
        top_k = s.symbols["top_k"]
        read += of_moe + one * experts_met(s.symbols["experts"], top_k, num_sequences)
        active += of_moe + one * top_k
    attention = len(layers) * attention_flops_of_token(s, context)
    tables = s.symbols["vocabulary"] * s.symbols["hidden"]
    return DecodeAmounts(
        weight_bytes=(tables + (read - tables) * weight_share) * element,
        cache_bytes=num_sequences * context * cache_bytes_per_token(s),
        flops=num_sequences * (2 * active + attention),
    )


def experts_met(num_experts: int, top_k: int, num_tokens: float) -> float:
    """Return how many experts of a layer some token meets, if each goes to `top_k` at random."""
    missed: float = (1 - top_k / num_experts) ** num_tokens
    return num_experts * (1 - missed)


def cache_bytes_per_token(s: Sizes) -> float:
    """Return keys and values of a token on a rank, of all layers; latent ones are whole on every
    rank, and key-value heads are repeated where there are fewer than ranks."""
    width = s.symbols.get("latent_rope") or 2 * max(s.symbols["key"], s.model["kv_channels"])
    return float(width * s.model["num_layers"] * s.symbols["element"])


def attention_flops_of_token(s: Sizes, context: float) -> float:
    """Return the FLOPs of one layer's attention for one new token; latent attention works on latent
    vectors."""
    widths = attention_widths(s)
    if s.attention == "latent":
        widths = s.symbols["latent_rope"] + s.symbols["latent"]
    heads: int = s.symbols["heads"]
    return 2.0 * heads * widths * context


def decode_step_seconds(
    s: Sizes, num_sequences: float, context: float, load: EngineLoad, machine: Machine
) -> float:
    """Return the seconds of a decoding step of one replica."""
    c = machine.constants
    amounts = decode_amounts(s, num_sequences, context, load.weight_share)
    bandwidth = machine.device.memory_bytes_per_s * c["decode_efficiency"]
    seconds = (amounts.weight_bytes + amounts.cache_bytes) / bandwidth
    seconds += amounts.flops / (machine.device.flops * c["matrix_efficiency"])
    num_layers: int = s.model["num_layers"]
    if load.is_eager:
        seconds += num_layers * c["eager_layer_s"]
    else:
        seconds += num_layers * c["decode_layer_s"]
    tp = s.trainer.tensor_parallel_size
    if tp > 1:
        latency_s = c["reduce_latency_s"]
        if tp > machine.domain:
            latency_s = c["far_reduce_latency_s"]
        of_token: int = 2 * s.symbols["hidden"] * s.symbols["element"]
        size = num_sequences * of_token * (tp - 1) / tp
        seconds += 2 * num_layers * (latency_s + size / machine.link_bytes_per_s(tp))
    host_s = c["decode_step_s"] + num_sequences * c["decode_sequence_s"]
    return seconds + host_s * machine.host_slowdown


def prefill_seconds(s: Sizes, load: EngineLoad, machine: Machine) -> float:
    """Return the seconds that a replica computes prompts."""
    c = machine.constants
    of_token = decode_amounts(s, 1, load.lengths.prompt / 2).flops
    tokens = load.num_prompts * load.lengths.prompt
    flops = tokens * of_token
    if s.tower:  # shared out among tensor ranks
        tower = tower_amounts(s, Images(load.num_prompts, load.lengths.prompt))
        flops += tower.flops / s.trainer.tensor_parallel_size
    return flops / (machine.device.flops * c["prefill_efficiency"])


def generation_seconds(s: Sizes, load: EngineLoad, machine: Machine) -> float:
    """Return the seconds in which a replica generates the answers of a step."""
    prefill_s = prefill_seconds(s, load, machine)
    if load.batches_in_flight > 1:
        return prefill_s + _steady_seconds(s, load, machine)
    at_once = min(load.num_samples, load.capacity)
    waiting = load.num_samples - at_once
    rounds_s = 0.0
    if waiting > 0:
        rounds_s = waiting / at_once * _full_seconds(s, at_once, load, machine)
    return prefill_s + rounds_s + _batch_seconds(s, at_once, load, machine)


def _full_seconds(s: Sizes, at_once: float, load: EngineLoad, machine: Machine) -> float:
    """While `at_once` sequences run, each of which another follows: seconds of a mean answer."""
    lengths = load.lengths
    squares = sum(answer**2 for answer in lengths.answers) / len(lengths.answers)
    context = lengths.prompt + squares / lengths.answer / 2  # long answers are met more often
    step_s = decode_step_seconds(s, at_once, context, load, machine)
    return lengths.answer * step_s


def _steady_seconds(s: Sizes, load: EngineLoad, machine: Machine) -> float:
    at_once = min(load.num_samples * load.batches_in_flight, load.capacity)
    return load.num_samples / at_once * _full_seconds(s, at_once, load, machine)


def _batch_seconds(s: Sizes, at_once: float, load: EngineLoad, machine: Machine) -> float:
    """`at_once` sequences from their first token to the last one of the longest."""
    lengths = load.lengths
    longest = lengths.longest_of(max(round(load.num_samples), 1))
    points = [*(answer for answer in lengths.answers if answer < longest), longest]
    count = len(lengths.answers)
    seconds = 0.0
    before = 0.0
    for number, length in enumerate(points):
        running = max(at_once * (1 - number / count), 1.0)
        context = lengths.prompt + (before + length) / 2
        if length > before:
            step_s = decode_step_seconds(s, running, context, load, machine)
            seconds += (length - before) * step_s
        before = length
    return seconds
