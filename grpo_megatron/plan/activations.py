"""What a training step holds beside the static bytes: the closed forms of `closed_forms.toml`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from grpo_megatron.plan.weights import FORMS, Sizes, product, weights_of_chunk


@dataclass(frozen=True, slots=True)
class Workload:
    """What the recipe asks of a rank."""

    tokens: int
    """Of a full micro-batch."""
    sequence: int
    """Longest sequence."""
    num_microbatches: int
    on_gpu: bool
    replays_routes: bool = False


def step_bytes(s: Sizes, work: Workload, stage: int, gradients: int) -> dict[str, int]:
    """`activations`, `logits`, `routing`, `communication` at their highest.

    Args:
        gradients: bytes of the rank's gradients.
    """
    s, parts = _with_work(s, work, gradients), FORMS["beside"]
    is_last = stage == s.trainer.pipeline_parallel_size - 1
    found = {name: _total(form, s.symbols) for name, form in parts.items()}
    found["logits"] *= is_last
    chunks = range(s.num_chunks)
    layers = [is_moe for chunk in chunks for is_moe in s.layers_of(stage, chunk)]
    kept = {is_moe: _kept(s, is_moe) for is_moe in set(layers)}
    own, one = product("own hidden element", s.symbols), max(kept.values(), default=0)
    count = in_flight(s, stage, work.num_microbatches)
    if s.trainer.recompute == "full":
        found["activations"] = int(count * len(layers) * own) + 2 * one
    else:
        found["activations"] = int(count * sum(kept[is_moe] for is_moe in layers)) + one // 2
    found["activations"] += int(2 * count * own) * s.symbols["pipelined"]
    # Adam's two float32 copies of the largest weight's share, when activations have gone
    shards = s.layout.data_parallel_size if s.trainer.distributed_optimizer else 1
    largest = max(w.numel for chunk in chunks for w in weights_of_chunk(s, stage, chunk))
    found["activations"] = max(found["activations"], 8 * largest // shards - found["logits"])
    return found


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a stage holds at one time; interleaved stages hold chunks,
    counted in whole stages."""
    later = s.trainer.pipeline_parallel_size - stage - 1
    if s.num_chunks == 1:
        return min(later + 1, num_microbatches)
    chunks = 2 * later + (s.num_chunks - 1) * s.trainer.pipeline_parallel_size + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def _with_work(s: Sizes, work: Workload, gradients: int) -> Sizes:
    t, element = s.trainer, s.symbols["element"]
    tp, top_k = t.tensor_parallel_size, s.symbols["top_k"]
    # torch's plain norm keeps float32 copies of its input and of what it normalised
    copies = element if work.on_gpu else 8
    dimensions = (tp, t.pipeline_parallel_size, t.expert_parallel_size,
                  s.layout.data_parallel_size)
    more = {
        "tokens": work.tokens, "sequence": work.sequence, "norm": copies + element,
        "own": work.tokens // (tp if s.layout.sequence_parallel else 1),
        "rows": work.tokens * top_k * s.layout.expert_tensor_parallel_size // tp,
        "chunk": min(t.logprob_chunk_tokens, work.tokens),
        "qk_copies": copies if s.symbols["head_norm"] else 0, "upcast": 4 - element,
        "plain": t.recompute == "none" and not work.on_gpu, "replayed": work.replays_routes,
        "pipelined": t.pipeline_parallel_size > 1, "dispatched": t.expert_parallel_size > 1,
        "nccl_dimensions": work.on_gpu * sum(size > 1 for size in dimensions),
        "gloo_copy": gradients * (t.distributed_optimizer and not work.on_gpu)}
    return replace(s, symbols={**s.symbols, **more})


def _kept(s: Sizes, is_moe: bool) -> int:
    """Bytes of one layer and micro-batch between forward and backward."""
    parts = ["latent" if s.symbols["latent"] else "grouped_query", "moe" if is_moe else "mlp"]
    everywhere = {form: count for form, count in FORMS["kept"].items() if isinstance(count, int)}
    return sum(_total(form, s.symbols)
               for form in (everywhere, *(FORMS["kept"][part] for part in parts)))


def _total(forms: Mapping[str, int], symbols: Mapping[str, int]) -> int:
    return sum(count * product(form, symbols) for form, count in forms.items())
