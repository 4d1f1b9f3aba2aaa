"""`[experience]`: lessons from earlier problems, before the policy's prompts."""

from pathlib import Path

from pydantic import Field

from grpo_megatron.config.base import Strict
from grpo_megatron.config.secret_values import REFERENCE


class ExperienceConfig(Strict):
    """Lessons in the prompt instead of new weights (docs/experience.md, Training-Free GRPO,
    arXiv:2510.08191)."""

    path: Path | None = None
    """`experience.json` of an earlier run, to begin with; default: nothing was learned yet."""
    layout: str = "Lessons from earlier problems:\n{experiences}\n\n{question}"
    """What the domain's template gets as the question once there are lessons."""
    max_experiences: int = Field(32, ge=1)
    """Most lessons that are kept; what would be one too many is refused, and counted."""
    max_words: int = Field(64, ge=1)
    """Most words of a lesson; longer ones are refused, and counted."""
    show_answer: bool = True
    """Whether the writer of lessons sees the right answers."""
    writer_url: str | None = Field(None, pattern="^https?://")
    """Address of an OpenAI-compatible server whose model writes the lessons; default: the policy
    writes them, which needs a chat template."""
    writer_model: str | None = None
    """Name of the writer's model at `writer_url`."""
    writer_api_key: str | None = Field(None, pattern=REFERENCE)
    """Key that the writer's server asks for: the name of the environment variable that has it,
    `"$NAME"`."""
    writer_max_tokens: int = Field(1024, ge=1)
    """Longest answer of the writer."""
    writer_temperature: float = Field(0.0, ge=0)
    """The writer's temperature."""
    writer_timeout_s: float = Field(120.0, gt=0)
    """Time that one answer of the writer may take."""
    writer_attempts: int = Field(2, ge=1)
    """Times that the writer is asked for operations before its lessons of a group, or of a step,
    are given up, and counted; also requests to its server that are made while that is busy."""
