"""What a resumed run must know beyond weights and optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class RunState:
    """Saved with every checkpoint, in `complete.json`.

    Attributes:
        step: RL steps done.
        updates: optimizer steps done in RL, which fixes the learning rate.
        sampler: state from which the next step draws its prompts.
        heldout_before: held-out accuracy before RL.
        seconds: wall time of the run so far, over all attempts.
    """

    step: int
    updates: int
    sampler: dict[str, Any]
    heldout_before: float
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
