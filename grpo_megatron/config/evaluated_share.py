"""Shares of the prompts of an evaluation (`accuracy`, `pass_at_4`), and what they leave out.

An answer that could not be scored (its reward failed, or says so) is neither right nor wrong: a
share is one of the prompts that could be scored, and `NAME_unscorable` beside it counts the
others."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

UNSCORABLE = "_unscorable"
"""How the name of the count that belongs to a share ends."""


@dataclass(frozen=True, slots=True)
class EvaluatedShare:
    """A share of the prompts that could be scored, of one domain or of all.

    Attributes:
        value: 0 to 1; NaN where no prompt could be scored, or there is none.
        num_prompts: With those that could not be scored.
        num_unscorable: Prompts that the share leaves out."""

    value: float
    num_prompts: int
    num_unscorable: int = 0

    @property
    def is_reliable(self) -> bool:
        """Whether at least half of the prompts could be scored."""
        return 2 * self.num_unscorable <= self.num_prompts

    @property
    def unscorable_words(self) -> str:
        """How many prompts could not be scored; "" where all could."""
        if not self.num_unscorable:
            return ""
        words = f"{self.num_unscorable} of {self.num_prompts} prompts could not be scored"
        if not self.is_reliable:
            words = f"unreliable: {words}"
        return words

    def __str__(self) -> str:
        words = "unknown"
        if not math.isnan(self.value):
            words = f"{self.value:.3f}"
        if self.num_unscorable:
            words += f" ({self.unscorable_words})"
        return words


def share_of(values: Mapping[str, float], name: str) -> EvaluatedShare:
    """Return a share among what was measured of a domain, or of all: `eval` of `result.json` has
    one table for each. Results of earlier versions say of no prompt that it could not be scored."""
    return EvaluatedShare(
        values.get(name, math.nan),
        int(values.get("prompts", 0)),
        int(values.get(name + UNSCORABLE, 0)),
    )
