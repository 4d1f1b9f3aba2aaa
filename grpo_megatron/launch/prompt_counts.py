"""Whether a recipe's data can have prompts left for training, told before anything starts."""

import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.preferences import read_preferences, why_dropped
from grpo_megatron.data.prompt_images import ImageReader
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.prompts import tokenised, with_tokens
from grpo_megatron.data.sampler import turns_of_first_draw
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.data.step_rows import StepRow
from grpo_megatron.data.tokenizer import TextTokenizer, load_tokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Problem, Prompt

_ROWS_AT_ONCE = 64
"""That get their tokens together, and whose images are read beside one another."""
_MOST_ROWS = 20_000
"""Of a domain that are counted: to make tokens of all rows of a large one takes minutes, and only
where most of them give no prompt does it take more to find enough."""
_EQUAL = "equal to earlier ones"
_UNSEEN = "with images that cannot be seen"
_UNFIT = "empty or longer than max_model_len - max_new_tokens"


class _Row(NamedTuple):
    """What a row gives: equal rows have equal contents."""

    content: str
    why_dropped: str = ""
    """Empty: it may be trained."""


@dataclass
class _Count:
    """How many different prompts a domain has, at most."""

    num_prompts: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """Rows that give none, by why."""


def refuse_too_few_rows(config: RunConfig) -> None:
    """DataError where the domains have too few different prompts, that fit and whose images can be
    seen, for held-out and validation prompts and a batch of training ones.

    Of each file no more rows are read than settle this, and no more images. Files that are not
    there (yet), and those that 20,000 rows do not settle, are left to the controller; of data sets
    that are made, `num_problems` counts. Without a tokenizer on this machine every row counts as a
    prompt."""
    num_heldout = config.data.num_heldout
    num_validation = config.data.num_validation
    num_kept = num_heldout + num_validation
    batches = _batches(config)
    most = num_kept + max(batches.values(), default=1)
    counts: dict[str, _Count] = {}
    with tokenizer_directory(config.model) as directory:
        for domain in config.domains:
            count = _count_up_to(config, domain, directory, most)
            if count is not None:
                counts[domain.name] = count
    total = sum(count.num_prompts for count in counts.values())
    if len(counts) == len(config.domains) and total <= num_kept:
        what = f"the domains have {total}"
        dropped: Counter[str] = Counter()
        for count in counts.values():
            dropped += count.dropped
        if len(counts) == 1:
            what = f"domain {config.domains[0].name!r} has {total}"
        raise _too_few(what, num_heldout, num_validation, dropped)
    least_heldout = _least_share(num_heldout, len(config.domains))
    least_validation = _least_share(num_validation, len(config.domains))
    for name, count in counts.items():
        if count.num_prompts <= least_heldout + least_validation:
            what = f"domain {name!r} has {count.num_prompts}"
            raise _too_few(what, least_heldout, least_validation, count.dropped)
    num_left = {}
    for name, count in counts.items():
        num_left[name] = count.num_prompts - least_heldout - least_validation
    for setting, size in batches.items():
        _refuse_large_batch(config, setting, size, num_left, counts)


def _batches(config: RunConfig) -> dict[str, int]:
    """Return the sizes of batches whose prompts must all be different ones, by the setting."""
    batches = {}
    draws_what_is_left = config.sampling.dynamic  # and trains fewer, where there are no more
    if config.takes_steps and config.num_steps > 0 and not draws_what_is_left:
        batches["batch.num_prompts"] = config.batch.num_prompts
    # of several domains, one without any answer to demonstrate leaves its turns to the others
    num_trained = sum(domain.weight > 0 for domain in config.domains)
    if config.cold_start is not None and num_trained == 1:
        batches["cold_start.batch_size"] = config.cold_start.batch_size
    return batches


def _refuse_large_batch(
    config: RunConfig,
    setting: str,
    size: int,
    num_left: dict[str, int],
    counts: dict[str, _Count],
) -> None:
    """Raise DataError where the first batch asks a domain for more prompts than it has.

    num_left: training prompts at most, by domain."""
    weights = {domain.name: domain.weight for domain in config.domains}
    for name, num_asked in turns_of_first_draw(weights, size).items():
        if name in num_left and num_asked > num_left[name]:
            raise DataError(
                f"domain {name!r} has {num_left[name]} training prompts at most, but one batch "
                f"asks for {num_asked} of them{_told(counts[name].dropped)}",
                where=setting,
                remedy="lower it or the domain's weight, or add problems",
            )


def _least_share(total: int, num_domains: int) -> int:
    """Return how many of `total` prompts every domain gives at least, see `data.prompts.share`."""
    if num_domains == 1:
        return total
    return int(total >= num_domains)


def _count_up_to(
    config: RunConfig, domain: DomainConfig, model: Path | None, most: int
) -> _Count | None:
    """Count the different prompts of a domain, and no more than `most`; None: it cannot be known.

    model: the directory with the tokenizer, where there is one. Raises DataError where no row is
    left because of its images."""
    if domain.source == "run":
        return None
    if domain.source != "file":
        if domain.num_problems is None:
            return None
        return _Count(domain.num_problems)
    if domain.path is None or not domain.path.exists():
        return None
    count = _Count()
    found: set[str] = set()
    for number, row in enumerate(_rows(config, domain, model)):
        if number == _MOST_ROWS:
            return None
        if row.why_dropped:
            count.dropped[row.why_dropped] += 1
        elif row.content in found:
            count.dropped[_EQUAL] += 1
        else:
            found.add(row.content)
        if len(found) == most:
            break
    count.num_prompts = len(found)
    return count


def _rows(config: RunConfig, domain: DomainConfig, model: Path | None) -> Iterator[_Row]:
    if config.trains_preferences:
        yield from _preferences(config, domain)
        return
    problems = iterate_problems(domain, config.seed)
    if model is None or not (model / "tokenizer.json").is_file():
        for number, _ in enumerate(problems):
            yield _Row(str(number))
        return
    tokenizer = load_tokenizer(model)
    limit = config.rollout.max_model_len - config.max_new_tokens_of(domain.name)
    images = ImageReader.of_model(model, tokenizer)
    for prompt in _prompts(domain, problems, tokenizer, images):
        if prompt is None:
            yield _Row("", _UNSEEN)
        elif 0 < len(prompt.token_ids) <= limit:
            yield _Row(prompt.content)
        else:
            yield _Row("", _UNFIT)


def _preferences(config: RunConfig, domain: DomainConfig) -> Iterator[_Row]:
    """Yield what the rows of a domain's file give, however long it is: equal ones may have other
    metadata, of which a template makes other prompts."""
    for row in read_preferences(domain, config.preferences):
        reason = why_dropped(row, config.preferences)
        if reason:
            yield _Row("", reason)
            continue
        answers: list[object] = []
        if isinstance(row, StepRow):
            answers.append((row.steps, row.labels))
        elif config.compares_pairs:
            answers.append(row.answers)
        else:
            answers += zip(row.answers, row.labels, strict=True)
        for answer in answers:
            yield _Row(repr((row.problem.question, row.problem.metadata, answer)))


def _prompts(
    domain: DomainConfig,
    problems: Iterator[Problem],
    tokenizer: TextTokenizer,
    images: ImageReader | None,
) -> Iterator[Prompt | None]:
    """Yield the prompts of problems, None for each whose images cannot be seen.

    Raises DataError where there is no other."""
    first_refusal = None
    num_seen = 0
    while True:
        rows = list(itertools.islice(problems, _ROWS_AT_ONCE))
        if not rows:
            break
        if images is None:
            yield from tokenised(domain, rows, tokenizer)
            continue
        seen = []
        for row in images.read(domain, rows):
            if isinstance(row, DataError):
                first_refusal = first_refusal or row
                yield None
            else:
                seen.append(row)
        num_seen += len(seen)
        yield from with_tokens(domain, seen, tokenizer, images)
    if first_refusal is not None and num_seen == 0:
        raise first_refusal


def _too_few(what: str, num_heldout: int, num_validation: int, dropped: Counter[str]) -> DataError:
    return DataError(
        f"{what} row(s), and {num_heldout} held-out and {num_validation} validation prompts leave "
        f"none for training{_told(dropped)}",
        where="[data] num_heldout, num_validation",
        remedy="add rows, or lower num_heldout or num_validation",
    )


def _told(dropped: Counter[str]) -> str:
    """Return which rows were not counted, for the end of a message; empty: there are none."""
    if not dropped:
        return ""
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    return f"; not counted are {reasons}"
