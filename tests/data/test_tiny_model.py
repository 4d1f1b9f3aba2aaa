"""Tokenizers of tiny models: characters, markers of a chat template, phrases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.errors import DataError

TOOLS = [
    {
        "type": "function",
        "function": {"name": "calculate", "parameters": {"properties": {"expression": {}}}},
    }
]
CALL = {"type": "function", "function": {"name": "calculate", "arguments": {"expression": "12*34"}}}
CONVERSATION = [
    {"role": "user", "content": "12*34"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "408"},
]


@pytest.fixture
def agent(tmp_path):
    write_tiny_model(tmp_path / "model", load_preset("tiny-qwen3-moe-agent"))
    return tmp_path / "model"


def test_markers_and_phrases_are_one_token_each(agent):
    tokenizer = load_tokenizer(agent)
    text = tokenizer.chat_template.render(CONVERSATION, {"tools": TOOLS})
    ids = tokenizer.encode(text)
    written = [tokenizer.token_text(token) for token in ids]
    opening = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "'
    assert written[written.index("<|assistant|>") :] == [
        "<|assistant|>",
        opening,
        *"12*34",
        '"}}\n</tool_call>',
        "<|end|>",
        "<|tool|>",
        *"408",
        "<|end|>",
        "<|assistant|>",
    ]
    decoded = tokenizer.decode(ids)  # markers are no text, phrases are
    assert decoded == f'calculate(expression)12*34{opening}12*34"}}}}\n</tool_call>408'
    hf = AutoTokenizer.from_pretrained(agent)
    found = hf.apply_chat_template(CONVERSATION, tools=TOOLS, add_generation_prompt=True)
    assert found["input_ids"] == ids


def test_the_marker_of_a_turns_end_ends_an_answer(agent, tmp_path):
    tokenizer = load_tokenizer(agent)
    ends = {tokenizer.token_text(token) for token in tokenizer.stop_token_ids}
    assert ends == {"<|endoftext|>", "<|end|>"}
    write_tiny_model(tmp_path / "plain", load_preset("tiny-qwen3-moe"))
    assert len(load_tokenizer(tmp_path / "plain").stop_token_ids) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end_of_turn": "<|stop|>"}, "end_of_turn '<|stop|>' is not among the markers"),
        ({"markers": ["<|a|>"], "phrases": ["<|a|>"]}, "hold '<|a|>' more than once"),
        ({"markers": ["<|endoftext|>"]}, "hold '<|endoftext|>' more than once"),
        ({"alphabet": "abca"}, "the characters of the alphabet hold 'a' more than once"),
    ],
)
def test_what_no_tokenizer_can_be_made_of(tmp_path, settings, message):
    preset = load_preset("tiny-qwen3-moe")
    changed = replace(preset, tokenizer={**preset.tokenizer, **settings})
    with pytest.raises(DataError) as caught:
        write_tiny_model(tmp_path / "model", changed)
    assert message in str(caught.value)


def test_what_the_alphabet_lacks_becomes_a_question_mark(agent, tmp_path):
    assert load_tokenizer(agent).writable("1 … 2\ufffd<|end|>é") == "1 ? 2?<|end|>?"
    preset = load_preset("tiny-qwen3-moe")
    changed = replace(preset, tokenizer={"kind": "characters", "alphabet": "12 "})
    write_tiny_model(tmp_path / "small", changed)
    assert load_tokenizer(tmp_path / "small").writable("1 … 2?") == "1  2"
