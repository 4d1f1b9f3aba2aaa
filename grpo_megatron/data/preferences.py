"""From a recipe to the preferences of a run: rows, templates, tokens, splits by prompt.

A preference is trained as a prompt with two answers: the chosen and the rejected one; or, where
answers have labels, the labelled one and an answer to another prompt, of which KTO's baseline is
made. Which other answer that is depends on nothing but the data, so that reference log-probs can
be computed once. Where steps have labels it is a prompt with one answer."""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from grpo_megatron.config.preferences import PreferencesConfig
from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.data.dataset_answers import DatasetAnswers, unsampled
from grpo_megatron.data.preference_rows import PreferenceRow, preference_of
from grpo_megatron.data.prompts import Splits, share, text_hash, tokenised
from grpo_megatron.data.row_files import Rows, read_rows
from grpo_megatron.data.sources import is_of_domain, known_arguments
from grpo_megatron.data.step_rows import (
    StepRow,
    id_of_step_token,
    marked_answer,
    step_row_of,
    why_no_steps,
)
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Completion, Prompt

_NO_LABEL = float("nan")
_WITH_EMPTY_ANSWER = "with an empty answer"
_WITH_EQUAL_ANSWERS = "with equal answers"


@dataclass(frozen=True, slots=True)
class Preference:
    """A prompt with two answers, or with one whose steps have labels."""

    prompt: Prompt
    """Its id is that of the preference: of the tokens of the prompt and of both answers."""
    answers: tuple[Completion, ...]
    labels: tuple[float, ...]
    """1: chosen or desirable; 0: rejected or undesirable; NaN: an answer to another prompt. Of
    steps: how likely the worst one is right; their own labels are in the answer's turns."""
    margin: float = 0.0


@dataclass(frozen=True)
class Preferences:
    """All preferences of a run."""

    splits: Splits
    """Their prompts, one for each preference; equal prompts are in the same split."""
    by_id: Mapping[str, Preference]
    """By the id of their prompt."""
    dropped: Mapping[str, int]
    """How many rows are not trained, by what is wrong with them, as text with the domain."""


LabelledAnswer = tuple[Prompt, Completion, float]
"""(prompt, answer, label)"""


@dataclass(frozen=True)
class RecordedAnswers:
    """What the steps of a run give for a domain."""

    pairs: Sequence[Preference]
    labelled: Sequence[LabelledAnswer]
    dropped: Counter[str]


def read_preferences(
    domain: DomainConfig, settings: PreferencesConfig, rows: Rows | None = None
) -> Iterable[PreferenceRow | StepRow]:
    """Yield the rows of a domain's file or folder, at most `domain.num_problems`, one after
    another, as the loss wants them.

    rows: of its file, where somebody else reads it.

    Raises DataError for what is no preference, and where there is none."""
    path = domain.path
    assert path is not None  # rule domain_source
    arguments = known_arguments(domain, ("domain_field", "split"))
    if rows is None:
        rows = read_rows(path, arguments.get("split"))
    count = 0
    for where, fields in rows:
        if count == domain.num_problems:
            break
        if is_of_domain(domain, where, fields):
            count += 1
            row: PreferenceRow | StepRow
            if settings.rows == "steps":
                row = step_row_of(where, fields, domain)
            else:
                row = preference_of(where, fields, domain, is_paired=settings.is_paired)
            yield replace(row, problem=replace(row.problem, where=where))
    if count == 0:
        raise DataError(
            f"no preferences for domain {domain.name!r}",
            where=str(path),
            remedy="the file is empty, or no row is of this domain",
        )


def refuse_bad_preferences(
    domain: DomainConfig, settings: PreferencesConfig, rows: Iterable[PreferenceRow | StepRow]
) -> None:
    """Read all `rows` of a domain. Raises DataError where none of them can be trained."""
    num_sound = 0
    reasons: Counter[str] = Counter()
    for row in rows:
        reason = why_dropped(row, settings)
        if reason:
            reasons[reason] += 1
        else:
            num_sound += 1
    if num_sound == 0:
        raise _nothing_left(domain, reasons)


def load_preferences(
    config: RunConfig,
    tokenizer: TextTokenizer,
    recorded: Mapping[str, RecordedAnswers] | None = None,
) -> Preferences:
    """Return every preference of the recipe, tokenised, deduplicated and split.

    Left out, and counted, are those with an empty answer, with equal answers, and those longer than
    `rollout.max_model_len`. Raises DataError where nothing of a domain is left. recorded: of the
    domains that take samples of a run, by name."""
    found: list[Preference] = []
    dropped: dict[str, int] = {}
    for domain in config.domains:
        reasons: Counter[str] = Counter()
        if domain.source == "run":
            assert recorded is not None
            of_domain = _of_run(config, domain, recorded[domain.name], reasons)
        else:
            of_domain = _of_domain(config, domain, tokenizer, reasons)
        if not of_domain:
            raise _nothing_left(domain, reasons)
        for reason, count in reasons.items():
            dropped[f"domain {domain.name!r}: {count} {reason}"] = count
        found += of_domain
    by_id: dict[str, Preference] = {}
    for preference in found:
        by_id.setdefault(preference.prompt.prompt_id, preference)
    num_duplicates = len(found) - len(by_id)
    if num_duplicates:
        dropped[f"{num_duplicates} that occur before"] = num_duplicates
    prompts = [preference.prompt for preference in by_id.values()]
    splits = split_by_prompt(
        prompts, num_heldout=config.data.num_heldout, num_validation=config.data.num_validation
    )
    return Preferences(splits, by_id, dropped)


def _of_domain(
    config: RunConfig, domain: DomainConfig, tokenizer: TextTokenizer, reasons: Counter[str]
) -> list[Preference]:
    rows: list[PreferenceRow] = []
    of_steps: list[StepRow] = []
    for row in read_preferences(domain, config.preferences):
        reason = why_dropped(row, config.preferences)
        if reason:
            reasons[reason] += 1
        elif isinstance(row, StepRow):
            of_steps.append(row)
        else:
            rows.append(row)
    if config.preferences.rows == "steps":
        return _with_steps(config, domain, of_steps, tokenizer, reasons)
    prompts = tokenised(domain, [row.problem for row in rows], tokenizer)
    encoder = DatasetAnswers([domain], tokenizer, longest=np.iinfo(np.int64).max)
    found = []
    longest = config.longest_preference
    for row, prompt in zip(rows, prompts, strict=True):
        answers = [encoder.completion(0, prompt, text) for text in row.answers]
        reason = _why_left_out(prompt, answers, longest)
        if reason:
            reasons[reason] += 1
        else:
            found.append((row, prompt, answers))
    if config.compares_pairs:
        return [
            pair_preference(prompt, (answers[0], answers[1]), row.margin)
            for row, prompt, answers in found
        ]
    labelled = []
    for row, prompt, answers in found:
        for answer, label in zip(answers, row.labels, strict=True):
            labelled.append((prompt, answer, label))
    return _with_other_answers(labelled, longest, domain)


def _with_steps(
    config: RunConfig,
    domain: DomainConfig,
    rows: Sequence[StepRow],
    tokenizer: TextTokenizer,
    reasons: Counter[str],
) -> list[Preference]:
    """Return the answers whose steps have labels, with the step tokens where they are read."""
    step_token = config.preferences.step_token
    id_of_step_token(tokenizer, step_token)  # refused also where a domain has no rows left
    longest = config.longest_preference
    prompts = tokenised(domain, [row.problem for row in rows], tokenizer)
    found = []
    for row, prompt in zip(rows, prompts, strict=True):
        answer = marked_answer(row, prompt, tokenizer, step_token)
        if isinstance(answer, str):
            reasons[answer] += 1
        elif len(prompt.token_ids) + answer.num_tokens - 1 > longest or not prompt.token_ids:
            reasons[_too_long(longest)] += 1  # the last step token stands twice
        else:
            labels = " ".join(f"{label:g}" for label in row.labels)
            prompt = _with_id(prompt, (answer,), f"steps {labels}")
            found.append(Preference(prompt, (answer,), (min(row.labels),)))
    return found


def _too_long(longest: int) -> str:
    return f"longer than rollout.max_model_len (at most {longest} tokens)"


def _of_run(
    config: RunConfig, domain: DomainConfig, recorded: RecordedAnswers, reasons: Counter[str]
) -> list[Preference]:
    longest = config.longest_preference
    reasons.update(recorded.dropped)
    if config.compares_pairs:
        fitting = []
        for one in recorded.pairs:
            reason = _why_left_out(one.prompt, one.answers, longest)
            if reason:
                reasons[reason] += 1
            else:
                fitting.append(one)
        return fitting
    labelled = []
    for prompt, answer, label in recorded.labelled:
        reason = _why_left_out(prompt, (answer,), longest)
        if reason:
            reasons[reason] += 1
        else:
            labelled.append((prompt, answer, label))
    if not labelled:
        return []
    return _with_other_answers(labelled, longest, domain)


def _why_left_out(prompt: Prompt, answers: Sequence[Completion], longest: int) -> str:
    """Why answers teach nothing as tokens, behind what the prompt has of them already; empty: they
    may."""
    if not all(answer.text.strip() for answer in answers):
        return _WITH_EMPTY_ANSWER
    if len(answers) == 2 and np.array_equal(answers[0].token_ids, answers[1].token_ids):
        return _WITH_EQUAL_ANSWERS
    num_tokens = len(prompt.token_ids) + max(answer.num_tokens for answer in answers)
    if num_tokens > longest or not prompt.token_ids:
        return _too_long(longest)
    return ""


def pair_preference(
    prompt: Prompt, answers: tuple[Completion, Completion], margin: float
) -> Preference:
    """Return a chosen and a rejected answer, under the id of their tokens."""
    return Preference(_with_id(prompt, answers, "pair"), answers, (1.0, 0.0), margin)


def _with_other_answers(
    labelled: Sequence[LabelledAnswer], longest: int, domain: DomainConfig
) -> list[Preference]:
    """Give every labelled answer an answer to the next other prompt, in the order of hashes; it is
    cut where it would be too long."""
    if len({prompt.text for prompt, _, _ in labelled}) < 2:
        raise DataError(
            f"domain {domain.name!r} has one prompt only, and KTO's baseline needs answers to "
            "other prompts",
            where=str(domain.path),
            remedy="add rows with other prompts",
        )
    ordered = sorted(labelled, key=lambda one: (text_hash(one[0].text), one[1].text))
    count = len(ordered)
    found = []
    for place, (prompt, answer, label) in enumerate(ordered):
        distance = 1
        while ordered[(place + distance) % count][0].text == prompt.text:
            distance += 1
        other = ordered[(place + distance) % count][1]
        room = longest - len(prompt.token_ids)
        if other.num_tokens > room:
            other = _shortened(other, room)
        prompt = _with_id(prompt, (answer, other), f"label {label:g}")
        found.append(Preference(prompt, (answer, other), (label, _NO_LABEL)))
    return found


def _shortened(answer: Completion, num_tokens: int) -> Completion:
    ids = answer.token_ids[:num_tokens].tolist()
    return unsampled(ids, 0, "length", answer.text)


def _with_id(prompt: Prompt, answers: Sequence[Completion], kind: str) -> Prompt:
    """Return the prompt under the id of the preference."""
    digest = hashlib.sha256(kind.encode())
    digest.update(np.array(prompt.token_ids, np.int32).tobytes())
    for answer in answers:
        digest.update(b"\0" + answer.token_ids.astype(np.int32).tobytes())
    return Prompt(
        f"{prompt.domain}-{digest.hexdigest()[:24]}",
        prompt.domain,
        prompt.text,
        prompt.token_ids,
        answers[0].text,
        prompt.metadata,
        prompt.question,
    )


def why_dropped(row: PreferenceRow | StepRow, settings: PreferencesConfig) -> str:
    """Why the texts of a row teach nothing; empty: they may."""
    if isinstance(row, StepRow):
        return why_no_steps(row, settings.step_token)
    if not all(answer.strip() for answer in row.answers):
        return _WITH_EMPTY_ANSWER
    if len(row.answers) == 2 and row.answers[0] == row.answers[1]:
        return _WITH_EQUAL_ANSWERS
    return ""


def _nothing_left(domain: DomainConfig, reasons: Mapping[str, int]) -> DataError:
    told = ", ".join(f"{count} {reason}" for reason, count in reasons.items())
    return DataError(
        f"nothing of domain {domain.name!r} can be trained: {told}",
        where=str(domain.path),
        remedy="correct the file, or raise rollout.max_model_len",
    )


def split_by_prompt(prompts: Sequence[Prompt], *, num_heldout: int, num_validation: int) -> Splits:
    """Take at least `num_heldout` and `num_validation` preferences by the hash of their prompts'
    text, in proportion to the domains' sizes; those of equal prompts stay together, also where
    they are of several domains: what one domain holds out, no other one trains or validates.

    Raises DataError where a domain has none left for training."""
    by_domain: dict[str, list[Prompt]] = {prompt.domain: [] for prompt in prompts}
    for prompt in sorted(prompts, key=lambda prompt: (text_hash(prompt.text), prompt.prompt_id)):
        by_domain[prompt.domain].append(prompt)
    sizes = {name: len(members) for name, members in by_domain.items()}
    heldout, others = _parted(by_domain, share(num_heldout, sizes))
    validation, train = _parted(others, share(num_validation, sizes))
    for name, size in sizes.items():
        if train[name]:
            continue
        scope = ""
        if len(sizes) > 1:
            scope = " (with those whose prompts are so in another domain)"
        raise DataError(
            f"domain {name!r} has {size} preferences, and {len(heldout[name])} held-out and "
            f"{len(validation[name])} validation ones{scope} leave none for training",
            where="[data] num_heldout, num_validation",
            remedy="add rows, or lower num_heldout or num_validation",
        )
    return Splits(
        {name: tuple(members) for name, members in train.items()},
        tuple(itertools.chain.from_iterable(validation.values())),
        tuple(itertools.chain.from_iterable(heldout.values())),
        0,
    )


def _parted(
    by_domain: Mapping[str, Sequence[Prompt]], counts: Mapping[str, int]
) -> tuple[dict[str, list[Prompt]], dict[str, list[Prompt]]]:
    """Take the first `counts` of every domain, and whatever has the text of one that is taken.
    Returns these and the others, by domain and in their order."""
    texts: set[str] = set()
    for name, members in by_domain.items():
        texts |= {prompt.text for prompt in members[: counts[name]]}
    taken: dict[str, list[Prompt]] = {}
    others: dict[str, list[Prompt]] = {}
    for name, members in by_domain.items():
        taken[name] = [prompt for prompt in members if prompt.text in texts]
        others[name] = [prompt for prompt in members if prompt.text not in texts]
    return taken, others
