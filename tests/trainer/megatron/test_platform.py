"""Importing the platform changes nothing but Megatron; binding a rank's device does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

CODE = """
import torch
smallest = torch.tensor([2e-38])

def is_flushed():
    return float(smallest * 0.01) == 0.0

from grpo_megatron.trainer.megatron import platform
print(is_flushed())
platform.bind_device(0, None)
print(is_flushed())
"""


def test_only_ranks_flush_denormals():
    """A test process that imports a trainer module must still compute floats as they are."""
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]


def test_ranks_leave_no_folders_of_wandb_behind(tmp_path):
    """Megatron imports it where it is installed; a rank that is killed cannot clean up."""
    code = """
import os, signal, sys
from grpo_megatron.trainer.megatron import platform  # before Megatron
import grpo_megatron.trainer.service
assert "wandb" not in sys.modules
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], env={**os.environ, "TMPDIR": str(tmp_path)},
                          capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(tmp_path.glob("*wandb*")) == []
