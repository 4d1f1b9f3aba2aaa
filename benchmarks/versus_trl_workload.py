"""What both sides of `versus_trl.py` are given: prompts, completion lengths, a reward.

Imports the standard library only, because reward workers and TRL's process use it too.
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One workload: every step samples `num_prompts * num_samples` completions."""

    name: str
    num_prompts: int
    num_samples: int
    shortest: int
    longest: int
    mean: float  # tokens a completion
    required_ratio: float

    def lengths(self, step: int) -> list[int]:
        """Tokens of every completion of step `step`, prompt by prompt; the longest occurs.

        Exponential between the bounds: most completions are short, a few reach the limit.
        """
        count = self.num_prompts * self.num_samples
        if self.shortest == self.longest:
            return [self.longest] * count
        draw = random.Random(f"lengths/{step}").expovariate
        rate = 1 / (self.mean - self.shortest)
        drawn = [min(self.shortest + int(draw(rate)), self.longest) for _ in range(count)]
        drawn[drawn.index(max(drawn))] = self.longest
        return drawn


CASES = {
    case.name: case
    for case in (
        Case("equal", 8, 8, 64, 64, 64.0, required_ratio=1.0),
        Case("ragged", 8, 8, 16, 512, 150.0, required_ratio=2.5),
    )
}


def write_case(directory: Path, case: Case, num_problems: int = 4096) -> None:
    """`problems.jsonl` and `case.json` for the two sides."""
    draw = random.Random("problems").randrange
    pairs = {(draw(10, 100), draw(10, 100)) for _ in range(num_problems)}
    with open(directory / "problems.jsonl", "w") as file:
        for a, b in sorted(pairs, key=lambda pair: hash(pair)):
            file.write(json.dumps({"question": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    (directory / "case.json").write_text(json.dumps(asdict(case)))


def read_case(directory: Path) -> tuple[Case, list[str]]:
    """The case and its prompts."""
    lines = (directory / "problems.jsonl").read_text().splitlines()
    return (
        Case(**json.loads((directory / "case.json").read_text())),
        [json.loads(line)["question"] for line in lines],
    )


def share_of_digits(completion: str, answer: str) -> float:
    """A cheap reward that differs between random completions, so that gradients are not zero."""
    return sum(c.isdigit() for c in completion) / max(len(completion), 1)
