"""Which format a template writes calls in, and where a call begins in a reply."""

from __future__ import annotations

import pytest

from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.tool_calls import (
    FORMATS,
    begins_call,
    call_format,
    example_of,
    num_begun_calls,
    split_thought,
    text_before_calls,
)
from grpo_megatron.errors import ConfigError
from tests.data.turn_templates import FAMILIES


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", "hermes"),
        ("llama3", "llama3_json"),
        ("deepseek_v3", "deepseek_v31"),
        ("glm", "glm45"),
        ("kimi", "kimi_k2"),
        ("mistral", "mistral"),
    ],
)
def test_the_format_is_that_of_the_template(family, expected):
    template = ChatTemplate(FAMILIES[family].template, {}, "x.jinja")
    assert call_format("auto", template) == expected
    assert call_format("hermes", template) == "hermes"


def test_formats_that_differ_in_one_sign_are_told_apart():
    deepseek = "<｜tool▁calls▁begin｜>" + "```json"
    assert call_format("auto", ChatTemplate(deepseek, {}, "")) == "deepseek_v3"
    coder = "<tool_call><function="
    assert call_format("auto", ChatTemplate(coder, {}, "")) == "qwen3_coder"


def test_a_template_without_calls_is_refused():
    template = ChatTemplate(FAMILIES["plain"].template, {}, "x.jinja")
    with pytest.raises(ConfigError, match="in which format") as caught:
        call_format("auto", template)
    assert caught.value.where == "x.jinja, tool_format"
    assert "hermes" in caught.value.remedy


@pytest.mark.parametrize("name", FORMATS)
def test_an_example_begins_a_call(name):
    example = example_of(name)
    assert begins_call(name, f"{example}")
    assert not begins_call(name, "It is 2.")
    framing = FORMATS[name].framing
    expected = "It is 2."
    if name == "llama3_json":
        expected = ""
    assert text_before_calls(name, f"It is 2.{framing}{example}") == expected


def test_a_format_known_by_name_only_leaves_it_to_its_parser():
    assert example_of("pythonic") == ""
    assert not begins_call("pythonic", "[f(x=1)]")
    assert text_before_calls("pythonic", "x") == "x"


@pytest.mark.parametrize(
    ("name", "text", "thought"),
    [
        ("hermes", "2", ""),
        ("hermes", "<think>a", "<think>a"),
        ("hermes", "\n<think>a</think>b</think>c", "\n<think>a</think>"),
        ("hermes", "a</think>b</think>c", "a</think>b</think>"),
        ("hermes", "a</think>b<tool_call>c</think></tool_call>", "a</think>"),
        ("hermes", "<tool_call></think></tool_call>", ""),
        ("hermes", "<tool_call></think>", "<tool_call></think>"),  # only mentioned
        ("llama3_json", 'a {b}</think>{"name": "</think>"}', "a {b}</think>"),
        ("llama3_json", "<|python_tag|></think>", ""),
        ("pythonic", "a</think>[f()]", "a</think>"),
    ],
)
def test_where_a_thought_ends(name, text, thought):
    assert split_thought(name, text) == (thought, text.removeprefix(thought))


def test_calls_are_counted_outside_of_one_another():
    assert num_begun_calls("hermes", "") == 0
    assert num_begun_calls("hermes", "<tool_call>a<tool_call></tool_call> <tool_call>") == 2
    assert num_begun_calls("qwen3_coder", example_of("qwen3_coder") * 3) == 3
    assert num_begun_calls("kimi_k2", "<|tool_call_begin|>" * 2) == 2
    assert num_begun_calls("mistral", "[TOOL_CALLS]") == 0


@pytest.mark.parametrize(
    ("name", "thought", "answer"),
    [
        ("hermes", "I should <tool_call> with add.\n</think>", "\n\nThe answer is 2."),
        ("glm45", "a <tool_call>f</tool_call> as a draft</think>", "2"),
        ("hermes", "", '<tool_call>\n{"arguments": {"x": "of </think>"}}\n</tool_call>'),
        ("hermes", "a <tool_call></think>", '<tool_call>{"x": "</think>"}</tool_call>'),
        ("qwen3_coder", "<function=f> comes</think>", "<function=g></function>"),
        ("llama3_json", 'not {"name": "f", "parameters": {}}</think>', "2"),
        ("llama3_json", "", '{"name": "f", "parameters": {"x": "</think>"}}'),
        ("mistral", "of</think>", "b[TOOL_CALLS][</think>]"),
    ],
)
def test_a_thought_ends_outside_of_calls(name, thought, answer):
    """Templates may open it in the prompt; calls that it mentions are none, and what a call quotes
    ends nothing."""
    assert split_thought(name, thought + answer) == (thought, answer)
