"""Bodies of requests: what msgspec reads is read so, halves of characters besides."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.data.json_bodies import read_json, well_formed

TEXT = st.text(st.characters(codec=None, exclude_categories=()), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_any_json_is_read_without_halves(value):
    found = read_json(json.dumps(value).encode())
    assert found == well_formed(value)
    json.dumps(found, ensure_ascii=False).encode()  # all of it is text


def test_whole_characters_written_as_halves_stay_whole():
    assert read_json(b'["\\ud83d\\ude00", "a\\uD800b"]') == ["\U0001f600", "a\ufffdb"]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", msgspec.DecodeError),
        (b'["\\ud800"', msgspec.DecodeError),
        (b'["\\ud800", NaN]', msgspec.DecodeError),
        (b'["\\ud800", Infinity]', msgspec.DecodeError),
        (b'["\\ud800", 1e999]', msgspec.DecodeError),
        (b'["\\ud800", -1e999]', msgspec.DecodeError),
        (b'["\\ud800", ' + b"9" * 5000 + b"]", msgspec.DecodeError),
        (b'["\\ud800", "\xff"]', (msgspec.DecodeError, UnicodeError)),
        (b"[" * 100_000, RecursionError),
    ],
)
def test_what_is_no_json_is_refused(body, error):
    with pytest.raises(error):
        read_json(body)
