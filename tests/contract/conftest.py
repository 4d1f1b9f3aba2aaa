"""`make test-contract` puts vLLM's CUDA build before the CPU's, on `sys.path`."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest

from tests.contract import pretended_gpus

SLOW_TO_IMPORT = ("vllm.engine.arg_utils", "vllm.entrypoints.launchers.cli_args")


def has_cuda_build() -> bool:
    """Whether the vLLM that would be imported has kernels for CUDA."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).parent.glob("_C_stable_libtorch*.so"))


@pytest.fixture(scope="package", autouse=True)
def gpus():
    """Eight H100s for vLLM, and for what asks which build it is."""
    if not has_cuda_build():
        pytest.skip("needs vLLM's CUDA build: run make test-contract")
    with pytest.MonkeyPatch.context() as patch:
        # The CPU build's metadata is still in .venv.
        patch.setattr("grpo_megatron.rollout.replica.is_cpu_engine", lambda: False)
        pretended_gpus.pretend()
        for module in SLOW_TO_IMPORT:  # once, and not in every fork
            importlib.import_module(module)
        yield
