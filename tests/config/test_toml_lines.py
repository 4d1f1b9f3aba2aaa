"""Line numbers against hand-counted documents and against generated ones."""

from __future__ import annotations

import json
import tomllib

from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.keys import dotted, leaves
from grpo_megatron.config.toml_file import key_lines
from tests.config.conftest import inline_toml

DOCUMENT = '''\
# a comment with key = 1
name = "x # not a comment"   # a comment

[trainer]
num_ranks = 2
"odd key" = 1

[a.b]
c = { d = 1, e = { f = 2 } }
multi = """
fake = 1
[fake]
"""
list = [
  1,   # one
  "a, ] b",
  [2, 3],
]
[[domains]]
name = 'first'
arguments = { min = 1, max = 2 }
[domains.nested]
deep = true
[[domains]]
name = 'second'
rewards = [
  { function = "m:f" },

  { weight = 2, function = "m:g" },
]
[[domains.parts]]
x.y = 1979-05-27T07:32:00Z
[[domains.parts]]
z = '\'\'\'quotes\'\'\''
'''.replace("\\'", "'").replace("z = ''''quotes''''", "z = '''quotes'''")


def test_hand_counted_lines():
    lines = {dotted(path): line for path, line in key_lines(DOCUMENT).items()}
    expected = {
        "name": 2,
        "trainer": 4,
        "trainer.num_ranks": 5,
        'trainer."odd key"': 6,
        "a.b": 8,
        "a.b.c": 9,
        "a.b.c.d": 9,
        "a.b.c.e.f": 9,
        "a.b.multi": 10,
        "a.b.list": 14,
        "domains": 19,
        "domains.0": 19,
        "domains.0.name": 20,
        "domains.0.arguments.max": 21,
        "domains.0.nested.deep": 23,
        "domains.1": 24,
        "domains.1.name": 25,
        "domains.1.rewards": 26,
        "domains.1.rewards.0.function": 27,
        "domains.1.rewards.1.function": 29,
        "domains.1.rewards.1.weight": 29,
        "domains.1.parts.0.x.y": 32,
        "domains.1.parts.1.z": 34,
    }
    assert {key: lines[key] for key in expected} == expected
    assert not any("fake" in key for key in lines)


_KEYS = st.text("abcXYZ019_- .#é", min_size=1, max_size=6)
_SCALARS = st.one_of(
    st.integers(-9, 9), st.booleans(), st.floats(0.1, 1e6), st.text("ab\"'#]},\\ é", max_size=8)
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(_KEYS, inner, max_size=3)),
    max_leaves=6,
)


@given(st.dictionaries(_KEYS, st.dictionaries(_KEYS, _VALUES, max_size=4), max_size=4))
def test_every_leaf_of_a_generated_document_is_found(tree):
    blocks = [
        f"[{json.dumps(table, ensure_ascii=False)}]\n"
        + "".join(
            f"{json.dumps(key, ensure_ascii=False)} = {inline_toml(value)}\n"
            for key, value in values.items()
        )
        for table, values in tree.items()
    ]
    text = "".join(blocks)
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a newline inside an inline table
        return
    lines, rows = key_lines(text), text.split("\n")
    for path, _ in leaves(values):
        if path and isinstance(path[-1], str):  # elements have the line of their list
            assert json.dumps(path[-1], ensure_ascii=False) in rows[lines[path] - 1]
