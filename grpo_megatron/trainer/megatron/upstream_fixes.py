"""Fixes of Megatron-Core 0.16.1 defects on every platform, one function each, with file and line.

`tests/trainer/megatron/test_upstream_fixes.py` fails for a fix that an upgrade made obsolete."""

import queue
import warnings
from functools import cache

import torch

from grpo_megatron.errors import SetupError

TESTED_VERSION = "0.16.1"
_NO_PARAMETER = "no parameter"
"""Key of an optimizer state that belongs to none; torch keeps such entries as they are."""


@cache
def install() -> None:
    """Apply every fix, once. Refuses other versions of Megatron-Core."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of absent CUDA packages at import
        import megatron.core

        if megatron.core.__version__ != TESTED_VERSION:
            raise SetupError(
                f"megatron-core {megatron.core.__version__} is installed; the fixes "
                f"in {__name__} are for {TESTED_VERSION}",
                remedy="make setup",
            )
        for fix in (
            define_missing_te_names,
            report_te_absent_in_mla,
            reduce_contiguous_tensors,
            score_groups_as_deepseek,
            rotate_packed_sequences_at_once,
            save_torch_adam_without_step,
            save_without_helper_processes,
        ):
            fix()


def define_missing_te_names() -> None:
    """moe_utils.py:39 lacks the `= None` fallback; :1192 raises NameError in every router."""
    import megatron.core.transformer.moe.moe_utils as moe_utils

    for name in (
        "te_general_gemm",
        "fused_topk_with_score_function",
        "fused_compute_score_for_moe_aux_loss",
        "fused_moe_aux_loss",
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    ):
        if not hasattr(moe_utils, name):
            setattr(moe_utils, name, None)


def report_te_absent_in_mla() -> None:
    """multi_latent_attention.py:55 sets HAVE_TE without TE; :185 then raises TypeError."""
    import megatron.core.transformer.multi_latent_attention as mla

    if not isinstance(mla.TELinear, type):  # a MagicMock, not a class
        mla.HAVE_TE = False


def reduce_contiguous_tensors() -> None:
    """mappings.py `_reduce` all-reduces a contiguous copy and returns the original."""
    import megatron.core.tensor_parallel.mappings as mappings

    original = mappings._reduce
    mappings._reduce = lambda tensor, group: original(tensor.contiguous(), group)


def score_groups_as_deepseek() -> None:
    """moe_utils.py:553 scores a group of experts by its best `topk // group_topk` of them.

    DeepSeek-V3 (sigmoid) takes the best two, DeepSeek-V2 (softmax) the best, whatever top-k is."""
    from megatron.core.transformer.moe import moe_utils, router

    original = moe_utils.topk_routing_with_score_function

    def route(*args, score_function="softmax", **kwargs):
        best = 1 if score_function == "softmax" else 2

        def group_limited_topk(scores, topk, num_tokens, num_experts, num_groups, group_topk):
            groups = scores.view(num_tokens, num_groups, -1)
            totals = groups.topk(min(best, groups.size(-1)), dim=-1)[0].sum(-1)
            chosen = torch.zeros_like(totals, dtype=torch.bool).scatter_(
                1, totals.topk(group_topk, dim=-1)[1], True
            )
            return groups.masked_fill(~chosen[..., None], -torch.inf).flatten(1).topk(topk, dim=-1)

        moe_utils.group_limited_topk = group_limited_topk  # only `original` calls it
        return original(*args, score_function=score_function, **kwargs)

    router.topk_routing_with_score_function = route


def rotate_packed_sequences_at_once() -> None:
    """rope_utils.py:178 copies the lengths from the device and slices sequence by sequence.

    With hundreds of short sequences that is a tenth of a forward pass."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    from grpo_megatron.trainer.megatron.rope import rotate_packed

    original = rope_utils._apply_rotary_pos_emb_thd

    def apply(
        t,
        cu_seqlens,
        freqs,
        rotary_interleaved=False,
        multi_latent_attention=False,
        mscale=1.0,
        cp_group=None,
    ):
        by_position = freqs.size(0) != t.size(0) or len(cu_seqlens) == 2
        if by_position and cp_group is not None and cp_group.size() == 1 and not rotary_interleaved:
            if multi_latent_attention:  # pairs of neighbours become two halves
                size = freqs.size(-1)
                t = torch.cat([t[..., :size:2], t[..., 1:size:2], t[..., size:]], -1)
            return rotate_packed(t, cu_seqlens, freqs, mscale)
        return original(
            t, cu_seqlens, freqs, rotary_interleaved, multi_latent_attention, mscale, cp_group
        )

    rope_utils._apply_rotary_pos_emb_thd = apply


def save_torch_adam_without_step() -> None:
    """DistributedOptimizer with torch AdamW (no Apex, no TE): three defects of one kind.

    distrib_optimizer.py:907 saves the per-parameter `step` as if it were sharded; :938 asks for
    it back (KeyError); :830 gives all parameters one shared `step` tensor after a load, so that
    it counts once per parameter and the second resumed step is wrong."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get_states = DistributedOptimizer._get_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def get_without_step(self, model_param):
        states = get_states(self, model_param)
        return {name: state for name, state in states.items() if name != "step"}

    @torch.no_grad()
    def set_without_step(self, model_param, tensors):
        group_index, group_order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group_index]["params"][group_order]
        for name, target in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def load_with_own_steps(self, state_dict):
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer._get_main_param_and_optimizer_states = get_without_step
    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    DistributedOptimizer.load_state_dict = load_with_own_steps


def save_without_helper_processes() -> None:
    """Checkpoints are written by the rank itself.

    filesystem_async.py:54 starts a manager process per rank that outlives a killed rank and keeps
    its 280 MB; :266 forks writers from a process full of threads and waits for ever for one that
    dies. Both serve asynchronous saves; a synchronous one only pays for them."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem

    writer = filesystem.FileSystemWriterAsync

    def write_buckets(transforms, use_msc, rank, buckets, results):
        outcome = {}
        for index, bucket in enumerate(buckets):
            mine = queue.SimpleQueue()
            count = queue.Queue()
            count.put(index)
            writer.write_preloaded_data(transforms, index, bucket, mine, count, use_fsync=True)
            _, written = mine.get()
            if isinstance(written, Exception):
                outcome = written
                break
            outcome[index] = written
        results.put(outcome)

    filesystem._results_queue = queue.Queue()
    writer.write_preloaded_data_multiproc = staticmethod(write_buckets)


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """With ETP != TP and EP = 1, expert gradients are not reduced over expert data parallelism:
    what marks them for DDP and the optimizer is set only where EP > 1 (layers.py, experts.py)."""
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def create_adam_state(optimizer) -> None:
    """distrib_optimizer.py:642 asserts on the state of an optimizer that has not stepped yet.

    Also where a rank has none of its parameters (a stage of dense layers has no experts): such a
    part counts the steps of the others. Call before saving, and before loading."""
    parts = [
        part.optimizer
        for part in getattr(optimizer, "chained_optimizers", [optimizer])
        if part.optimizer is not None
    ]
    for inner in parts:
        for parameter in (p for group in inner.param_groups for p in group["params"]):
            if not inner.state[parameter]:
                inner.state[parameter] |= {
                    "step": torch.tensor(0.0),
                    **{name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")},
                }
    steps = [
        state["step"]
        for inner in parts
        for key, state in inner.state.items()
        if key != _NO_PARAMETER
    ]
    for inner in parts:
        if not any(group["params"] for group in inner.param_groups):
            inner.state[_NO_PARAMETER] = {"step": max(steps).clone()}
