"""Importing the platform changes nothing but Megatron; binding a rank's device does."""

from __future__ import annotations

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
