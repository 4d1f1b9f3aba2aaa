"""Seconds of a whole step: what follows each other, and what goes on at the same time."""

from dataclasses import dataclass

from grpo_megatron.plan.timing.trainer import TrainerSeconds


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """An RL step's phases."""

    generation_s: float
    trainer: TrainerSeconds
    publish_s: float
    switch_s: float
    """What trainer and engines on the same GPUs carry to the host and back."""
    overhead_s: float
    overlaps: bool
    """Whether the next step's answers are generated while this one is trained."""

    @property
    def busy_s(self) -> float:
        """Generation and training: the longer of both where they overlap."""
        if self.overlaps:
            return max(self.generation_s, self.trainer.total_s)
        return self.generation_s + self.trainer.total_s

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.busy_s + self.publish_s + self.switch_s + self.overhead_s
