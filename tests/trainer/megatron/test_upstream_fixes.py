"""Each fix of Megatron-Core: the defect is there without it, and gone with it.

A test that fails on its `before` means that the table `FIXES` is wrong about the installed
release: it has the defect, or has it no longer.
"""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from grpo_megatron.trainer.megatron import upstream_fixes as fixes
from tests.trainer.families import MODELS
from tests.trainer.models import write_model
from tests.trainer.worker_group import WorkerGroup

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "latent", MODELS["deepseek_v3"], 4)


@pytest.fixture(scope="module")
def unfixed():
    group = WorkerGroup(1, isolated=True)

    def run(case: str, **arguments):
        return group.run(f"tests.trainer.unfixed:{case}", **arguments)

    yield run
    group.close()


def is_defective(fix) -> bool:
    """Whether the installed release needs the fix."""
    return fixes.installed_release() in fixes.FIXES[fix]


def test_router_without_transformer_engine(unfixed):
    before, after = unfixed("router_without_te")
    assert (before == "NameError") == is_defective(fixes.define_missing_te_names)
    assert after == [[4.0, 4.0]] * 3


def test_latent_attention_knows_that_transformer_engine_is_absent(unfixed):
    before, after = unfixed("mla_without_te")
    assert before == is_defective(fixes.report_te_absent_in_mla)
    assert not after


def test_latent_attention_takes_the_layer_that_does_not_split(unfixed, latent_model):
    before, after = unfixed("latent_attention", model=latent_model)
    assert (before == "ValueError") == is_defective(fixes.offer_linear_to_mla)
    assert after == 1


def test_query_projections_without_a_norm_stay_without(unfixed, tmp_path):
    model = write_model(tmp_path / "lite", MODELS["deepseek_v2_lite"], 5)
    before, after = unfixed("query_projection", model=model)
    assert (before == "AttributeError") == is_defective(fixes.keep_query_projection_without_norm)
    assert after == "ColumnParallelLinear"


def test_tensors_that_are_not_contiguous_are_reduced(unfixed):
    before, after = unfixed("reduce_of_a_transposed_tensor")
    assert (before == [[1.0, 1.0]] * 3) == is_defective(fixes.reduce_contiguous_tensors)
    assert after == [[2.0, 2.0]] * 3


def test_groups_of_experts_are_scored_as_deepseek_does(unfixed):
    before, after = unfixed("groups_of_experts")
    assert before == ([0, 2, 3], [0, 2, 3])  # the best 3 // 2 = 1 of every group
    assert after == ([2, 3, 4], [0, 2, 3])


def test_state_of_an_optimizer_that_never_stepped(unfixed, dense_model):
    before, after = unfixed("state_of_an_unstepped_optimizer", model=dense_model)
    assert before == "AssertionError"
    assert after == 0.0


def test_adam_state_without_a_shared_step(unfixed, dense_model):
    before, after = unfixed("torch_adam_state", model=dense_model)
    names, loading, counts = before
    assert "step" in names
    assert loading == "KeyError"
    assert max(counts) > 2  # counted once a parameter
    assert after == (["exp_avg", "exp_avg_sq", "param"], None, {2.0})


def test_expert_parameters_are_marked(unfixed, moe_model):
    before, after = unfixed("expert_parameters", model=moe_model)
    assert before == {True: True, False: True}
    assert after == {True: False, False: True}


def test_a_save_leaves_no_process_behind(unfixed, dense_model, tmp_path):
    before, after = unfixed("processes_of_a_save", model=dense_model, directory=str(tmp_path))
    weight = [float(i) for i in range(12)]
    assert before == (1, weight)
    assert after == (0, weight)


def test_the_output_layer_needs_no_apex(unfixed, dense_model):
    before, after = unfixed("output_layer_with_fused_accumulation", model=dense_model)
    assert before == "RuntimeError"
    assert after == (False, True)


def test_packed_sequences_are_rotated_at_once(unfixed):
    (slices_before, rotated_before), (slices_after, rotated_after) = unfixed(
        "slices_of_packed_rotation"
    )
    assert (slices_before, slices_after) == (3, 0)
    np.testing.assert_allclose(rotated_after, rotated_before, rtol=1e-6, atol=1e-6)


def test_rotary_tables_have_all_positions_on_every_context_rank(unfixed):
    before, after = unfixed("rotary_tables_of_a_context_rank")
    assert (before != 16) == is_defective(fixes.keep_rotary_tables_whole)
    assert after == 16


def test_every_fix_names_releases():
    for fix, releases in fixes.FIXES.items():
        assert releases, fix
        assert set(releases) <= set(fixes.RELEASES), fix


def test_another_release_is_refused():
    script = (
        "import importlib.metadata\n"
        "importlib.metadata.version = lambda name: '0.17.0'\n"
        "from grpo_megatron.trainer.megatron import upstream_fixes\n"
        "upstream_fixes.install()"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script], text=True, capture_output=True
    )
    assert "SetupError: megatron-core 0.17.0 is installed" in result.stderr
    assert result.returncode != 0
