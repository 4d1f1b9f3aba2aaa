"""Importing the platform changes nothing but Megatron; binding a rank's device does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

# Enough numbers for every thread to have a part; the threads start here.
CODE = """
import torch
from grpo_megatron.trainer.megatron import platform
import grpo_megatron.trainer.service
{bind}
smallest = torch.full((4_000_000,), 2e-38)
print(int((smallest * 0.01 == 0).sum()))
"""


@pytest.mark.parametrize(
    ("bind", "num_flushed"),
    [("torch.set_num_threads(2)", 0), ("platform.bind_device(0, 2)", 4_000_000)],
)
def test_only_ranks_flush_denormals_and_on_every_thread(bind, num_flushed):
    """A test process that imports a trainer module must still compute floats as they are."""
    done = subprocess.run(
        [sys.executable, "-c", CODE.format(bind=bind)], capture_output=True, text=True, check=True
    )
    assert int(done.stdout) == num_flushed


def test_ranks_leave_no_folders_of_wandb_behind(tmp_path):
    """Megatron imports it where it is installed; a rank that is killed cannot clean up."""
    code = """
import os, signal, sys
from grpo_megatron.trainer.megatron import platform  # before Megatron
import grpo_megatron.trainer.service
assert "wandb" not in sys.modules
import torch
assert torch.cuda.is_available() or "torch._dynamo" not in sys.modules, "a compiler for nothing"
assert torch.compile.__module__ == "torch", "what imports it later must get the real one"
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob("*wandb*")) == []


@pytest.mark.parametrize(("cuda", "switched_off"), [(True, "None"), (False, "1")])
def test_torchs_compiler_is_switched_off_where_there_is_no_gpu_only(cuda, switched_off):
    """Megatron's fused functions are compiled by it."""
    script = (
        "import os, torch\n"
        f"torch.cuda.is_available = lambda: {cuda}\n"
        "try:\n"
        "    import grpo_megatron.trainer.megatron.platform\n"
        "except ModuleNotFoundError as error:  # for GPUs Megatron imports kernels\n"
        "    assert error.name == 'triton'\n"
        "print(os.environ.get('TORCHDYNAMO_DISABLE'))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
        env=environment,
    )
    assert done.stdout.split() == [switched_off]
