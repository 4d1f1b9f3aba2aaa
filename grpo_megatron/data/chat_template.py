"""A tokenizer's own chat template, rendered as transformers renders it, which takes seconds to
import, and torch with it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from grpo_megatron.data.conversation import Message
from grpo_megatron.errors import DataError

TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"
"""A folder of further templates, each named by its file."""
_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
"""Names of templates, as transformers knows them."""
_CONFIG_FILE = "tokenizer_config.json"
_SENTINEL = "SENTINEL-9f3b"
"""A text that no template writes by itself, changes or removes."""
_OTHER_TEMPLATE = (
    "use the chat template of an instruct model of this tokenizer, or a plain template"
)


class ChatTemplate:
    """Renders conversations. Ids of the text are those of transformers' `apply_chat_template`: the
    template writes special tokens itself, and the tokenizer adds none.

    `with_tools` is rendered in place of this one where arguments have `tools`; None: there is no
    other."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        where: str,
        with_tools: "ChatTemplate | None" = None,
    ):
        self._source = source
        self._special_tokens = dict(special_tokens)
        self.where = where
        self._with_tools = with_tools

    def render(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any],
        *,
        day: date | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation. Raises DataError where the template refuses it, or
        writes today's date and no `day` is given."""
        if self._with_tools is not None and arguments.get("tools") is not None:
            return self._with_tools.render(
                messages, arguments, day=day, add_generation_prompt=add_generation_prompt
            )

        def strftime_now(text_format: str) -> str:
            if day is None:
                raise DataError(
                    "the chat template writes today's date: tomorrow's prompts would be others",
                    where=self.where,
                    remedy='set the day for the domain, for example template_date = "2026-01-31"',
                )
            return day.strftime(text_format)

        variables = {
            **self._special_tokens,
            "strftime_now": strftime_now,
            "tools": None,
            "documents": None,
            **arguments,
        }
        with self._refusals(messages):
            text: str = self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        return text

    def refuse_dropped_system(
        self, arguments: Mapping[str, Any], *, day: date | None = None
    ) -> None:
        """DataError where a system message is not in the text of its conversation."""
        messages = [
            {"role": "system", "content": _SENTINEL},
            {"role": "user", "content": "1 + 1?"},
        ]
        if _SENTINEL not in self.render(messages, arguments, day=day):
            raise DataError(
                "the chat template drops the system message",
                where=self.where,
                remedy="put it into the user's message: question_template, or the rows; or "
                + _OTHER_TEMPLATE,
            )

    def after_answer(
        self,
        arguments: Mapping[str, Any],
        *,
        day: date | None = None,
        system_prompt: str | None = None,
    ) -> str:
        """Return what the template writes behind an answer that ends the conversation: the
        end-of-turn token and maybe more. Raises DataError where it does not write the answer.

        system_prompt: in front of the conversation; there are templates that insist on one."""
        question = _question_behind(system_prompt)
        text = self._answered(question, arguments, day)
        _, found, after = text.rpartition(_SENTINEL)
        if not found:
            raise DataError(
                "the chat template drops the assistant's message",
                where=self.where,
                remedy=_OTHER_TEMPLATE,
            )
        return after

    def before_answer(
        self,
        arguments: Mapping[str, Any],
        *,
        day: date | None = None,
        system_prompt: str | None = None,
    ) -> str:
        """Return what the template itself writes between a prompt and an answer of the
        conversation, such as a space or an empty thought; empty where it writes nothing, or another
        prompt before an answer.

        system_prompt: as of `after_answer`."""
        question = _question_behind(system_prompt)
        prompt = self.render(question, arguments, day=day)
        before, found, _ = self._answered(question, arguments, day).rpartition(_SENTINEL)
        if not found or not before.startswith(prompt):
            return ""
        return before.removeprefix(prompt)

    def _answered(
        self, question: Sequence[Message], arguments: Mapping[str, Any], day: date | None
    ) -> str:
        answer = {"role": "assistant", "content": _SENTINEL}
        return self.render([*question, answer], arguments, day=day, add_generation_prompt=False)

    def writes_generation_prompt(
        self, messages: Sequence[Message], arguments: Mapping[str, Any], *, day: date | None = None
    ) -> bool:
        """Whether the text of a question ends with the beginning of the answer's turn."""
        with_prompt = self.render(messages, arguments, day=day)
        without = self.render(messages, arguments, day=day, add_generation_prompt=False)
        return with_prompt != without

    def mentions(self, word: str) -> bool:
        """Whether `word` is in the template's source, or in that for conversations with tools, as
        the name of a field that it reads is."""
        if self._with_tools is not None and self._with_tools.mentions(word):
            return True
        return word in self._source

    @cached_property
    def _template(self) -> jinja2.Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            return environment.from_string(self._source)
        except jinja2.TemplateSyntaxError as error:
            raise DataError(
                f"the chat template is not valid: {error.message}",
                where=f"{self.where}, line {error.lineno} of the template",
                remedy="copy it from the original checkpoint",
            ) from error

    @contextmanager
    def _refusals(self, messages: Sequence[Message]) -> Iterator[None]:
        """What a template raises, or what goes wrong in it, becomes a DataError."""
        try:
            yield
        except DataError:
            raise
        except Exception as error:  # templates are programs
            roles = ", ".join(message["role"] for message in messages)
            raise DataError(
                f"the chat template refuses the conversation ({roles}): {error}",
                where=self.where,
                remedy="change the rows or the domain's system_prompt and template_arguments, or "
                + _OTHER_TEMPLATE,
            ) from error


def _question_behind(system_prompt: str | None) -> list[Message]:
    """Return a question, behind a system message where there is one."""
    question: Message = {"role": "user", "content": "1 + 1?"}
    if system_prompt is None:
        return [question]
    return [{"role": "system", "content": system_prompt}, question]


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote; here it only stands around it."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes signs of HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def read_chat_template(directory: Path) -> ChatTemplate | None:
    """Return the chat template of a checkpoint: `chat_template.jinja`, else that of
    `tokenizer_config.json`, where the one called "default" counts; None where there is neither.

    Where there is one called "tool_use", there or in `additional_chat_templates/`, it is that of
    conversations with tools."""
    settings = _read_json(directory / _CONFIG_FILE)
    file = directory / TEMPLATE_FILE
    if file.is_file():
        templates = {_DEFAULT: (file.read_text(encoding="utf-8"), str(file))}
    else:
        where = f"{directory / _CONFIG_FILE}, chat_template"
        named = _by_name(settings.get("chat_template"))
        templates = {name: (source, where) for name, source in named.items()}
    file = directory / _MORE_TEMPLATES / f"{_WITH_TOOLS}.jinja"
    if file.is_file():
        templates[_WITH_TOOLS] = (file.read_text(encoding="utf-8"), str(file))
    special_tokens = _special_tokens(directory, settings)
    with_tools = None
    if _WITH_TOOLS in templates:
        source, where = templates[_WITH_TOOLS]
        with_tools = ChatTemplate(source, special_tokens, where)
    source, where = templates.get(_DEFAULT, ("", ""))
    if not source:
        return None
    return ChatTemplate(source, special_tokens, where, with_tools)


def _by_name(templates: Any) -> dict[str, str]:
    """Return the templates of a configuration, one or several with names, by their names."""
    if not templates:
        return {}
    if not isinstance(templates, list):
        return {_DEFAULT: templates}
    found = {}
    for named in templates:
        found[str(named.get("name"))] = str(named.get("template") or "")
    return found


def _special_tokens(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens by the names by which templates know them: `bos_token`, or one of a
    model's own, such as `image_token`."""
    known = dict(settings)
    if "added_tokens_decoder" not in settings:  # older checkpoints
        known.update(_read_json(directory / "special_tokens_map.json"))
    named = {name: token for name, token in known.items() if name.endswith("_token")}
    more = known.get("extra_special_tokens")
    if isinstance(more, dict):
        named.update(more)
    tokens = {}
    for name, token in named.items():
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            tokens[name] = token
    return tokens


def _read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object; empty where the file is unreadable, which the tokenizer's loading
    reports."""
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(settings, dict):
        return {}
    return settings
