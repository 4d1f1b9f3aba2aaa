"""How model families write calls of tools in a reply: the names of formats, by which parsers are
chosen, and the signs by which one finds a call in a text and a format in a chat template."""

import json
import re
from dataclasses import dataclass

from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.reply_forms import THOUGHT_BEGIN, THOUGHT_END
from grpo_megatron.errors import ConfigError

AUTO = "auto"
"""The format of the chat template."""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """One way to write calls. Formats without `openings` are read by a parser all the same; it then
    decides alone whether a text was meant as a call."""

    openings: tuple[str, ...] = ()  # a reply with one of these means to call
    each: str = ""  # begins every single call
    each_end: str = ""
    """Ends it, and in front of this `each` is text; empty: it is a token that no text has."""
    framing: str = ""  # what the template writes between the text and the first call
    example: str = ""  # shown to a policy that wrote something else
    whole: re.Pattern[str] | None = None
    """What an opening begins, where parsers drop the parts that they do not understand."""


_JSON_CALL = '{"name": "NAME", "arguments": {...}}'
_DEEPSEEK_BEGIN = "<｜tool▁calls▁begin｜>"
_DEEPSEEK_CALL = _DEEPSEEK_BEGIN + "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"

# A value ends where the parser ends it: one that has an end in it is no part of a whole call. What
# was matched is never given back (`*+`), so that no text takes long.
_CODER_CALL = r"""
    <function=[^<>]++>\s*+
    (?:
        <parameter=[^<>]++>
        (?: (?! <\s*+/?+\s*+parameter\s*+[=>] | </function> ) . )*+
        </parameter>\s*+
    )*+
    </function>\s*+
"""
_CODER_WHOLE = re.compile(
    rf"<tool_call>\s*+ (?:{_CODER_CALL})++ </tool_call> | {_CODER_CALL} (?:</tool_call>)?+",
    re.DOTALL | re.VERBOSE,
)
_GLM_WHOLE = re.compile(
    r"""
    <tool_call>[^<]++
    (?:
        <arg_key> (?: (?! </arg_key> | </tool_call> ) . )*+ </arg_key>\s*+
        <arg_value> (?: (?! </arg_value> | </tool_call> ) . )*+ </arg_value>\s*+
    )*+
    </tool_call>
    """,
    re.DOTALL | re.VERBOSE,
)

_PYTHON_TAG = "<|python_tag|>"
_JSON = json.JSONDecoder()
_LLAMA_CALL = re.compile(r'<\|python_tag\|>|\{\s*+"(?:type|name|parameters|arguments)"')

FORMATS = {
    "hermes": CallFormat(
        openings=("<tool_call>",),
        each="<tool_call>",
        each_end="</tool_call>",
        framing="\n",
        example=f"<tool_call>\n{_JSON_CALL}\n</tool_call>",
    ),
    "qwen3_coder": CallFormat(
        openings=("<tool_call>", "<function="),
        each="<function=",
        each_end="</function>",
        framing="\n",
        example="<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n"
        "</tool_call>",
        whole=_CODER_WHOLE,
    ),
    "glm45": CallFormat(
        openings=("<tool_call>",),
        each="<tool_call>",
        each_end="</tool_call>",
        framing="\n",
        example="<tool_call>NAME\n<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n</tool_call>",
        whole=_GLM_WHOLE,
    ),
    "llama3_json": CallFormat(
        openings=("<|python_tag|>",), example='{"name": "NAME", "parameters": {...}}'
    ),
    "deepseek_v3": CallFormat(
        openings=(_DEEPSEEK_BEGIN,),
        each="<｜tool▁call▁begin｜>",
        example=_DEEPSEEK_CALL.replace("{}", "function<｜tool▁sep｜>NAME\n```json\n{...}\n```"),
    ),
    "deepseek_v31": CallFormat(
        openings=(_DEEPSEEK_BEGIN,),
        each="<｜tool▁call▁begin｜>",
        example=_DEEPSEEK_CALL.replace("{}", "NAME<｜tool▁sep｜>{...}"),
    ),
    "kimi_k2": CallFormat(
        openings=("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
        each="<|tool_call_begin|>",
        example="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
        "<|tool_call_argument_begin|>{...}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "mistral": CallFormat(openings=("[TOOL_CALLS]",), example=f"[TOOL_CALLS][{_JSON_CALL}]"),
}
"""By the names that vLLM's parsers have."""

_SIGNS = (
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<arg_key>",), "glm45"),
    (("<tool_call>", "<function="), "qwen3_coder"),
    (("<tool_call>",), "hermes"),
    (("<|python_tag|>",), "llama3_json"),
    (("ipython", '"parameters"'), "llama3_json"),
)
"""What a template's source has where it writes calls in a format; the first found counts."""


def call_format(name: str, template: ChatTemplate) -> str:
    """Return the name of a format; of `auto`, the one in which the template writes calls.
    ConfigError where it has none that is known."""
    if name != AUTO:
        return name
    found = format_of(template)
    if found is not None:
        return found
    raise ConfigError(
        "the chat template does not say in which format its model calls tools",
        where=f"{template.where}, tool_format",
        remedy=f"set tool_format to one of {', '.join(FORMATS)}, or to another parser of vLLM",
    )


def format_of(template: ChatTemplate) -> str | None:
    """Return the format in which a template writes calls; None: none that is known."""
    for signs, found in _SIGNS:
        if all(template.mentions(sign) for sign in signs):
            return found
    return None


def other_format(name: str, template: ChatTemplate) -> str | None:
    """Return the format in which a template writes calls where `name` is another one; None: it is
    the same, or not known."""
    found = format_of(template)
    if name in (AUTO, found):
        return None
    return found


def split_thought(name: str, text: str) -> tuple[str, str]:
    """Return the thought of a reply with its end, and the rest. A thought that does not end is all
    of the reply; an end within a call is a part of that call, and calls within a thought are none.
    """
    if text.lstrip().startswith(THOUGHT_BEGIN):
        thought, end, answer = text.partition(THOUGHT_END)
        return thought + end, answer
    place = text.rfind(THOUGHT_END)
    while place >= 0 and _is_within_call(name, text, place):
        place = text.rfind(THOUGHT_END, 0, place)
    if place < 0:
        return "", text
    end_of_thought = place + len(THOUGHT_END)
    return text[:end_of_thought], text[end_of_thought:]


def _is_within_call(name: str, text: str, place: int) -> bool:
    """Whether a place in a reply is inside of a call that began before it and ends after it."""
    if name == "llama3_json":
        return _is_within_json_call(text, place)
    written = FORMATS.get(name, CallFormat())
    if not written.each_end:  # signs are tokens of their own: a thought cannot mention them
        first = _opening_of(name, text)
        return first is not None and first < place
    begin = text.rfind(written.each, 0, place)
    end = text.find(written.each_end, place)
    if begin < 0 or end < 0:
        return False
    ended_before = text.find(written.each_end, begin, place) >= 0
    began_behind = text.find(written.each, place, end) >= 0  # then the first one was only mentioned
    return not ended_before and not began_behind


def _is_within_json_call(text: str, place: int) -> bool:
    for found in _LLAMA_CALL.finditer(text, 0, place):
        if found[0] == _PYTHON_TAG:
            return True
        try:
            _, end = _JSON.raw_decode(text, found.start())
        except (ValueError, RecursionError):
            continue
        if end > place:
            return True
    return False


def begins_call(name: str, text: str) -> bool:
    """Whether a reply means to call, be the call well-formed or not."""
    if name == "llama3_json" and text.lstrip().startswith("{"):
        has_arguments = '"parameters"' in text or '"arguments"' in text
        if '"name"' in text and has_arguments:  # else an answer that is JSON
            return True
    return _opening_of(name, text) is not None


def num_begun_calls(name: str, text: str) -> int:
    """Return how many calls a reply begins, as far as its format shows it."""
    written = FORMATS.get(name, CallFormat())
    if not written.each:
        return 0
    if not written.each_end:
        return text.count(written.each)
    number = 0
    place = text.find(written.each)
    while place >= 0:
        number += 1
        end = text.find(written.each_end, place)
        if end < 0:
            break
        place = text.find(written.each, end)
    return number


def broken_call(name: str, text: str) -> int | None:
    """Return the number (from 1) of the first call that is not whole: a part of it has no end, or
    something stands between its parts. None: all are whole, as far as their parser does not say
    that itself."""
    whole = FORMATS.get(name, CallFormat()).whole
    if whole is None:
        return None
    number = 1
    place = _opening_of(name, text)
    while place is not None:
        found = whole.match(text, place)
        if found is None:
            return number
        number += 1
        place = _opening_of(name, text, found.end())
    return None


def text_before_calls(name: str, text: str) -> str:
    """Return what a reply says in front of its first call, without what the template writes
    between."""
    if name == "llama3_json":
        return ""  # a call is the whole reply
    place = _opening_of(name, text)
    if place is None:
        return text
    return text[:place].removesuffix(FORMATS[name].framing)


def example_of(name: str) -> str:
    """Return how a call is written; empty for formats that are known by name only."""
    return FORMATS.get(name, CallFormat()).example


def _opening_of(name: str, text: str, behind: int = 0) -> int | None:
    places = []
    for opening in FORMATS.get(name, CallFormat()).openings:
        place = text.find(opening, behind)
        if place >= 0:
            places.append(place)
    return min(places, default=None)
