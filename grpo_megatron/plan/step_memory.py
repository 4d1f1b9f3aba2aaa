"""Bytes that a rank holds in a training step beside what it holds from start to end.

A step is highest at one of a few moments: while a layer is computed or differentiated, while the
loss is, while the embedding is, while Adam updates. `closed_forms.toml` says what lives then."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.plan.rank_bytes import shard_counts
from grpo_megatron.plan.weights import (
    FORMS,
    Sizes,
    Weight,
    adapters_of_part,
    product,
    weights_of_chunk,
)


def step_bytes(
    s: Sizes,
    stage: int,
    *,
    tokens: int,
    num_microbatches: int,
    on_gpu: bool,
    replayed: bool,
    trains: bool = True,
    patches: int = 0,
) -> dict[str, int]:
    """Return bytes of a rank at its highest moment, for `tokens` of a full micro-batch and the
    `patches` of its images. Where nothing is trained no layer keeps anything, and one that is
    computed needs no more than in training.

    `activations` wait for the backward, `layer`, `logits`, `embedding`, `adam` and, of a model that
    sees, `tower` are what is computed in that moment, `routing` and `communication` hold ids and
    gathered tensors, `libraries` is beside tensors."""
    t = s.trainer
    chunks = []  # what is trained of each
    for chunk in range(s.num_chunks):
        weights = weights_of_chunk(s, stage, chunk)
        chunks.append([weight for weight in weights if weight.is_trained])
    trains_tower = trains and s.trainer.vision_tower == "trained"
    symbols = {
        **s.symbols,
        **_step_symbols(s, stage, tokens, on_gpu=on_gpu),
        "replayed": replayed,
        "patches": patches,
        "trains": trains_tower,
    }
    if trains and t.distributed_optimizer and not on_gpu:
        symbols["gloo_copy"] = 4 * _largest_buffer(chunks)
    s = replace(s, symbols=symbols)

    held, working = _held_and_working(s, stage, trains=trains)
    waiting = 0.0
    if trains:
        waiting = in_flight(s, stage, num_microbatches)
    logits = 0
    if stage == t.pipeline_parallel_size - 1 and not s.has_reward_head:
        logits = _highest(FORMS["logits"], s)
    embedding = 0
    tower = 0
    if stage == 0:
        embedding = _total(FORMS["embedding"], s)
        if s.tower:
            kept_of_tower = 0
            if trains_tower:
                kept_of_tower = _kept_of_tower(s)
            held += kept_of_tower
            tower = kept_of_tower + _working_of_tower(s, trains=trains_tower)
    adam = 0
    if trains:
        adam = _adam(s, chunks, on_gpu=on_gpu)
    moments = {
        "layer": (waiting, working),
        "logits": (waiting, logits),
        "embedding": (waiting - 1, embedding),
        "adam": (0, adam),
    }
    if s.tower:
        moments["tower"] = (waiting - 1, tower)
    parts = _highest_moment(moments, held)
    for name, forms in FORMS["beside"].items():
        parts[name] = _total(forms, s)
    return parts


def _highest_moment(moments: Mapping[str, tuple[float, int]], held: int) -> dict[str, int]:
    """Return `activations` and the bytes of each moment where a step is highest: 0 for all moments
    but that one.

    moments: micro-batches that wait for their backward, and bytes of the moment itself; held: bytes
    of a micro-batch that waits."""
    highest = -1
    found: dict[str, int] = {}
    for name, (num_waiting, of_moment) in moments.items():
        activations = int(max(num_waiting, 0) * held)
        if activations + of_moment > highest:
            highest = activations + of_moment
            found = {"activations": activations, name: of_moment}
    return {**dict.fromkeys(("activations", *moments), 0), **found}


def _held_and_working(s: Sizes, stage: int, *, trains: bool) -> tuple[int, int]:
    """Return the bytes that a stage holds of a micro-batch until its backward, and those that its
    largest layer takes while it is computed or differentiated."""
    boundary = _total(FORMS["boundary"], s)
    layers = s.layers_of_stage(stage)
    held = boundary * s.num_chunks
    left_over = 0
    computes_whole_layers = s.trainer.recompute == "full" or not trains
    if computes_whole_layers:
        held += boundary * len(layers)
        if trains:
            left_over = boundary * sum(layers)  # input gradients, which dispatchers of experts keep
    else:
        held += sum(_kept(s, is_moe) for is_moe in layers)
    working = max(_working(s, is_moe, with_kept=computes_whole_layers) for is_moe in set(layers))
    return held, left_over + working


def _step_symbols(s: Sizes, stage: int, tokens: int, *, on_gpu: bool) -> dict[str, Any]:
    """Return what the closed forms of a step say beside the model's sizes.

    tokens: of a row, over all context-parallel ranks."""
    t = s.trainer
    tp = t.tensor_parallel_size
    row_tokens = tokens
    tokens = -(-row_tokens // t.context_parallel_size)
    own = tokens
    gathered = 0
    scattered = 0
    if t.sp and tp > 1:  # sequence parallelism
        own = -(-tokens // tp)
        gathered = tokens
        scattered = own
    nccl_dimensions = 0
    if on_gpu:
        sizes = (tp, t.pipeline_parallel_size, t.context_parallel_size, t.dp)
        nccl_dimensions = sum(size > 1 for size in (*sizes, t.expert_parallel_size))
    return {
        "tokens": tokens,
        "own": own,
        "gathered": gathered,
        "scattered": scattered,
        **_path_symbols(s, row_tokens, tokens, on_gpu=on_gpu),
        **_norm_symbols(s, on_gpu=on_gpu),
        **_input_symbols(s),
        **_expert_symbols(s, own),
        "later": stage > 0,
        "chunk": min(t.logprob_chunk_tokens, tokens),
        "keeps_logits": t.keep_logits,
        "separate": not on_gpu,
        "half": s.symbols["element"] < 4,
        "again": t.recompute == "full",
        "nccl_dimensions": nccl_dimensions,
        "gloo_copy": 0,
    }


def _path_symbols(s: Sizes, row_tokens: int, tokens: int, *, on_gpu: bool) -> dict[str, int]:
    """Return the tokens whose keys and values a context-parallel rank gathers from the others."""
    path_keys = 0
    split = 0
    if s.trainer.context_parallel_size > 1:
        split = tokens
        path_keys = row_tokens
        if on_gpu:  # copies of two pieces' paths
            path_keys += row_tokens // (2 * s.trainer.context_parallel_size)
    kept_path_keys = path_keys
    kept_split = split
    regathered = 0
    if s.trainer.recompute == "selective":  # gathers keys and values again
        kept_path_keys = 0
        kept_split = 0
        regathered = path_keys
    return {
        "path_keys": path_keys,
        "split": split,
        "kept_path_keys": kept_path_keys,
        "kept_split": kept_split,
        "regathered": regathered,
    }


def _norm_symbols(s: Sizes, *, on_gpu: bool) -> dict[str, Any]:
    """Return the bytes per element of what norms keep."""
    element = s.symbols["element"]
    plain_norm = 8  # torch's plain norms keep float32, twice where their weight has a gradient
    if s.lora is not None:
        plain_norm = 4
    norm_copy = plain_norm
    if on_gpu:
        norm_copy = element
    has_head_norm = bool(s.symbols.get("head_norm"))
    qk_copies = 0
    query_copy = 0
    if has_head_norm and on_gpu:
        query_copy = element
    elif has_head_norm:
        qk_copies = plain_norm
    return {
        "plain": not has_head_norm,
        "norm_copy": norm_copy,
        "qk_copies": qk_copies,
        "query_copy": query_copy,
    }


_INPUTS = {
    "qkv_input": (
        "self_attention.linear_qkv",
        "self_attention.linear_q_proj",
        "self_attention.linear_q_down_proj",
        "self_attention.linear_kv_down_proj",
    ),
    "q_up_input": ("self_attention.linear_q_up_proj",),
    "kv_up_input": ("self_attention.linear_kv_up_proj",),
    "fc1_input": ("mlp.linear_fc1",),
    "fc2_input": ("mlp.linear_fc2",),
    "expert_fc1_input": ("mlp.experts.local_experts.{expert}.linear_fc1",),
    "expert_fc2_input": ("mlp.experts.local_experts.{expert}.linear_fc2",),
    "shared_fc2_input": ("mlp.shared_experts.linear_fc2",),
}
"""Which linear layers, by Megatron's names, have an input that the closed forms name."""


def _input_symbols(s: Sizes) -> dict[str, int]:
    """Return whether the inputs of linear layers wait for the backward: for the gradient of the
    weight, or, where it is frozen, of an adapter beside it."""
    layers = set()
    for part in (s.attention, "mlp", "expert", "shared"):
        for adapter in adapters_of_part(s, part):
            layers.add(adapter.layer)
    known = {}
    for symbol, readers in _INPUTS.items():
        is_adapted = not layers.isdisjoint(readers)
        known[symbol] = int(s.lora is None or is_adapted)
    known["unkept_product"] = 1 - known["fc2_input"]
    return known


def _expert_symbols(s: Sizes, own: int) -> dict[str, Any]:
    """Return what experts see. own: tokens of a rank."""
    t = s.trainer
    top_k = s.symbols["top_k"] or 0
    rows = own * top_k * t.etp
    num_experts = (s.symbols["experts"] or 0) // t.expert_parallel_size
    etp_copy = 0
    if t.etp > 1 and s.symbols["element"] < 4:
        etp_copy = 4
    return {
        "permuted": own * top_k,
        "rows": rows,
        "expert_rows": rows // max(num_experts, 1),
        "several": num_experts > 1,
        "tensor_experts": t.etp > 1,
        "shared_experts": bool(s.symbols["shared"]),
        "etp_copy": etp_copy,
    }


def _largest_buffer(chunks: Sequence[Sequence[Weight]]) -> int:
    """Elements; each model chunk has one buffer for experts and one for the rest."""
    sizes = []
    for weights in chunks:
        experts = sum(weight.numel for weight in weights if weight.kind == "expert")
        others = sum(weight.numel for weight in weights if weight.kind != "expert")
        sizes += [experts, others]
    return max(sizes)


def in_flight(s: Sizes, stage: int, num_microbatches: int) -> float:
    """Return micro-batches whose activations a stage holds at one time; its chunks are parts of
    one."""
    later = s.trainer.pipeline_parallel_size - stage - 1
    if s.num_chunks == 1:
        return min(later + 1, num_microbatches)
    chunks = 2 * later + (s.num_chunks - 1) * s.trainer.pipeline_parallel_size + 1
    return min(chunks, num_microbatches * s.num_chunks) / s.num_chunks


def _kept(s: Sizes, is_moe: bool) -> int:
    """Return bytes of one layer and micro-batch between forward and backward."""
    parts = ("norms", s.attention, _mlp(is_moe), f"{_mlp(is_moe)}_input")
    of_layers = sum(_total(FORMS["kept"][part], s) for part in parts)
    return of_layers + _kept_of_adapters(s, is_moe)


def _kept_of_adapters(s: Sizes, is_moe: bool) -> int:
    """Return bytes of what lies between A and B of a layer's adapters, and with DoRA of the outputs
    before they are multiplied; the adapters' inputs are those of the layer, which keeps nothing
    else where its weights are frozen."""
    rows_of = {s.attention: "tokens", "mlp": "tokens"}
    if is_moe:
        rows_of = {s.attention: "tokens", "expert": "rows", "shared": "tokens"}
    total = 0
    for part, rows in rows_of.items():
        for adapter in adapters_of_part(s, part):
            outputs = rows
            if rows == "tokens" and adapter.split == "columns":
                outputs = "own"  # the layer's outputs are reduced to sequence parts
            kept = s.symbols[rows] * adapter.rank + s.symbols[outputs] * adapter.num_magnitudes
            total += kept * s.symbols["element"]
    return total


def kept_bytes(s: Sizes, tokens: int, *, is_moe: bool) -> int:
    """Return bytes that a layer on a GPU keeps of a micro-batch between forward and backward."""
    known = {**s.symbols, **_step_symbols(s, 0, tokens, on_gpu=True)}
    return _kept(replace(s, symbols=known), is_moe)


def _working(s: Sizes, is_moe: bool, *, with_kept: bool) -> int:
    """Return bytes that a layer takes while it is computed or differentiated, beside what waits.

    with_kept: what it keeps for its own backward is not among that."""
    highest = _highest(FORMS["working"][_mlp(is_moe)], s)
    if s.trainer.context_parallel_size > 1:
        highest = max(highest, _working_of_attention(s, is_moe))
    if with_kept:
        highest += _kept(s, is_moe)
    return highest


def _working_of_attention(s: Sizes, is_moe: bool) -> int:
    """Return bytes that attention takes while it is differentiated, beside what the layer keeps.
    The MLP, which comes after attention, has been differentiated by then."""
    found = _total(FORMS["working"]["attention"][s.attention], s)
    return found - _total(FORMS["kept"][_mlp(is_moe)], s)


def tower_block_bytes(s: Sizes) -> int:
    """Return the bytes that a block of a vision tower keeps of so many `patches` of `s`."""
    return _total(FORMS["tower"][s.tower]["kept"]["block"], s)


def _kept_of_tower(s: Sizes) -> int:
    """Bytes that a trained tower keeps of a micro-batch until its backward."""
    forms = FORMS["tower"][s.tower]["kept"]
    of_block = tower_block_bytes(s)
    if s.trainer.recompute == "full":
        of_block = _total(forms["input"], s)
    num_blocks: int = s.symbols["tower_blocks"]
    return num_blocks * of_block + _total(forms["ends"], s)


def _working_of_tower(s: Sizes, *, trains: bool) -> int:
    """Bytes that a tower takes while it is computed or differentiated, beside what waits."""
    forms = FORMS["tower"][s.tower]
    highest = _highest(forms["working"], s)
    if trains and s.trainer.recompute == "full":
        highest += tower_block_bytes(s)
    return highest


def _mlp(is_moe: bool) -> str:
    """Return the name of an MLP in the closed forms."""
    if is_moe:
        return "moe"
    return "mlp"


def _adam(s: Sizes, chunks: Sequence[Sequence[Weight]], *, on_gpu: bool) -> int:
    """Return bytes of torch's Adam: two copies of the largest weight's share, and one of that
    before.

    Fused ones of GPUs take none."""
    if on_gpu:
        return 0
    highest = 0
    for weights in chunks:
        before = 0
        for weight in weights:
            highest = max(highest, before + 2 * weight.numel)
            before = weight.numel
    if s.trainer.distributed_optimizer:
        shards, _ = shard_counts(s.trainer)
        highest //= shards
    return 4 * highest


def _highest(moments: Mapping[str, Mapping[str, int]], s: Sizes) -> int:
    """Return bytes of the highest of several moments."""
    return max(_total(forms, s) for forms in moments.values())


def _total(forms: Mapping[str, int], s: Sizes) -> int:
    return sum(count * product(form, s.symbols) for form, count in forms.items())
