"""Arguments of calls that no form of a reply has."""

from __future__ import annotations

import pytest

from grpo_megatron.data.reply_forms import reply_forms
from grpo_megatron.errors import DataError


@pytest.mark.parametrize("arguments", ['{"x": ', "[" * 100_000])
def test_arguments_that_cannot_be_read_are_refused(arguments):
    call = {"type": "function", "function": {"name": "search", "arguments": arguments}}
    reply = {"role": "assistant", "content": "", "tool_calls": [call]}
    with pytest.raises(DataError, match="are no JSON"):
        reply_forms(reply, splits_thoughts=False)
