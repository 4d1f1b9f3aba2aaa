"""Importing the platform changes nothing but Megatron; binding a rank's device does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

# Enough numbers for every thread to have a part; the threads start here.
COUNT_FLUSHED = """
smallest = torch.full((4_000_000,), 2e-38)
print(int((smallest * 0.01 == 0).sum()), flush=True)
"""


def environment(**changes: str) -> dict[str, str]:
    """Of this process, without what importing Megatron here has set."""
    inherited = {k: v for k, v in os.environ.items() if k != "TORCHDYNAMO_DISABLE"}
    return inherited | changes


def test_a_rank_flushes_denormals_on_every_thread():
    code = f"""
import torch
from grpo_megatron.trainer.megatron import platform
import grpo_megatron.trainer.service
platform.bind_device(0, 2)
{COUNT_FLUSHED}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 4_000_000


def test_importing_the_trainer_where_there_is_no_gpu(tmp_path):
    """Floats are computed as they are, torch's compiler is off, Megatron clips no gradients with a
    Transformer Engine that is installed, and nothing is left behind: Megatron imports wandb where
    it is installed, and a process that is killed cannot clean up."""
    packages = tmp_path / "packages"
    package = packages / "transformer_engine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('raise RuntimeError("imported without a GPU")')
    python_path = os.pathsep.join([str(packages), *filter(None, sys.path)])
    code = f"""
import os, signal, sys
import torch
torch.cuda.is_available = lambda: False
from grpo_megatron.trainer.megatron import platform  # before Megatron
import grpo_megatron.trainer.service
from megatron.core.optimizer import clip_grads
assert clip_grads.multi_tensor_applier.__module__.startswith("megatron.")
assert not platform.HAS_TRANSFORMER_ENGINE
assert "wandb" not in sys.modules
assert "torch._dynamo" not in sys.modules, "a compiler for nothing"
assert torch.compile.__module__ == "torch", "what imports it later must get the real one"
assert os.environ["TORCHDYNAMO_DISABLE"] == "1", "Megatron's fused functions are compiled by it"
torch.set_num_threads(2)
{COUNT_FLUSHED}
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(TMPDIR=str(tmp_path), PYTHONPATH=python_path),
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert int(done.stdout) == 0
    assert list(tmp_path.glob("*wandb*")) == []


def test_torchs_compiler_stays_where_there_is_a_gpu():
    """Megatron's fused functions are compiled by it."""
    code = (
        "import os, torch\n"
        "torch.cuda.is_available = lambda: True\n"
        "try:\n"
        "    import grpo_megatron.trainer.megatron.platform\n"
        "except ModuleNotFoundError as error:  # for GPUs Megatron imports kernels\n"
        "    assert error.name == 'triton'\n"
        "print(os.environ.get('TORCHDYNAMO_DISABLE'))"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        text=True,
        capture_output=True,
        check=True,
        env=environment(),
    )
    assert done.stdout.split() == ["None"]
