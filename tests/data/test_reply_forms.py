"""Arguments of calls that no form of a reply has."""

from __future__ import annotations

import pytest

from grpo_megatron.data.reply_forms import argument_forms, reply_forms
from grpo_megatron.errors import DataError


@pytest.mark.parametrize("arguments", ['{"x": ', "[" * 100_000])
def test_arguments_that_cannot_be_read_are_refused(arguments):
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(DataError, match="are no JSON"):
        reply_forms(reply, splits_thoughts=False)


def call_of(arguments):
    return {"type": "function", "function": {"name": "search", "arguments": arguments}}


@pytest.mark.parametrize(
    ("calls", "others"),
    [
        ([call_of({"x": 1.5})], [[call_of('{"x": 1.5}')]]),
        ([call_of('{"x":1.50}')], [[call_of({"x": 1.5})]]),
        ([call_of('{"x":1'), call_of("5")], []),
        ([{"name": "search", "arguments": {}}], []),
        ([{"type": "function", "function": {"name": "search"}}], []),
        ([{"function": None}, "search"], []),
        (None, []),
    ],
)
def test_forms_of_a_conversation_begin_with_it_as_it_is(calls, others):
    asked = {"role": "user", "content": "1"}
    reply = {"role": "assistant", "content": "", "tool_calls": calls}
    expected = [[asked, reply]]
    for other in others:
        expected.append([asked, {**reply, "tool_calls": other}])
    assert argument_forms([asked, reply]) == expected
