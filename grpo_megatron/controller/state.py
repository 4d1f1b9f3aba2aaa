"""What a resumed run must know beyond weights and optimizer."""

from dataclasses import asdict, dataclass, field
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
        objective: what the objective has learned (`algorithms.objective.Objective.state`).
    """

    step: int
    updates: int
    sampler: dict[str, Any]
    heldout_before: float
    seconds: float
    objective: dict[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
