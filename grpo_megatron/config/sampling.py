"""`[sampling]`, `[curriculum]`, `[correction]`: which prompts, groups, samples a step trains."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class SamplingConfig(Strict):
    """Selection after scoring (docs/sampling.md)."""

    dynamic: bool = False
    """Keep a group only if some of its completions are correct and some are not; draw further
    prompts until `batch.num_prompts` groups are kept (DAPO, arXiv:2503.14476)."""
    max_refill_rounds: int = Field(4, ge=0)
    """Rounds after the first; then the step trains what there is, or is skipped."""
    max_oversampling: float = Field(2.0, ge=1)
    """A round draws at most this many prompts per missing group."""
    surplus_staleness: int = Field(0, ge=0)
    """Versions that kept groups left over from an earlier step may be behind on top of
    `batch.max_staleness`; older ones are dropped."""
    zero_variance: Literal["keep", "drop", "resample"] = "keep"
    """Groups whose rewards are all equal: trained with advantage 0, or left out; `resample` is
    refused (docs/sampling.md says why)."""


class CurriculumConfig(Strict):
    """Prompts drawn by success rate instead of epoch by epoch (`data/curriculum.py`)."""

    rate: float = Field(0.5, gt=0, le=1)
    """Weight of the newest visit in a prompt's moving success rate p."""
    floor: float = Field(0.05, gt=0)
    """A prompt is drawn in proportion to p (1 - p) + floor."""
    replay_share: float = Field(0.05, ge=0, lt=1)
    """Share of the draws that go to mastered prompts."""


class CorrectionConfig(Strict):
    """Guided retries of wrong completions (docs/sampling.md, EDGE-GRPO, arXiv:2507.21848)."""

    probability: float = Field(0.75, gt=0, le=1)
    """Share of the wrong completions that a retry replaces."""
    answer_share: float = Field(1 / 3, ge=0, le=1)
    """Share of the retries that are told the answer."""
    cue: str = "\n\nWait, something is wrong here. Let me check it step by step.\n"
    """What is appended to the wrong completion."""
    answer_cue: str = "\n\nWait, the answer should be {answer}. Let me check it step by step.\n"
    """The same for a retry that is told the answer."""
    max_retry_tokens: int = Field(256, ge=1)
    """Longest retry (and never longer than the domain's completions)."""
