"""The plugin's fixes and the receiving end of publishes fit the CUDA build of vLLM."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import grpo_megatron
from tests.contract.pretended_gpus import in_a_process_of_its_own

pytestmark = pytest.mark.contract

PACKAGE = Path(grpo_megatron.__file__).parent


def imports_from_vllm() -> Iterator[tuple[str, str, str]]:
    """File, module and name of whatever is imported from vLLM, except by fixes of its CPU build."""
    for file in sorted(PACKAGE.rglob("*.py")):
        if file.name.startswith("cpu_"):
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for name in node.names:
                    yield str(file.relative_to(PACKAGE)), node.module or "", name.name


@pytest.mark.parametrize(("file", "module", "name"), sorted(set(imports_from_vllm())))
def test_what_is_imported_from_vllm_is_there(file, module, name):
    found = importlib.import_module(module)
    if not hasattr(found, name):  # a module of its own
        importlib.import_module(f"{module}.{name}")


def changed_methods() -> dict[str, str]:
    """Methods of vLLM's engine that come from the plugin once it is registered, by name."""
    from vllm.v1.engine.core import EngineCoreProc

    from grpo_megatron.rollout.plugin import lean_logprobs, register

    before = dict(vars(EngineCoreProc))
    register()
    lean_logprobs.apply()
    changed = {}
    for name, value in vars(EngineCoreProc).items():
        if value is not before.get(name):
            changed[name] = inspect.unwrap(getattr(EngineCoreProc, name)).__module__
    return changed


def test_fixes_for_every_platform_apply():
    """What they replace was there before: they wrap it."""
    changed = in_a_process_of_its_own(changed_methods)
    for name in ("run_engine_core", "step", "step_with_batch_queue", "set_weight_version"):
        assert changed[name] == "vllm.v1.engine.core"


def make_weight_transfer_engine() -> str:
    """As vLLM's worker does."""
    from vllm.config import ParallelConfig, WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from grpo_megatron.rollout.plugin import register

    register()
    wanted = inspect.signature(WeightTransferEngineFactory.create_engine).parameters
    known = {
        "config": WeightTransferConfig(backend="grpo_megatron"),
        "vllm_config": SimpleNamespace(parallel_config=ParallelConfig(), model_config=None),
    }
    arguments = {name: known.get(name) for name in wanted}
    return type(WeightTransferEngineFactory.create_engine(**arguments)).__name__


def test_the_worker_makes_our_weight_transfer_engine():
    """Every method that the base class asks for exists: an abstract class cannot be made."""
    made = in_a_process_of_its_own(make_weight_transfer_engine)
    assert made == "StreamWeightTransferEngine"


def test_methods_of_our_engine_take_what_the_base_class_is_called_with():
    from vllm.distributed.weight_transfer.base import WeightTransferEngine

    from grpo_megatron.rollout.plugin.stream_engine import StreamWeightTransferEngine

    overridden = [
        name
        for name in vars(StreamWeightTransferEngine)
        if not name.startswith("_") and callable(getattr(WeightTransferEngine, name, None))
    ]
    assert {"init_transfer_engine", "receive_weights", "start_weight_update"} <= set(overridden)
    for name in overridden:
        theirs = inspect.signature(getattr(WeightTransferEngine, name)).parameters
        ours = inspect.signature(getattr(StreamWeightTransferEngine, name)).parameters
        assert list(ours) == list(theirs), name


def test_the_gpu_worker_has_what_our_extension_uses_and_nothing_of_its_name():
    """vLLM refuses an extension with a name of the worker's; attributes are set by its methods."""
    from vllm.v1.worker import gpu_worker

    from grpo_megatron.rollout.plugin.worker_extension import WorkerExtension

    ours = {name for name in dir(WorkerExtension) if not name.startswith("__")}
    assert ours
    assert sorted(name for name in ours if hasattr(gpu_worker.Worker, name)) == []
    assigned = set()
    for base in gpu_worker.Worker.__mro__[:-1]:
        for node in ast.walk(ast.parse(inspect.getsource(inspect.getmodule(base)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assigned.add(node.attr)
    for name in (*WorkerExtension.__annotations__, "_weight_update_active"):
        assert name in assigned or hasattr(gpu_worker.Worker, name), name
