"""Where the responses of a data set are trained, it answers in the place of the engines."""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT, ResponseTemplate
from grpo_megatron.data.conversation import (
    RESPONSES,
    TELLING_REMEDY,
    are_responses,
    begun_answer,
    behind_opening,
    leaves_thought_open,
    thinks_again,
)
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError, placed_at
from grpo_megatron.types import Completion, Problem, Prompt, RolloutGroup, VersionSpan

logger = logging.getLogger(__name__)

ROWS_LOOKED_AT = 2000
"""Of a domain, for answers that are cut: to tokenise all of a large one takes hours."""
_TEXTS_AT_ONCE = 100
"""That are tokenised together: what the tokenizer says of them is large."""


class DatasetAnswers:
    """A group is a prompt with all of its responses: the field `responses` of its row, or else its
    one answer, by the domain's `response_template`. Nobody sampled them, so that their log-probs
    count as unusable. Empty ones, of which the end alone would be trained, are left out.

    They end as the domain's chat template ends a turn; with a plain template, with the tokenizer's
    end. longest: how many tokens are kept of one, the end included: of any domain, or by domain."""

    def __init__(
        self,
        domains: Sequence[DomainConfig],
        tokenizer: TextTokenizer,
        longest: int | Mapping[str, int],
    ):
        self._tokenizer = tokenizer
        if isinstance(longest, int):
            longest = {domain.name: longest for domain in domains}
        self._longest = longest
        self._chat_domains: dict[str, DomainConfig] = {}
        self._ends: dict[str, tuple[int, ...]] = {}  # ids, by domain
        self._templates: dict[str, ResponseTemplate] = {}  # by domain
        for domain in domains:
            template = _template_of(domain)
            if template is not None:
                self._templates[domain.name] = template
            self._ends[domain.name] = (tokenizer.eos_token_id,)
            if domain.template == CHAT:
                self._chat_domains[domain.name] = domain
                self._ends[domain.name] = end_of_turn(domain, tokenizer)

    @classmethod
    def of_run(cls, config: RunConfig, tokenizer: TextTokenizer) -> "DatasetAnswers":
        """Of all domains, with as many tokens of an answer as the domain's `max_new_tokens`: its
        prompts leave room for that many."""
        longest = {}
        for domain in config.domains:
            longest[domain.name] = config.max_new_tokens_of(domain.name)
        return cls(config.domains, tokenizer, longest)

    async def rollouts(
        self, step: int, prompts: Sequence[Prompt]
    ) -> list[RolloutGroup[Completion]]:
        """Return the groups of `prompts`, in their order."""
        groups = []
        for prompt in prompts:
            completions = [self.completion(step, prompt, text) for text in self.texts(prompt)]
            groups.append(RolloutGroup(prompt, tuple(completions), 0))
        return groups

    def first(self, step: int, prompt: Prompt) -> Completion:
        """Return the reference answer; of a conversation, what the assistant said. There is one
        where `has_first`."""
        return self.completion(step, prompt, self._first_texts(prompt)[0])

    def has_first(self, prompt: Prompt) -> bool:
        """Whether the row has an answer that is not empty."""
        return bool(self._first_texts(prompt))

    def _first_texts(self, prompt: Prompt) -> list[str]:
        if prompt.domain in self._chat_domains:
            return self.texts(prompt)
        return self._not_empty(prompt, [self._answer(prompt)])

    def texts(self, prompt: Prompt) -> list[str]:
        """Return all answers of a row that are trained."""
        return self._not_empty(prompt, prompt.metadata.get(RESPONSES) or [self._answer(prompt)])

    def num_cut(self, prompts: Sequence[Prompt], *, of_first: bool = False) -> list[int]:
        """Return, for each prompt, how many answers are longer than is kept of one. of_first: only
        that which `first` returns counts. Raises DataError where the tokenizer has no token for a
        character of one."""
        places = []
        texts = []
        for place, prompt in enumerate(prompts):
            longest = self._longest[prompt.domain] - len(self._ends[prompt.domain])
            written_texts = self.texts(prompt)
            if of_first:
                written_texts = self._first_texts(prompt)[:1]
            for written in written_texts:
                text = self._behind_opening(prompt, written)
                # a token is a byte or more, so that most answers need not be looked at
                if len(text.encode("utf-8", errors="surrogatepass")) > longest:
                    places.append(place)
                    texts.append(text)
        num_tokens: list[int] = []
        for start in range(0, len(texts), _TEXTS_AT_ONCE):
            encoded = self._tokenizer.encode_batch(texts[start : start + _TEXTS_AT_ONCE])
            num_tokens += map(len, encoded)
        counts = [0] * len(prompts)
        for place, count in zip(places, num_tokens, strict=True):
            domain = prompts[place].domain
            if count + len(self._ends[domain]) > self._longest[domain]:
                counts[place] += 1
        return counts

    def _answer(self, prompt: Prompt) -> str:
        """Return what is trained of a row without responses."""
        return _written_answer(prompt, self._templates.get(prompt.domain))

    def _not_empty(self, prompt: Prompt, texts: Iterable[str]) -> list[str]:
        """Return the texts that say something beside what the prompt has already."""
        return [text for text in texts if self._behind_opening(prompt, text).strip()]

    def _behind_opening(self, prompt: Prompt, text: str) -> str:
        chat = self._chat_domains.get(prompt.domain)
        if chat is None:
            return text
        return behind_opening(prompt.text, chat.assistant_prefix, text)

    def completion(self, step: int, prompt: Prompt, text: str) -> Completion:
        """Return a text as an answer to `prompt`, with its end."""
        text = self._behind_opening(prompt, text)
        tokens = [*self._tokenizer.encode(text), *self._ends[prompt.domain]]
        longest = self._longest[prompt.domain]
        finish_reason = "stop"
        if len(tokens) > longest:
            finish_reason = "length"
        return unsampled(tokens[:longest], step, finish_reason, text)


def _template_of(domain: DomainConfig) -> ResponseTemplate | None:
    if domain.response_template is None:
        return None
    where = f"[[domains]] {domain.name}, response_template"
    return ResponseTemplate(domain.response_template, where=where)


def _written_answer(row: Problem | Prompt, template: ResponseTemplate | None) -> str:
    """Return the answer of a row without responses, by the domain's template."""
    if template is None:
        return row.answer
    return template.response(row.question, row.answer, row.metadata)


def refuse_bad_responses(
    config: RunConfig,
    domain: DomainConfig,
    problems: Iterable[Problem],
    *,
    tokenizer: TextTokenizer | None = None,
    are_all: bool = True,
) -> None:
    """Raise DataError, with file and line, for a row whose `responses` are no list of texts, whose
    answer says more than its content, or whose answer `response_template` cannot write, if this run
    trains them: elsewhere these fields are the row's own, and no problem is looked at.

    tokenizer: must have tokens for all characters of the answers; None: it is not known.
    are_all: `problems` are all of the domain, so that one of them must have an answer that is not
    empty where nothing else of them is trained."""
    if not _trains_responses(config, domain):
        return
    template = _template_of(domain)
    first = ""
    has_answer = False
    for problem in problems:
        where = problem.where or f"[[domains]] {domain.name}"
        first = first or where
        _refuse_no_texts(problem.metadata.get(RESPONSES), where)
        if problem.untold:
            raise DataError(
                f"the last message of the assistant has {problem.untold[0]!r}, and its content "
                "alone would be trained",
                where=where,
                remedy=TELLING_REMEDY,
            )
        with placed_at(problem.where):
            texts = problem.metadata.get(RESPONSES) or [_written_answer(problem, template)]
        has_answer = has_answer or any(text.strip() for text in texts)
        if tokenizer is not None:
            for text in texts:
                tokenizer.refuse_unwritable(text, where=where)
    if are_all and config.uses_dataset and not has_answer:
        raise _no_answers(domain, first)


def _no_answers(domain: DomainConfig, where: str) -> DataError:
    return DataError(
        f"the answers of all rows of domain {domain.name!r} are empty, so that their ends alone "
        "would be trained; this is the first",
        where=where,
        remedy="correct the file, answer_field or response_template, or leave the domain out",
    )


def _refuse_no_texts(responses: object, where: str) -> None:
    if are_responses(responses):
        return
    found = f"field {RESPONSES!r} is {type(responses).__name__}"
    if isinstance(responses, list):
        wrong = next(one for one in responses if not isinstance(one, str))
        found = f"field {RESPONSES!r} has a {type(wrong).__name__}"
    raise DataError(
        f"{found}, expected a list of texts",
        where=where,
        remedy='write "responses": ["…"], or leave it out to train the answer',
    )


def with_answers(
    config: RunConfig,
    domain: DomainConfig,
    tokenizer: TextTokenizer,
    rows: Sequence[tuple[Problem, Prompt]],
) -> list[Prompt]:
    """Return the prompts of a domain of a supervised run that have an answer to train, each once,
    with the different answers of all rows that ask it.

    The log says how many answers are empty, and left out, and how many of the first rows are cut,
    both with the first row. Raises DataError where nothing is left."""
    answers = DatasetAnswers.of_run(config, tokenizer)
    kept = []
    num_empty = 0
    first_empty = ""
    for problem, prompt in rows:
        num_answers = len(answers.texts(prompt))
        num_written = len(prompt.metadata.get(RESPONSES) or [prompt.answer])
        if num_answers < num_written:
            num_empty += num_written - num_answers
            first_empty = first_empty or problem.where or f"[[domains]] {domain.name}"
        if num_answers:
            kept.append((problem, prompt))
    if not kept:
        raise _no_answers(domain, first_empty)
    if num_empty:
        logger.warning(
            "domain %r: %d answers are empty, or say no more than their prompt, and are left out, "
            "with %d of %d rows that have no other; the first is at %s",
            domain.name,
            num_empty,
            len(rows) - len(kept),
            len(rows),
            first_empty,
        )
    _warn_of_thoughts(domain, answers, kept)
    _warn_of_cut_answers(config, domain, answers, kept)
    prompts = _with_all_answers(answers, [prompt for _, prompt in kept])
    if len(prompts) < len(kept):
        logger.info(
            "domain %r: %d of %d rows have the prompt of an earlier one; what they answer is "
            "trained with its answers, each once",
            domain.name,
            len(kept) - len(prompts),
            len(kept),
        )
    return prompts


def _with_all_answers(answers: DatasetAnswers, prompts: Iterable[Prompt]) -> list[Prompt]:
    """Return equal prompts once, with the different answers of all as responses."""
    asked: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        asked[prompt.content].append(prompt)
    found = []
    for equal in asked.values():
        if len(equal) == 1:
            found += equal
            continue
        texts: dict[str, None] = {}  # in their order
        for prompt in equal:
            texts.update(dict.fromkeys(answers.texts(prompt)))
        metadata = {**equal[0].metadata, RESPONSES: list(texts)}
        found.append(replace(equal[0], metadata=metadata))
    return found


def _warn_of_thoughts(
    domain: DomainConfig, answers: DatasetAnswers, rows: Sequence[tuple[Problem, Prompt]]
) -> None:
    """Say which answers do not fit what their prompt has begun."""
    if domain.template != CHAT:
        return
    open_rows: list[str] = []
    thinking_rows: list[str] = []
    for problem, prompt in rows:
        begun = begun_answer(prompt.text, domain.assistant_prefix)
        where = problem.where or f"[[domains]] {domain.name}"
        for text in answers.texts(prompt):
            rest = behind_opening(prompt.text, domain.assistant_prefix, text)
            if leaves_thought_open(begun, rest):
                open_rows.append(where)
            if thinks_again(begun, rest):
                thinking_rows.append(where)
    if open_rows:
        logger.warning(
            "domain %r: %d answers do not close the thought that their prompt begins (<think>), "
            "and are trained as part of it; the first is at %s; response_template can close it",
            domain.name,
            len(open_rows),
            open_rows[0],
        )
    if thinking_rows:
        logger.warning(
            "domain %r: %d answers begin a thought behind one that their prompt has closed; the "
            "first is at %s; leave their thoughts out, or have the template begin none",
            domain.name,
            len(thinking_rows),
            thinking_rows[0],
        )


def _warn_of_cut_answers(
    config: RunConfig,
    domain: DomainConfig,
    answers: DatasetAnswers,
    rows: Sequence[tuple[Problem, Prompt]],
) -> None:
    looked_at = rows[:ROWS_LOOKED_AT]
    counts = answers.num_cut([prompt for _, prompt in looked_at])
    cut = [problem for (problem, _), count in zip(looked_at, counts, strict=True) if count]
    if not cut:
        return
    scope = ""
    if len(looked_at) < len(rows):
        scope = f"of the first {len(looked_at):,} rows, "
    logger.warning(
        "domain %r: %s%d answers of %d rows are longer than max_new_tokens (%d) with their end, "
        "and are trained up to there, without an end; the first is at %s",
        domain.name,
        scope,
        sum(counts),
        len(cut),
        config.max_new_tokens_of(domain.name),
        cut[0].where,
    )


def _trains_responses(config: RunConfig, domain: DomainConfig) -> bool:
    if config.trains_preferences or domain.source != "file" or not domain.weight:
        return False
    if config.uses_dataset:
        return True
    is_demonstrated = config.cold_start is not None and domain.environment is None
    return is_demonstrated and domain.template == CHAT


def unsampled(token_ids: Sequence[int], step: int, finish_reason: str, text: str) -> Completion:
    """Return a completion that no policy has sampled, as of the weights of `step`; its log-probs
    count as unusable."""
    return Completion(
        np.array(token_ids, np.int32),
        np.full(len(token_ids), -np.inf, np.float32),
        (VersionSpan(step, 0, len(token_ids)),),
        finish_reason,
        text,
    )


def end_of_turn(domain: DomainConfig, tokenizer: TextTokenizer) -> tuple[int, ...]:
    """Return the ids with which the chat template ends an assistant's turn in a domain."""
    assert tokenizer.chat_template is not None  # its prompts were rendered
    after = tokenizer.chat_template.after_answer(
        domain.template_arguments, day=domain.template_date, system_prompt=domain.system_prompt
    )
    return tokenizer.end_of_turn(after)
