"""Cases for a worker whose Megatron-Core is as released: each shows a defect, then fixes it.

Every case answers (what happens without the fix, what happens with it). Cases share a process,
so each applies only its own fix.
"""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from grpo_megatron.trainer.megatron import cpu_platform, upstream_fixes

cpu_platform.install()
assert not upstream_fixes.install.cache_info().currsize, "this process has the fixes already"
upstream_fixes.install = lambda: None  # what is imported below must not install them

import megatron.core.dist_checkpointing as dist_checkpointing  # noqa: E402
import megatron.core.tensor_parallel.mappings as mappings  # noqa: E402
import megatron.core.transformer.moe.moe_utils as moe_utils  # noqa: E402
import megatron.core.transformer.multi_latent_attention as mla  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.tensor_parallel.layers import ColumnParallelLinear  # noqa: E402

from grpo_megatron.config.trainer import OptimizerConfig, TrainerConfig  # noqa: E402
from grpo_megatron.trainer.megatron.model_config import transformer_config  # noqa: E402
from grpo_megatron.trainer.megatron.policy import build_models, build_policy  # noqa: E402
from grpo_megatron.trainer.megatron.process_groups import (  # noqa: E402
    RankInfo,
    initialize,
    seed_everything,
)
from tests.trainer.worker_group import fresh_store  # noqa: E402

LAYOUT = TrainerConfig(precision="float32", num_threads=1)


def _outcome(function, *arguments):
    """What it returns, or the name of what it raises."""
    try:
        return function(*arguments)
    except Exception as error:
        return type(error).__name__


def router_without_te():
    def route():
        hidden, weight = torch.ones(3, 4), torch.ones(2, 4)
        return moe_utils.router_gating_linear(hidden, weight, None, torch.float32).tolist()

    before = _outcome(route)
    upstream_fixes.define_missing_te_names()
    return before, _outcome(route)


def mla_without_te():
    before = mla.HAVE_TE
    upstream_fixes.report_te_absent_in_mla()
    return before, mla.HAVE_TE


def latent_attention(model: str):
    """Whether Megatron builds latent attention whose down-projections are whole on every rank."""
    initialize(LAYOUT, RankInfo.from_environment(), fresh_store())
    seed_everything(1)
    hf = json.loads((Path(model) / "config.json").read_text())
    upstream_fixes.report_te_absent_in_mla()

    def build():
        return len(build_models(transformer_config(hf, LAYOUT), hf, LAYOUT))

    before = _outcome(build)
    upstream_fixes.offer_linear_to_mla()
    return before, _outcome(build)


def query_projection(model: str):
    """What projects queries where latent attention has no low rank for them."""
    initialize(LAYOUT, RankInfo.from_environment(), fresh_store())
    seed_everything(1)
    hf = json.loads((Path(model) / "config.json").read_text())
    upstream_fixes.report_te_absent_in_mla()
    upstream_fixes.offer_linear_to_mla()

    def build():
        [chunk] = build_models(transformer_config(hf, LAYOUT), hf, LAYOUT)
        return type(chunk.decoder.layers[0].self_attention.linear_q_proj).__name__

    before = _outcome(build)
    fix = upstream_fixes.keep_query_projection_without_norm
    if upstream_fixes.installed_release() in upstream_fixes.FIXES[fix]:
        fix()
    return before, _outcome(build)


def output_layer_with_fused_accumulation(model: str):
    """Whether Megatron's own output layer is made where others accumulate gradients by themselves.

    Afterwards, whether it accumulates separately, and the others' setting is as it was."""
    initialize(LAYOUT, RankInfo.from_environment(), fresh_store())
    seed_everything(1)
    hf = json.loads((Path(model) / "config.json").read_text())
    config = transformer_config(hf, LAYOUT)
    config.gradient_accumulation_fusion = True

    def build():
        layer = ColumnParallelLinear(
            8, 16, config=config, init_method=torch.nn.init.zeros_, bias=False
        )
        return layer.gradient_accumulation_fusion, config.gradient_accumulation_fusion

    before = _outcome(build)
    upstream_fixes.make_output_layer_without_apex()
    return before, _outcome(build)


def slices_of_packed_rotation():
    """How many sequences are sliced one by one, and the rotated tensor."""
    from megatron.core.models.common.embeddings import rope_utils

    generator = torch.Generator().manual_seed(0)
    tensor = torch.randn(9, 2, 8, generator=generator)
    angles = torch.randn(5, 1, 1, 4, generator=generator).repeat(1, 1, 1, 2)  # as RoPE makes them
    cumulative = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
    group = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    slicing = rope_utils._get_thd_freqs_on_this_cp_rank

    def rotate():
        with patch.object(rope_utils, slicing.__name__, wraps=slicing) as counted:
            rotated = rope_utils._apply_rotary_pos_emb_thd(
                tensor, cumulative, angles, cp_group=group
            )
        return counted.call_count, rotated.numpy()

    before = rotate()
    upstream_fixes.rotate_packed_sequences_at_once()
    return before, rotate()


def rotary_tables_of_a_context_rank():
    """Positions of the table that one of two context-parallel ranks makes for 16."""
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    group = SimpleNamespace(size=lambda: 2, rank=lambda: 1)

    def length():
        YarnRotaryEmbedding.forward.cache_clear()
        embedding = YarnRotaryEmbedding(
            8, original_max_position_embeddings=16, use_cpu_initialization=True, cp_group=group
        )
        return len(embedding.cos_cached)

    before = _outcome(length)
    upstream_fixes.keep_rotary_tables_whole()
    return before, _outcome(length)


def reduce_of_a_transposed_tensor():
    """With a group of two in which the other rank holds the same."""
    group = SimpleNamespace(size=lambda: 2)

    def reduce():
        with patch("torch.distributed.all_reduce", lambda tensor, group: tensor.mul_(2)):
            return mappings._reduce(torch.ones(2, 3).t(), group).tolist()

    before = reduce()
    upstream_fixes.reduce_contiguous_tensors()
    return before, reduce()


def groups_of_experts():
    """Experts chosen for one token: top 3 of 6 in three groups, of which two may be used."""
    import megatron.core.transformer.moe.router as router

    def chosen(scores: list[float], **settings):
        return (
            router.topk_routing_with_score_function(
                torch.tensor([scores]), 3, num_groups=3, group_topk=2, **settings
            )[1][0]
            .nonzero()[:, 0]
            .tolist()
        )

    def both():
        # the sums of the best two rank the groups 1, 2, 0, the best ones 0, 1, 2
        scores = [3.0, -9.0, 2.0, 1.9, 1.95, 1.8]
        return (
            chosen(scores, score_function="sigmoid"),
            chosen(scores, score_function="softmax", use_pre_softmax=True),
        )

    before = both()
    upstream_fixes.score_groups_as_deepseek()
    return before, both()


def _build(model: str):
    initialize(LAYOUT, RankInfo.from_environment(), fresh_store())
    seed_everything(1)
    hf = json.loads((Path(model) / "config.json").read_text())
    return hf, build_policy(hf, LAYOUT, OptimizerConfig(lr=1e-3))


def _distributed_optimizer(policy):
    found = getattr(policy.optimizer, "chained_optimizers", [policy.optimizer])
    assert len(found) == 1
    return found[0]


def _step(policy) -> None:
    for chunk in policy.chunks:
        for parameter in chunk.parameters():
            parameter.main_grad.fill_(1.0)
    policy.optimizer.step()


def state_of_an_unstepped_optimizer(model: str):
    _, policy = _build(model)
    optimizer = _distributed_optimizer(policy)

    def steps():
        return optimizer.state_dict()["optimizer"]["param_groups"][0]["step"]

    before = _outcome(steps)
    upstream_fixes.create_adam_state(policy.optimizer)
    return before, _outcome(steps)


def torch_adam_state(model: str):
    """Names of saved states; loading them without `step`; step counts after a load."""
    _, policy = _build(model)
    optimizer = _distributed_optimizer(policy)
    _step(policy)
    parameter = next(iter(optimizer.model_param_group_index_map))

    def observe():
        names = sorted(optimizer._get_main_param_and_optimizer_states(parameter))
        without_step = {
            name: torch.zeros_like(parameter).flatten() for name in names if name != "step"
        }
        with torch.no_grad():
            loading = _outcome(
                optimizer._set_main_param_and_optimizer_states, parameter, without_step
            )
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.optimizer.step()
        counts = {float(state["step"]) for state in optimizer.optimizer.state.values()}
        return names, loading, counts

    before = observe()
    for state in optimizer.optimizer.state.values():
        state["step"] = torch.tensor(1.0)
    upstream_fixes.save_torch_adam_without_step()
    return before, observe()


def expert_parameters(model: str):
    """The marks that DDP and the optimizer see, with EP = 1."""
    initialize(LAYOUT, RankInfo.from_environment(), fresh_store())
    seed_everything(1)
    hf = json.loads((Path(model) / "config.json").read_text())
    with patch("grpo_megatron.trainer.megatron.policy.mark_expert_parameters"):
        [chunk] = build_models(transformer_config(hf, LAYOUT), hf, LAYOUT)

    def marks():
        return {
            ".experts." in name: getattr(parameter, "allreduce", True)
            for name, parameter in chunk.named_parameters()
        }

    before = marks()
    upstream_fixes.mark_expert_parameters(chunk)
    return before, marks()


def processes_of_a_save(model: str, directory: str):
    """Processes that are left after a checkpoint was saved, and what it holds."""
    _build(model)

    def save():
        state = {"weight": ShardedTensor.from_rank_offsets("weight", torch.arange(12.0))}
        path = Path(directory) / str(len(list(Path(directory).iterdir())))
        path.mkdir()
        dist_checkpointing.save(state, str(path))
        wanted = {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(12))}
        loaded = dist_checkpointing.load(wanted, str(path))
        left = multiprocessing.active_children()
        for process in left:
            process.terminate()
        return len(left), loaded["weight"].tolist()

    before = save()
    upstream_fixes.save_without_helper_processes()
    return before, save()
