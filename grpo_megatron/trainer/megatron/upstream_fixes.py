"""Fixes of Megatron-Core's defects on every platform, one function each, with file and line.

`FIXES` says which release has which defect; lines are those of the first release named there.
`tests/trainer/megatron/test_upstream_fixes.py` fails for a fix that an upgrade made obsolete."""

import importlib.metadata
import queue
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from grpo_megatron.errors import SetupError

RELEASES = ("0.16.1", "0.19.2")
"""Of Megatron-Core. The first is the last one for Python 3.11, the second is for 3.12."""
_NO_PARAMETER = "no parameter"
"""Key of an optimizer state that belongs to none; torch keeps such entries as they are."""


@cache
def installed_release() -> str:
    """Return which of `RELEASES` is installed. Raises SetupError for another one."""
    found = importlib.metadata.version("megatron-core")
    if found not in RELEASES:
        raise SetupError(
            f"megatron-core {found} is installed; the fixes in {__name__} are for "
            f"{' and '.join(RELEASES)}",
            remedy="make setup",
        )
    return found


@cache
def install() -> None:
    """Apply every fix of the installed release, once. Refuses other releases of Megatron-Core."""
    release = installed_release()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron warns of absent CUDA packages at import
        for fix, releases in FIXES.items():
            if release in releases:
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


def offer_linear_to_mla() -> None:
    """multi_latent_attention.py:86 knows the class `Linear` with TE only; :538 then refuses it."""
    import megatron.core.transformer.multi_latent_attention as mla
    from megatron.core.post_training.modelopt.layers import Linear

    mla.Linear = Linear


def keep_query_projection_without_norm() -> None:
    """mla_qk_norm_config.py:142 puts a norm before the query projection of models that have none.

    DeepSeek-V2-Lite and Moonlight project queries at once, without a low rank whose norm it would
    be. Without Transformer Engine that one raises AttributeError."""
    from megatron.core.transformer.mla_qk_norm_config import QKNormConfigResolver

    choose = QKNormConfigResolver._mla_fused_linear_or_default

    def choose_as_specified(self: QKNormConfigResolver, specified: Any, name: str) -> Any:
        if name == "linear_q_proj":
            return specified
        return choose(self, specified, name)

    QKNormConfigResolver._mla_fused_linear_or_default = choose_as_specified


def reduce_contiguous_tensors() -> None:
    """mappings.py `_reduce` all-reduces a contiguous copy and returns the original."""
    import megatron.core.tensor_parallel.mappings as mappings

    original = mappings._reduce

    def reduce_contiguous(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        reduced: torch.Tensor = original(tensor.contiguous(), group)
        return reduced

    mappings._reduce = reduce_contiguous


def score_groups_as_deepseek() -> None:
    """moe_utils.py:553 scores a group of experts by its best `topk // group_topk` of them.

    DeepSeek-V3 (sigmoid) takes the best two, DeepSeek-V2 (softmax) the best, whatever top-k is."""
    from megatron.core.transformer.moe import moe_utils, router

    original = moe_utils.topk_routing_with_score_function

    def route(*args: Any, score_function: str = "softmax", **kwargs: Any) -> Any:
        num_best = 2
        if score_function == "softmax":
            num_best = 1

        def group_limited_topk(
            scores: torch.Tensor,  # [num_tokens, num_experts]
            topk: int,
            num_tokens: int,
            num_experts: int,
            num_groups: int,
            group_topk: int,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            groups = scores.view(num_tokens, num_groups, -1)
            best_scores, _ = groups.topk(min(num_best, groups.size(-1)), dim=-1)
            totals = best_scores.sum(-1)
            _, chosen_groups = totals.topk(group_topk, dim=-1)
            is_chosen = torch.zeros_like(totals, dtype=torch.bool)
            is_chosen.scatter_(1, chosen_groups, True)
            limited = groups.masked_fill(~is_chosen[..., None], -torch.inf)
            values, experts = limited.flatten(1).topk(topk, dim=-1)
            return values, experts

        moe_utils.group_limited_topk = group_limited_topk  # only `original` calls it
        return original(*args, score_function=score_function, **kwargs)

    router.topk_routing_with_score_function = route


def rotate_packed_sequences_at_once() -> None:
    """rope_utils.py:178 copies the lengths from the device and slices sequence by sequence.

    With hundreds of short sequences that is a tenth of a forward pass."""
    import megatron.core.models.common.embeddings.rope_utils as rope_utils

    from grpo_megatron.trainer.megatron.rope import rotate_packed
    from grpo_megatron.trainer.megatron.row_context import row_of

    original = rope_utils._apply_rotary_pos_emb_thd

    def apply(
        t: torch.Tensor, cu_seqlens: torch.Tensor, freqs: torch.Tensor, **settings: Any
    ) -> torch.Tensor:
        has_positions = row_of(cu_seqlens).positions is not None
        by_position = has_positions or freqs.size(0) != t.size(0) or len(cu_seqlens) == 2
        cp_group = settings["cp_group"]
        is_whole = cp_group is not None and cp_group.size() == 1
        knows_places = has_positions or (by_position and is_whole)
        if not knows_places or settings.get("rotary_interleaved"):
            rotated: torch.Tensor = original(t, cu_seqlens, freqs, **settings)
            return rotated
        # the second is what 0.19.2 calls the first
        is_latent = settings.get("multi_latent_attention", settings.get("mla_rotary_interleaved"))
        if is_latent:  # pairs of neighbours become two halves
            size = freqs.size(-1)
            t = torch.cat([t[..., :size:2], t[..., 1:size:2], t[..., size:]], -1)
        return rotate_packed(t, cu_seqlens, freqs, settings.get("mscale", 1.0))

    rope_utils._apply_rotary_pos_emb_thd = apply


def keep_rotary_tables_whole() -> None:
    """yarn_rotary_pos_embedding.py:188 makes tables for this context-parallel rank's part of one
    long sequence, which packed rows are not, and needs a GPU for it.

    Positions of packed tokens say where in the whole table their angles are."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding

    embedding = yarn_rotary_pos_embedding.YarnRotaryEmbedding
    make_tables = embedding._set_cos_sin_cache

    def make_whole_tables(
        self: Any, seq_len: int, offset: int, dtype: torch.dtype, packed_seq: bool = False
    ) -> None:
        make_tables(self, seq_len, offset, dtype, True)
        self.packed_seq_cached = packed_seq  # what it compares a later request with

    embedding._set_cos_sin_cache = make_whole_tables


def save_torch_adam_without_step() -> None:
    """DistributedOptimizer with torch AdamW (no Apex, no TE): three defects of one kind.

    distrib_optimizer.py:907 saves the per-parameter `step` as if it were sharded; :938 asks for
    it back (KeyError); :830 gives all parameters one shared `step` tensor after a load, so that
    it counts once per parameter and the second resumed step is wrong."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    get_states = DistributedOptimizer._get_main_param_and_optimizer_states
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    load_state_dict = DistributedOptimizer.load_state_dict

    def get_without_step(
        self: DistributedOptimizer, model_param: torch.nn.Parameter
    ) -> dict[str, torch.Tensor]:
        states: dict[str, torch.Tensor] = dict(get_states(self, model_param))
        states.pop("step", None)
        return states

    @torch.no_grad()
    def set_without_step(
        self: DistributedOptimizer,
        model_param: torch.nn.Parameter,
        tensors: Mapping[str, torch.Tensor],
    ) -> None:
        if self.config.optimizer_cpu_offload:
            set_states(self, model_param, tensors)
            return
        group_index, group_order = self.model_param_group_index_map[model_param]
        main = self.optimizer.param_groups[group_index]["params"][group_order]
        for name, target in {"param": main, **self.optimizer.state[main]}.items():
            if name != "step":
                target.copy_(tensors[name])

    def load_with_own_steps(self: DistributedOptimizer, state_dict: dict[str, Any]) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    DistributedOptimizer._get_main_param_and_optimizer_states = get_without_step
    DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    DistributedOptimizer.load_state_dict = load_with_own_steps


_OF_OFFLOADING = (
    "offload_fraction",
    "cpu_optimizer_cls",
    "gpu_optimizer_cls",
    "param_update_in_fp32",
    "pin_cpu_grads",
    "pin_cpu_params",
    "overlap_cpu_optimizer_d2h_h2d",
    "fused",
)
"""Settings of a HybridDeviceOptimizer that are in its parameter groups."""


def save_offloaded_adam_as_plain_data() -> None:
    """DistributedOptimizer around a HybridDeviceOptimizer saves how and by which classes it
    offloads, with each parameter group (hybrid_optimizer.py:57): a checkpoint that cannot be read
    without unpickling classes, nor by a run that offloads otherwise. They are left out, and those
    of the run itself stand when groups are loaded."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    state_dict = DistributedOptimizer.state_dict
    load_state_dict = DistributedOptimizer.load_state_dict

    def plain_state_dict(self: DistributedOptimizer) -> dict[str, Any]:
        state: dict[str, Any] = state_dict(self)
        if self.config.optimizer_cpu_offload:
            for group in state["optimizer"]["param_groups"]:
                for name in _OF_OFFLOADING:
                    group.pop(name, None)
        return state

    def load_beside_own_settings(self: DistributedOptimizer, state: dict[str, Any]) -> None:
        if self.config.optimizer_cpu_offload:
            for group in state["optimizer"]["param_groups"]:
                for name in _OF_OFFLOADING:
                    group[name] = self.optimizer.defaults[name]
        load_state_dict(self, state)

    DistributedOptimizer.state_dict = plain_state_dict
    DistributedOptimizer.load_state_dict = load_beside_own_settings


def make_output_layer_without_apex() -> None:
    """layers.py:1070 refuses fused gradient accumulation where Apex is absent.

    Transformer Engine's layers accumulate by themselves, but the output layer is Megatron's own:
    without Apex it accumulates as it does where the setting is off."""
    import copy

    from megatron.core.tensor_parallel import layers

    initialise = layers.ColumnParallelLinear.__init__

    def initialise_unfused(self: Any, *args: Any, config: Any, **settings: Any) -> None:
        if config.gradient_accumulation_fusion and not layers._grad_accum_fusion_available:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = False
        initialise(self, *args, config=config, **settings)

    layers.ColumnParallelLinear.__init__ = initialise_unfused


def save_without_helper_processes() -> None:
    """Checkpoints are written by the rank itself.

    filesystem_async.py:54 starts a manager process per rank that outlives a killed rank and keeps
    its 280 MB; :266 forks writers from a process full of threads and waits for ever for one that
    dies. Both serve asynchronous saves; a synchronous one only pays for them. 0.19.2 writes with
    threads instead, but raises AssertionError where the disk is full: only the log says why."""
    import megatron.core.dist_checkpointing.strategies.filesystem_async as filesystem

    writer = filesystem.FileSystemWriterAsync

    def write_buckets(
        transforms: Sequence[Callable[..., Any]],
        use_msc: bool,
        rank: int,
        buckets: Iterable[Any],
        results: queue.Queue[dict[int, Any] | Exception],
    ) -> None:
        outcome: dict[int, Any] = {}
        for index, bucket in enumerate(buckets):
            answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
            count: queue.Queue[int] = queue.Queue()
            count.put(index)
            writer.write_preloaded_data(transforms, index, bucket, answers, count, use_fsync=True)
            _, written = answers.get()
            if isinstance(written, Exception):
                results.put(written)
                return
            outcome[index] = written
        results.put(outcome)

    filesystem._results_queue = queue.Queue()
    for name in ("write_preloaded_data_multiproc", "write_preloaded_data_multithread"):
        if hasattr(writer, name):
            setattr(writer, name, staticmethod(write_buckets))


def mark_expert_parameters(model: torch.nn.Module) -> None:
    """Mark experts for DDP and the optimizer, which Megatron does only where EP > 1.

    With ETP != TP and EP = 1, their gradients are not reduced over expert data parallelism
    otherwise (layers.py, experts.py)."""
    parameter: Any
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.allreduce = False


def create_adam_state(optimizer: Any) -> None:
    """Give a Megatron optimizer that has not stepped yet the state of one that has.

    distrib_optimizer.py:642 asserts that there is one. Also where a rank has none of its parameters
    (a stage of dense layers has no experts): such a part counts the steps of the others. Call
    before saving, and before loading.

    torch's Adam counts steps of each parameter. Transformer Engine's counts those of a group, and
    refuses a state of another name than `exp_avg` and `exp_avg_sq`."""
    parts: list[torch.optim.Optimizer] = []  # inside of Megatron's
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is not None:
            parts.append(part.optimizer)
    steps = []
    without_parameters = []
    for inner in parts:
        if hasattr(inner, "sub_optimizers"):  # on the host
            from grpo_megatron.trainer.megatron import host_optimizer  # Megatron is there by now

            host_optimizer.create_state(inner)
            continue
        is_torch_adam = isinstance(inner, torch.optim.Adam)
        parameters = _parameters_of(inner)
        if is_torch_adam and not parameters:
            without_parameters.append(inner)
        for parameter in parameters:
            state = inner.state[parameter]
            if not state:
                if is_torch_adam:
                    state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            if is_torch_adam:
                steps.append(state["step"])
    for inner in without_parameters:
        state_of_none: Any = inner.state
        state_of_none[_NO_PARAMETER] = {"step": max(steps).clone()}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    parameters = []
    for group in optimizer.param_groups:
        parameters += group["params"]
    return parameters


FIXES: dict[Callable[[], None], tuple[str, ...]] = {
    define_missing_te_names: ("0.16.1",),
    report_te_absent_in_mla: ("0.16.1",),
    offer_linear_to_mla: ("0.19.2",),
    keep_query_projection_without_norm: ("0.19.2",),
    reduce_contiguous_tensors: ("0.16.1",),
    score_groups_as_deepseek: RELEASES,
    rotate_packed_sequences_at_once: RELEASES,
    keep_rotary_tables_whole: RELEASES,
    save_torch_adam_without_step: RELEASES,
    save_offloaded_adam_as_plain_data: RELEASES,
    make_output_layer_without_apex: RELEASES,
    save_without_helper_processes: RELEASES,
}
"""Fixes, in the order in which they are applied, and the releases whose defects they mend."""
