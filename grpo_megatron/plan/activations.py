"""What a training step holds beside the static bytes: the closed forms of `closed_forms.toml`."""

from collections.abc import Mapping
from dataclasses import replace

from grpo_megatron.plan.weights import FORMS, Sizes, product, weights_of_chunk


def step_bytes(s: Sizes, stage: int, gradients: int, *, tokens: int, sequence: int,
               num_microbatches: int, on_gpu: bool, replayed: bool) -> dict[str, int]:
    """`activations`, `logits`, `routing`, `communication` of a rank at their highest, in bytes like
    its `gradients`; for `tokens` of a full micro-batch and of the longest `sequence`."""
    t, element = s.trainer, s.symbols["element"]
    tp, pp, dp = (t.tensor_parallel_size, t.pipeline_parallel_size, s.layout.data_parallel_size)
    copies = element if on_gpu else 8  # torch's plain norms keep float32
    own = tokens // (tp if s.layout.sequence_parallel else 1)
    s = replace(s, symbols={
        **s.symbols, "tokens": tokens, "own": own, "sequence": sequence,
        "norm": copies + element, "qk_copies": copies * bool(s.symbols.get("head_norm")),
        "rows": tokens * s.symbols["top_k"] * s.layout.expert_tensor_parallel_size // tp,
        "chunk": min(t.logprob_chunk_tokens, tokens), "upcast": 4 - element,
        "plain": t.recompute == "none" and not on_gpu, "replayed": replayed,
        "is_last": stage == pp - 1, "pipelined": pp > 1, "dispatched": t.expert_parallel_size > 1,
        "nccl_dimensions": on_gpu * sum(size > 1 for size in (
            tp, pp, dp, t.expert_parallel_size)),
        "gloo_copy": gradients * (t.distributed_optimizer and not on_gpu)})
    found = {name: _total(forms, s) for name, forms in FORMS["beside"].items()}
    boundary, layers = own * s.symbols["hidden"] * element, [
        _kept(s, is_moe) for chunk in range(s.num_chunks) for is_moe in s.layers_of(stage, chunk)]
    held, one = ([boundary] * len(layers), 2 * max(layers)) if t.recompute == "full" else (
        layers, max(layers) // 2)
    held = sum(held) + 2 * boundary * (pp > 1)
    activations = int(in_flight(s, stage, num_microbatches) * held) + one
    # Adam's two float32 copies of the largest weight's share, when activations have gone
    largest = max(w.numel for c in range(s.num_chunks) for w in weights_of_chunk(s, stage, c))
    adam = 8 * largest // (dp if t.distributed_optimizer else 1)
    return {**found, "activations": max(activations, adam - found["logits"])}


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Micro-batches whose activations a stage holds at one time; interleaved stages hold chunks,
    counted in whole stages."""
    later = s.trainer.pipeline_parallel_size - stage - 1
    if s.num_chunks == 1:
        return min(later + 1, num_microbatches)
    chunks = 2 * later + (s.num_chunks - 1) * s.trainer.pipeline_parallel_size + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def _kept(s: Sizes, is_moe: bool) -> int:
    """Bytes of one layer and micro-batch between forward and backward."""
    attention = "latent" if "latent" in s.symbols else "grouped_query"
    return sum(_total(FORMS["kept"][part], s)
               for part in ("norms", attention, "moe" if is_moe else "mlp"))


def _total(forms: Mapping[str, int], s: Sizes) -> int:
    return sum(count * product(form, s.symbols) for form, count in forms.items())
