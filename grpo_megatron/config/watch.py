"""`[watch]`: when a process that makes no progress is named, and what follows."""

from pydantic import Field

from grpo_megatron.config.base import Strict


class WatchConfig(Strict):
    """Processes that hang (docs/faults.md). Each says every five seconds what it is doing; the
    supervisor looks."""

    enabled: bool = True
    """Whether processes that hang are looked for."""
    silent_s: float = Field(30.0, ge=15, le=40)
    """A process that has said nothing for so long is looked at and named: it is stopped, cannot
    run, or cannot write."""
    slow_factor: float = Field(5.0, gt=1)
    """A process that runs is named where a phase makes no progress for this many times its longest
    wait so far, and for at least a minute; where the phase has not ended before, for the time-outs
    of the recipe."""
    replace_after_s: float = Field(60.0, ge=0)
    """Seconds after which a rollout server, rollout worker or reward host that was named is killed
    and counts as dead; 0: never."""
    kill_after_s: float = Field(600.0, ge=0)
    """Seconds after which a trainer rank or controller that was named, and still makes no progress,
    ends the run, so that it can be resumed; 0: never."""
