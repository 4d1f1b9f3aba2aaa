"""Where the responses of a data set are trained, it answers in the place of the engines."""

import logging
from collections.abc import Iterable, Sequence

import numpy as np

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT, ResponseTemplate
from grpo_megatron.data.conversation import (
    RESPONSES,
    TELLING_REMEDY,
    are_responses,
    opening_of,
)
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import DataError
from grpo_megatron.types import Completion, Problem, Prompt, RolloutGroup, VersionSpan

logger = logging.getLogger(__name__)


class DatasetAnswers:
    """A group is a prompt with all of its responses: the field `responses` of its row, or else its
    one answer, by the domain's `response_template`. Nobody sampled them, so that their log-probs
    count as unusable.

    They end as the domain's chat template ends a turn; with a plain template, with the tokenizer's
    end. `longest` tokens are kept of one, the end included, of any domain."""

    def __init__(self, domains: Sequence[DomainConfig], tokenizer: TextTokenizer, longest: int):
        self._tokenizer = tokenizer
        self._longest = {domain.name: longest for domain in domains}
        self._chat_domains: dict[str, DomainConfig] = {}
        self._ends: dict[str, tuple[int, ...]] = {}  # ids, by domain
        self._templates: dict[str, ResponseTemplate] = {}  # by domain
        for domain in domains:
            if domain.response_template is not None:
                where = f"[[domains]] {domain.name}, response_template"
                self._templates[domain.name] = ResponseTemplate(
                    domain.response_template, where=where
                )
            self._ends[domain.name] = (tokenizer.eos_token_id,)
            if domain.template == CHAT:
                self._chat_domains[domain.name] = domain
                self._ends[domain.name] = end_of_turn(domain, tokenizer)

    @classmethod
    def of_run(cls, config: RunConfig, tokenizer: TextTokenizer) -> "DatasetAnswers":
        """Of all domains, with as many tokens of an answer as the domain's `max_new_tokens`: its
        prompts leave room for that many."""
        answers = cls(config.domains, tokenizer, config.rollout.max_new_tokens)
        for domain in config.domains:
            answers._longest[domain.name] = config.max_new_tokens_of(domain.name)
        return answers

    async def rollouts(
        self, step: int, prompts: Sequence[Prompt]
    ) -> list[RolloutGroup[Completion]]:
        """Return the groups of `prompts`, in their order."""
        groups = []
        for prompt in prompts:
            completions = [self.completion(step, prompt, text) for text in self._texts(prompt)]
            groups.append(RolloutGroup(prompt, tuple(completions), 0))
        return groups

    def first(self, step: int, prompt: Prompt) -> Completion:
        """Return the reference answer; of a conversation, what the assistant said."""
        text = self._answer(prompt)
        if prompt.domain in self._chat_domains and prompt.metadata.get(RESPONSES):
            text = prompt.metadata[RESPONSES][0]
        return self.completion(step, prompt, text)

    def num_cut(self, prompt: Prompt) -> int:
        """Return how many answers of a prompt are longer than is kept of one."""
        longest = self._longest[prompt.domain]
        num_cut = 0
        for text in self._texts(prompt):
            # a token is a byte or more, so that most answers need not be looked at
            num_bytes = len(text.encode("utf-8", errors="surrogatepass"))
            if num_bytes + len(self._ends[prompt.domain]) > longest:
                num_cut += int(self.completion(0, prompt, text).truncated)
        return num_cut

    def _texts(self, prompt: Prompt) -> Sequence[str]:
        """Return all that is trained of a row."""
        texts: Sequence[str] = prompt.metadata.get(RESPONSES) or [self._answer(prompt)]
        return texts

    def _answer(self, prompt: Prompt) -> str:
        """Return what is trained of a row without responses."""
        template = self._templates.get(prompt.domain)
        if template is None:
            return prompt.answer
        return template.response(prompt.question, prompt.answer, prompt.metadata)

    def completion(self, step: int, prompt: Prompt, text: str) -> Completion:
        """Return a text as an answer to `prompt`, with its end."""
        chat = self._chat_domains.get(prompt.domain)
        if chat is not None:
            text = text.removeprefix(opening_of(prompt.text, chat.assistant_prefix))
        tokens = [*self._tokenizer.encode(text), *self._ends[prompt.domain]]
        longest = self._longest[prompt.domain]
        finish_reason = "stop"
        if len(tokens) > longest:
            finish_reason = "length"
        return unsampled(tokens[:longest], step, finish_reason, text)


def refuse_bad_responses(
    config: RunConfig, domain: DomainConfig, problems: Iterable[Problem]
) -> None:
    """Raise DataError, with file and line, for a row whose `responses` are no list of texts, whose
    answer is empty, or says more than its content, if this run trains them: elsewhere these fields
    are the row's own, and no problem is looked at."""
    if not _trains_responses(config, domain):
        return
    for problem in problems:
        where = problem.where or f"[[domains]] {domain.name}"
        _refuse_no_texts(problem.metadata.get(RESPONSES), where)
        if problem.untold:
            raise DataError(
                f"the last message of the assistant has {problem.untold[0]!r}, and its content "
                "alone would be trained",
                where=where,
                remedy=TELLING_REMEDY,
            )
        texts = problem.metadata.get(RESPONSES)
        if not texts and domain.response_template is None:
            texts = [problem.answer]
        if not all(text.strip() for text in texts or ()):
            raise DataError(
                "the row's answer is empty, so that its end alone would be trained",
                where=where,
                remedy="leave the row out",
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


def warn_of_cut_answers(
    config: RunConfig,
    domain: DomainConfig,
    tokenizer: TextTokenizer,
    problems: Sequence[Problem],
    prompts: Sequence[Prompt],
) -> None:
    """Log how many answers of a domain a supervised run cuts, and the first row that has one.
    prompts: of `problems`, in their order."""
    answers = DatasetAnswers.of_run(config, tokenizer)
    num_cut = 0
    num_rows = 0
    first = ""
    for problem, prompt in zip(problems, prompts, strict=True):
        num_of_row = answers.num_cut(prompt)
        num_cut += num_of_row
        if num_of_row:
            num_rows += 1
            first = first or problem.where
    if num_cut:
        logger.warning(
            "domain %r: %d answers of %d rows are longer than max_new_tokens (%d) with their end, "
            "and are trained up to there, without an end; the first is at %s",
            domain.name,
            num_cut,
            num_rows,
            config.max_new_tokens_of(domain.name),
            first,
        )


def _trains_responses(config: RunConfig, domain: DomainConfig) -> bool:
    if config.trains_preferences or domain.source != "file":
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
