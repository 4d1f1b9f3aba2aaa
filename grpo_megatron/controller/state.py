"""What a resumed run must know beyond weights and optimizer."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RunState:
    """Saved with every checkpoint, in `complete.json`."""

    step: int  # RL steps done
    updates: int  # optimizer steps done in RL, which fixes the learning rate
    sampler: dict[str, Any]  # from which the next step draws its prompts
    heldout_before: float  # held-out accuracy before RL
    seconds: float  # wall time of the run so far, over all attempts
    objective: dict[str, float] = field(default_factory=dict)  # see `Objective.state`

