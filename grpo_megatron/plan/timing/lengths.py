"""How long samples are: from a file of lengths, or log-normal and cut at the longest answer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist

from grpo_megatron.errors import ConfigError, raised_as

_NUM_QUANTILES = 128


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts and answers."""

    prompt: float
    """Mean tokens of a prompt."""
    answers: tuple[float, ...]
    """Equally likely tokens of an answer, shortest first."""
    longest: float
    """Tokens at which answers are cut."""
    source: str
    """Whence they are known."""
    scale: float | None = None
    """Median of the log-normal distribution before it is cut; None: of a file."""
    sigma: float = 0.0
    """Its deviation, of the logarithm."""

    @property
    def answer(self) -> float:
        """Mean tokens of an answer."""
        return sum(self.answers) / len(self.answers)

    @property
    def total(self) -> float:
        """Mean tokens of a prompt and an answer."""
        return self.prompt + self.answer

    @property
    def mean_square(self) -> float:
        """Mean of the squares of all tokens of a sample: attention grows with it."""
        return sum((self.prompt + answer) ** 2 for answer in self.answers) / len(self.answers)

    def samples(self, count: int) -> list[float]:
        """Return tokens of `count` samples, prompt and answer, evenly drawn, shortest first."""
        found = []
        for number in range(count):
            place = int((number + 0.5) / count * len(self.answers))
            found.append(self.prompt + self.answers[place])
        return found

    def longest_of(self, count: int) -> float:
        """Return the tokens that the longest answer of `count` is expected to have."""
        if self.scale is None:
            return self.answers[-1]
        place = NormalDist().inv_cdf(count / (count + 1))
        return min(self.longest, max(self.scale * math.exp(self.sigma * place), self.answers[-1]))


def log_normal(prompt: float, answer: float, longest: float, sigma: float, source: str) -> Lengths:
    """Return lengths whose logarithms are normal with deviation `sigma`, cut at `longest` and so
    placed that their mean is `answer` (all of them, where that is the longest)."""
    answers, scale = _quantiles(min(answer, longest), longest, sigma)
    return Lengths(prompt, answers, longest, source, scale, sigma)


@cache
def _quantiles(mean: float, longest: float, sigma: float) -> tuple[tuple[float, ...], float]:
    """Equally likely lengths, and the median before they are cut."""
    normal = NormalDist()
    points = []
    for number in range(_NUM_QUANTILES):
        points.append(math.exp(sigma * normal.inv_cdf((number + 0.5) / _NUM_QUANTILES)))

    def cut(scale: float) -> tuple[float, ...]:
        return tuple(min(scale * point, longest) for point in points)

    low = 0.0
    high = longest / points[0]
    for _ in range(60):
        middle = (low + high) / 2
        if sum(cut(middle)) / _NUM_QUANTILES < mean:
            low = middle
        else:
            high = middle
    return cut(high), high


def fixed(total: float, source: str) -> Lengths:
    """Return lengths of samples that all have `total` tokens and no prompt of their own."""
    return Lengths(0.0, (total,), total, source)


def read_lengths(
    path: Path,
    usual_prompt: float,
    longest: int,
    longest_prompt: int,
    *,
    given_prompt: float | None = None,
) -> Lengths:
    """Return lengths of a text file: on each line the tokens of an answer, or of a prompt and an
    answer. As in a run, answers are cut at `longest` and lines whose prompts are longer than
    `longest_prompt` are left out; `source` counts both.

    usual_prompt, given_prompt: mean tokens of a prompt that are assumed and given, where the file
    has none. ConfigError where a line is something else, where none is left, and where the file has
    prompts and others are given."""
    with raised_as(
        ConfigError,
        "cannot read the lengths",
        (OSError, UnicodeDecodeError),
        where=path,
        remedy="one line a sample: tokens of the answer, or of prompt and answer",
    ):
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    rows = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append(_row(line, f"{path}:{number}"))
    if not rows:
        raise ConfigError(
            "the file has no lengths",
            where=str(path),
            remedy="one line a sample: tokens of the answer, or of prompt and answer",
        )
    has_prompts = any(len(row) == 2 for row in rows)
    if has_prompts and given_prompt is not None:
        raise ConfigError(
            f"the file of lengths has the tokens of prompts, and {given_prompt:g} are given",
            where="--prompt-tokens",
            remedy=f"leave it out, or the first column of {path}",
        )
    fitting = [row for row in rows if len(row) == 1 or row[0] <= longest_prompt]
    if not fitting:
        raise ConfigError(
            f"all prompts are longer than {longest_prompt} tokens, and a run leaves such out",
            where=str(path),
            remedy="raise rollout.max_model_len, or give lengths of other prompts",
        )
    source = str(path)
    num_cut = sum(row[-1] > longest for row in fitting)
    if num_cut:
        source += f"; {num_cut} of {len(fitting)} answers cut at {longest}"
    num_left_out = len(rows) - len(fitting)
    if num_left_out:
        source += f"; {num_left_out} of {len(rows)} left out: prompts above {longest_prompt}"
    prompt = given_prompt or usual_prompt
    prompts = [row[0] for row in fitting if len(row) == 2]
    if prompts:
        prompt = sum(prompts) / len(prompts)
    answers = sorted(float(min(row[-1], longest)) for row in fitting)
    return Lengths(prompt, _thinned(answers), float(longest), source)


def _row(line: str, where: str) -> list[int]:
    words = line.replace(",", " ").split()
    is_number = all(word.isascii() and word.isdigit() and int(word) > 0 for word in words)
    if len(words) > 2 or not is_number:
        raise ConfigError(
            f"{line.strip()!r} is not one or two positive numbers of tokens",
            where=where,
            remedy="one line a sample: tokens of the answer, or of prompt and answer",
        )
    return [int(word) for word in words]


def _thinned(answers: Sequence[float]) -> tuple[float, ...]:
    """Thin the answers to at most as many as a distribution needs; the longest stays."""
    count = len(answers)
    if count <= 8 * _NUM_QUANTILES:
        return tuple(answers)
    kept = 8 * _NUM_QUANTILES
    places = [min(int((number + 0.5) / kept * count), count - 1) for number in range(kept)]
    thinned = [answers[place] for place in places]
    thinned[-1] = answers[-1]
    return tuple(thinned)


def num_microbatches(lengths: Sequence[float], capacity: float) -> int:
    """Return how many micro-batches of `capacity` tokens hold samples of these lengths: the longest
    first, each into the first with room. A sample that is longer has one of its own."""
    free: list[float] = []
    for length in sorted(lengths, reverse=True):
        for number, room in enumerate(free):
            if room >= length:
                free[number] = room - length
                break
        else:
            free.append(max(capacity - length, 0.0))
    return len(free)
