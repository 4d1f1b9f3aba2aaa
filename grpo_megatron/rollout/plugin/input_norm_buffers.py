"""What scales the pixels of images must survive a start with dummy weights.

Defect (vLLM 0.32.0, layers/fusion/mm_input_norm.py:247): `FusedMMInputNorm` computes its scale and
shift when it is made, and registers them as buffers of a checkpoint, which none has. The dummy
loader (model_loader/dummy_loader.py:46) overwrites such buffers with random numbers, and no update
brings them back: images are seen as noise, without an error."""

from __future__ import annotations

from typing import Any


def apply() -> None:
    """Mark both buffers as no part of a checkpoint."""
    from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm

    original = FusedMMInputNorm.__init__

    def __init__(self: FusedMMInputNorm, *arguments: Any, **settings: Any) -> None:
        original(self, *arguments, **settings)
        self._non_persistent_buffers_set.update(("weight", "bias"))

    FusedMMInputNorm.__init__ = __init__
