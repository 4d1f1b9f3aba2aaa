"""`[allocation]` and `[seeding]`: how many samples a prompt gets, and in what context."""

from pydantic import Field

from grpo_megatron.config.base import Strict


class AllocationConfig(Strict):
    """Samples go to the prompts that still say most (docs/sampling.md, XRPO, arXiv:2510.06672)."""

    base_samples_per_prompt: int = Field(4, ge=2)
    """Samples that every prompt gets first."""
    samples_per_round: int | None = Field(None, ge=1)
    """Samples given out before rewards are looked at again; default: one for each prompt."""
    max_samples_per_prompt: int | None = Field(None, ge=2)
    """Most samples of a prompt; default: twice `batch.num_samples_per_prompt`."""
    alpha: float = Field(0.05, gt=0, lt=1)
    """The mean reward of a prompt is known with a confidence of 1 - alpha."""
    bonus: float = Field(0.1, ge=0)
    """Weight lambda of exploration: how much prompts with few samples come before others."""


class SeedingConfig(Strict):
    """Solved questions put before one that the policy gets all wrong (docs/sampling.md)."""

    num_exemplars: int = Field(2, ge=1)
    """Solved questions before one that is not."""
    store_size: int = Field(256, ge=1)
    """Solved questions that are remembered, a domain; the oldest go first."""
    max_answer_tokens: int = Field(512, ge=1)
    """Longer answers are not remembered."""
    exemplar: str = "Problem: {question}\nSolution: {answer}\n\n"
    """Text of each solved question."""
    question: str = "Problem: {question}"
    """Text of the question behind them; both together are what the domain's template gets."""
