"""Each run-time fix of vLLM: the defect is there without it, and gone with it.

A failing `test_upstream_…` means that this vLLM no longer needs the fix: remove its module.
"""

from __future__ import annotations

import importlib.metadata
import os
from types import SimpleNamespace

import pytest
import torch

from grpo_megatron.errors import SetupError
from grpo_megatron.plan.engine_rules import is_cpu_engine
from grpo_megatron.rollout.plugin import (
    cpu_fork_start,
    cpu_moe_update,
    cpu_routed_experts,
    engine_orphans,
    require_supported_vllm,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not is_cpu_engine(), reason="fixes of vLLM's CPU build"),
]


def test_other_versions_are_refused(monkeypatch):
    require_supported_vllm()
    monkeypatch.setattr("vllm.version.__version__", "0.33.0")
    with pytest.raises(SetupError, match=r"0.33.0 was not tested.*(\n.*)*0.32.x"):
        require_supported_vllm()


def test_upstream_vllm_serve_looks_for_another_distribution():
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("vllm")


def _num_prepacks(updates: int) -> int:
    """How often the CPU experts prepack during a first load and `updates` more."""
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    calls = []
    experts = SimpleNamespace(process_weights_after_loading=calls.append)

    class Method(module.UnquantizedFusedMoEMethod):
        def __init__(self):
            self.moe_kernel, self.unquantized_backend = None, UnquantizedMoeBackend.CPU

        def _init_moe_kernel(self, layer):
            self.moe_kernel = SimpleNamespace(fused_experts=experts)

    layer = torch.nn.Module()
    layer.moe_config = None
    layer.w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.zeros(2, 4, 4), requires_grad=False)
    method = Method()
    for _ in range(1 + updates):
        method._setup_kernel(layer, layer.w13_weight, layer.w2_weight)
    return len(calls)


@pytest.fixture
def restore(monkeypatch):
    """Undo what an `apply` changes on `owner.name`."""
    def remember(owner, *names):
        for name in names:
            monkeypatch.setattr(owner, name, owner.__dict__[name])
    return remember


def test_upstream_update_of_cpu_experts_is_not_prepacked(restore):
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as module

    restore(module.UnquantizedFusedMoEMethod, "_setup_kernel")
    assert _num_prepacks(updates=2) == 1
    cpu_moe_update.apply()
    assert _num_prepacks(updates=2) == 3


def test_upstream_routes_are_refused_on_a_cpu(restore):
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    restore(VllmConfig, "_verify_aux_output_compatibility", "use_v2_model_runner")
    restore(CPUModelRunner, "initialize_kv_cache")
    for name in ("execute_model", "sample_tokens"):
        assert name not in CPUModelRunner.__dict__  # inherited: removed again below
    config = VllmConfig.__new__(VllmConfig)
    for name, value in {
        "aux_output_config": SimpleNamespace(enabled=True),
        "attention_config": SimpleNamespace(hisparse_config=None),
        "model_config": SimpleNamespace(runner_type="generate", is_moe=False),
    }.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match="requires Model Runner V2"):
        config._verify_aux_output_compatibility()
    try:
        cpu_routed_experts.apply()
        with pytest.raises(ValueError, match="only supports MoE"):  # other checks still work
            config._verify_aux_output_compatibility()
    finally:
        del CPUModelRunner.execute_model, CPUModelRunner.sample_tokens


def test_upstream_engine_core_does_not_watch_its_parent(restore):
    from vllm.v1.engine.core import EngineCoreProc

    restore(EngineCoreProc, "run_engine_core")
    names = EngineCoreProc.run_engine_core.__code__.co_names
    assert not {"prctl", "set_death_signal", "PR_SET_PDEATHSIG"} & set(names)
    engine_orphans.apply()
    assert EngineCoreProc.run_engine_core.__qualname__ == "EngineCoreProc.run_engine_core"


def test_upstream_cpu_platform_spawns(restore, monkeypatch):
    from vllm.platforms.cpu import CpuPlatform

    restore(CpuPlatform, "check_and_update_config")
    assert "spawn" in CpuPlatform.check_and_update_config.__func__.__code__.co_consts
    monkeypatch.setattr(CpuPlatform, "check_and_update_config", classmethod(
        lambda cls, config: os.environ.update(VLLM_WORKER_MULTIPROC_METHOD="spawn")))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    cpu_fork_start.apply()
    CpuPlatform.check_and_update_config(None)
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
