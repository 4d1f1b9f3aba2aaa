"""`[sampling]`, `[curriculum]`, `[correction]`: which prompts, groups, samples a step trains."""

from typing import Literal

from pydantic import Field

from grpo_megatron.config.base import Strict


class SamplingConfig(Strict):
    """Selection after scoring (docs/sampling.md)."""

    dynamic: bool = False
    max_refill_rounds: int = Field(4, ge=0)
    max_oversampling: float = Field(2.0, ge=1)
    surplus_staleness: int = Field(0, ge=0)
    zero_variance: Literal["keep", "drop", "resample"] = "keep"


class CurriculumConfig(Strict):
    """Prompts drawn by success rate instead of epoch by epoch (`data/curriculum.py`)."""

    rate: float = Field(0.5, gt=0, le=1)
    floor: float = Field(0.05, gt=0)
    replay_share: float = Field(0.05, ge=0, lt=1)


class CorrectionConfig(Strict):
    """Guided retries of wrong completions (docs/sampling.md, EDGE-GRPO, arXiv:2507.21848)."""

    probability: float = Field(0.75, gt=0, le=1)
    answer_share: float = Field(1 / 3, ge=0, le=1)
    cue: str = "\n\nWait, something is wrong here. Let me check it step by step.\n"
    answer_cue: str = "\n\nWait, the answer should be {answer}. Let me check it step by step.\n"
    max_retry_tokens: int = Field(256, ge=1)
