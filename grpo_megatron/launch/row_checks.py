"""Every row of a recipe's files is read and made a prompt before anything starts."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from grpo_megatron.config.run import DomainConfig, RunConfig
from grpo_megatron.config.templates import CHAT, TurnTemplate
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.dataset_answers import refuse_bad_responses
from grpo_megatron.data.preference_rows import PreferenceRow
from grpo_megatron.data.preferences import (
    read_preferences,
    refuse_bad_preferences,
    why_dropped,
)
from grpo_megatron.data.prompt_images import refuse_images
from grpo_megatron.data.prompt_text import PromptRenderer
from grpo_megatron.data.row_files import Rows
from grpo_megatron.data.sources import iterate_problems
from grpo_megatron.data.step_rows import StepRow
from grpo_megatron.data.tokenizer import TextTokenizer
from grpo_megatron.errors import placed_at
from grpo_megatron.launch.row_progress import checked_rows
from grpo_megatron.types import Problem


@dataclass(frozen=True)
class KnownModel:
    """What the rows of a recipe are tried with: the files of its model that are on this machine."""

    chat_template: ChatTemplate | None
    tokenizer: TextTokenizer | None
    """None: it has no tokenizer.json yet."""
    sees_images: bool


def refuse_bad_rows(config: RunConfig, index: int, model: KnownModel | None) -> None:
    """Read all rows of the file of the domain `config.domains[index]`, one after the other; of a
    data set that is made the first problem, as what that lacks, all lack.

    Raises DataError with file and row for the first one that the controller would refuse: it
    cannot be read, lacks a field or has a wrong one, a template refuses it, the tokenizer has no
    token for a character of it. A bad image leaves its row out, and is not looked at here: of
    Parquet it is not even read. Where this takes long, lines on stderr say how far it is.

    model: None: chat template and tokenizer are not on this machine, and left to the controller."""
    domain = config.domains[index]
    prompts = _Prompts(domain, model, f"domains.{index}.environment.demonstration")
    rows = None
    if domain.source == "file" and domain.path is not None:
        rows = checked_rows(domain, domain.path, without=_unread_field(domain, model))
    if config.trains_preferences:
        preferences = _sound_preferences(config, domain, prompts, rows)
        refuse_bad_preferences(domain, config.preferences, preferences)
        return
    problems = iterate_problems(domain, config.seed, rows)
    if domain.source != "file":
        problems = itertools.islice(problems, 1)
    sound = _sound_problems(problems, prompts)
    refuse_bad_responses(config, domain, sound, tokenizer=prompts.tokenizer)
    for _ in sound:  # where no responses are trained, none was read
        pass


def _unread_field(domain: DomainConfig, model: KnownModel | None) -> str:
    """Return the field of images of a model that sees them, which makes no prompt invalid. Where
    none does, rows with images must have no marks for them."""
    if model is not None and model.sees_images:
        return domain.image_field
    return ""


class _Prompts:
    """Writes the prompts of a domain, as far as that can be done on this machine."""

    def __init__(self, domain: DomainConfig, model: KnownModel | None, where_turns: str):
        """where_turns: the setting of the demonstrated turns. Raises DataError where one of these,
        or a template, cannot be read."""
        self.tokenizer: TextTokenizer | None = None
        self._domain = domain
        self._reads_text_only = False
        self._renderer: PromptRenderer | None = None
        if model is not None:
            self.tokenizer = model.tokenizer
            self._reads_text_only = not model.sees_images
            self._renderer = PromptRenderer(domain, model.chat_template)
        elif domain.template != CHAT:
            self._renderer = PromptRenderer(domain, None)
        self._turns: list[TurnTemplate] = []
        if domain.environment is not None:
            for text in domain.environment.demonstration:
                self._turns.append(TurnTemplate(text, where=where_turns))

    def refuse_bad(self, problem: Problem) -> None:
        """Raise DataError where the prompt or a demonstrated turn of a problem cannot be
        written."""
        if self._reads_text_only:
            refuse_images(self._domain, [problem])
        if self._renderer is not None:
            self.refuse_unwritable(self._renderer.render(problem).text, problem)
        with placed_at(problem.where):
            for turn in self._turns:
                turn.response(problem.question, problem.answer, problem.metadata)

    def refuse_unwritable(self, text: str, problem: Problem) -> None:
        """Raise DataError where the tokenizer has no token for a character of a text."""
        if self.tokenizer is not None:
            where = problem.where or f"[[domains]] {self._domain.name}"
            self.tokenizer.refuse_unwritable(text, where=where)


def _sound_problems(problems: Iterator[Problem], prompts: _Prompts) -> Iterator[Problem]:
    for problem in problems:
        prompts.refuse_bad(problem)
        yield problem


def _sound_preferences(
    config: RunConfig, domain: DomainConfig, prompts: _Prompts, rows: Rows | None
) -> Iterator[PreferenceRow | StepRow]:
    for row in read_preferences(domain, config.preferences, rows):
        if not why_dropped(row, config.preferences):  # others are left out before they get tokens
            prompts.refuse_bad(row.problem)
            for text in _answers_of(row):
                prompts.refuse_unwritable(text, row.problem)
        yield row


def _answers_of(row: PreferenceRow | StepRow) -> Sequence[str]:
    """Return the texts of a row that are trained."""
    if isinstance(row, StepRow):
        return row.steps
    return row.answers
