"""Seconds of a whole step: what follows each other, and what goes on at the same time."""

from dataclasses import dataclass

from grpo_megatron.plan.timing.trainer import TrainerSeconds


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """An RL step's phases."""

    generation_s: float
    trainer: TrainerSeconds
    publish_s: float
    pause_s: float
    """Of a publish, in which engines pause: all of it, or the last part."""
    switch_s: float
    """What trainer and engines on the same GPUs carry to the host and back."""
    overhead_s: float
    overlaps: bool
    """Whether the next step's answers are generated while this one is trained."""

    @property
    def busy_s(self) -> float:
        """Generation, training and publish: the longer of what engines and trainer do, where both
        overlap."""
        of_trainer = self.trainer.total_s + self.publish_s
        if self.overlaps:
            return max(self.generation_s + self.pause_s, of_trainer)
        return self.generation_s + of_trainer

    @property
    def step_s(self) -> float:
        """Seconds from one step to the next."""
        return self.busy_s + self.switch_s + self.overhead_s
