"""From a problem to the text of its prompt: by a plain template, or by the chat template."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from grpo_megatron.config.presets import load_preset, preset_names
from grpo_megatron.config.run import DomainConfig, ModelConfig
from grpo_megatron.config.templates import CHAT, PromptTemplate
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.conversation import (
    MESSAGES,
    TOOLS,
    Message,
    tools_of,
    with_last_question,
)
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import DataError, GrpoMegatronError, placed_at
from grpo_megatron.types import Problem, Prompt


class RenderedPrompt(NamedTuple):
    """A problem whose prompt is text; with the chat template, its metadata has `messages`."""

    text: str
    answer: str
    metadata: Mapping[str, Any]


class PromptRenderer:
    """Renders the problems of one domain. DataError, before any problem, where `template = "chat"`
    and the tokenizer has no chat template, or it drops the domain's system message.

    A question becomes a user's message, by `question_template`; a conversation stays as it is. One
    without a system message gets `system_prompt`."""

    def __init__(self, domain: DomainConfig, chat_template: ChatTemplate | None):
        self._domain = domain
        self._where = f"[[domains]] {domain.name}"
        self._is_chat = domain.template == CHAT
        self._chat_template = chat_template
        self._keeps_system = False  # not known yet
        if not self._is_chat:
            self._template = PromptTemplate(domain.template, where=self._where)
            return
        if chat_template is None:
            raise DataError(
                "the model's tokenizer has no chat template",
                where=f'{self._where}, template = "chat"',
                remedy="put chat_template.jinja of an instruct model beside its tokenizer.json, or "
                "set template to a text with {question}",
            )
        if domain.system_prompt is not None:
            self._require_system_messages()

    def render(self, problem: Problem) -> RenderedPrompt:
        """Return the prompt's text. Raises DataError, with the problem's file and row, where a
        template refuses the problem."""
        with placed_at(problem.where):
            return self._rendered(problem)

    def _rendered(self, problem: Problem) -> RenderedPrompt:
        if not self._is_chat:
            text = self._template.render(problem.question, problem.metadata)
            return RenderedPrompt(text, problem.answer, problem.metadata)
        messages = messages_of(problem, self._domain)
        if any(message["role"] == "system" for message in messages):
            self._require_system_messages()
        metadata = {**problem.metadata, MESSAGES: messages}
        return RenderedPrompt(self._chat_text(messages, metadata), problem.answer, metadata)

    def rephrased(self, prompt: Prompt, rephrase: Callable[[str], str]) -> str:
        """Return the text of a prompt of the domain, with another question: `rephrase` of what the
        template has as `{question}`, or of what the user says last in a conversation."""
        if not self._is_chat:
            return self._template.render(rephrase(prompt.question), prompt.metadata)
        messages = with_last_question(prompt.metadata[MESSAGES], rephrase)
        return self._chat_text(messages, prompt.metadata)

    def _chat_text(self, messages: Sequence[Message], metadata: Mapping[str, Any]) -> str:
        assert self._chat_template is not None  # or __init__ had raised
        arguments = arguments_of(self._domain, metadata)
        with self._named():
            text = self._chat_template.render(messages, arguments, day=self._domain.template_date)
        prefix = self._domain.assistant_prefix
        self._refuse_second_prefix(text, prefix)
        return text + prefix

    def _refuse_second_prefix(self, text: str, prefix: str) -> None:
        """DataError where the chat template has begun the answer as the recipe would."""
        if not prefix.strip() or not text.rstrip().endswith(prefix.strip()):
            return
        raise DataError(
            f"the chat template already begins every answer with {prefix.strip()!r}",
            where=f"{self._where}, assistant_prefix",
            remedy="remove assistant_prefix of the domain",
        )

    def _require_system_messages(self) -> None:
        if self._keeps_system:
            return
        assert self._chat_template is not None  # or __init__ had raised
        with self._named():
            self._chat_template.refuse_dropped_system(
                self._domain.template_arguments, day=self._domain.template_date
            )
        self._keeps_system = True

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Add the domain's name to what the chat template refuses."""
        try:
            yield
        except DataError as error:
            error.where = f"{self._where}: {error.where}"
            raise


def arguments_of(domain: DomainConfig, metadata: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the chat template is given beside the messages of a problem: the domain's
    arguments, and the tools of the row in the place of theirs.

    Where an environment or an agent plays, tools are its own, and a row's are its metadata."""
    tools = tools_of(metadata)
    if not tools or domain.episodes is not None:
        return domain.template_arguments
    return {**domain.template_arguments, TOOLS: tools}


def messages_of(problem: Problem, domain: DomainConfig) -> list[Message]:
    """Return what the chat template is given for a problem."""
    conversation = problem.metadata.get(MESSAGES)
    if conversation is None:
        template = _question_template(domain.question_template, f"[[domains]] {domain.name}")
        question = template.render(problem.question, problem.metadata)
        conversation = [{"role": "user", "content": question}]
    system_prompt = domain.system_prompt
    if system_prompt is not None and conversation[0]["role"] != "system":
        return [{"role": "system", "content": system_prompt}, *conversation]
    return list(conversation)


@lru_cache(maxsize=64)
def _question_template(text: str, where: str) -> PromptTemplate:
    """Return the template of a domain's questions, of which it may have millions."""
    return PromptTemplate(text, where=where)


@contextmanager
def tokenizer_directory(model: ModelConfig) -> Iterator[Path | None]:
    """Where the tokenizer of a model is, before a run has started: its checkpoint, or for a tiny
    one a temporary folder; None where the checkpoint is not on this machine.

    An error of the block names the preset in the place of the temporary folder."""
    if model.path is not None:
        if model.path.is_dir():
            yield model.path
        else:
            yield None
        return
    if model.preset not in preset_names() or load_preset(model.preset).checkpoint:
        yield None
        return
    with TemporaryDirectory() as folder:
        write_tiny_model(Path(folder), load_preset(model.preset))
        try:
            yield Path(folder)
        except GrpoMegatronError as error:
            if error.where:
                error.where = error.where.replace(folder, name_of_preset(model))
            raise


def name_of_preset(model: ModelConfig) -> str:
    """Return what messages call the files of a model that has no directory of its own."""
    return f"preset {model.preset}"
