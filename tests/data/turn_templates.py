"""Chat templates with tools and thoughts in the manner of model families, and tokenizers for them.

Every template here was written for these tests. It has the *format* of its family (roles, special
tokens, where thoughts go and where they stay, how tools, calls and results are written), and none
of the wording of the released one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.turn_tokens import TurnState, TurnTokens

QWEN3 = """
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- if tools or messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
    {%- if tools %}
        {{- '\\n\\nTools:\\n<tools>' }}
        {%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{% endfor %}
        {{- '\\n</tools>' }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}
            {%- set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content.lstrip('\\n') if m.reasoning_content is string else content }}
        {%- endif %}
        {%- for call in m.tool_calls or [] %}
            {%- if content or not loop.first %}{{- '\\n' }}{% endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{% endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}
"""
"""Thoughts stay behind the last question of a user and go in front of it."""

LLAMA3 = """
{{- bos_token }}
{%- set system = '' %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system }}
{%- for tool in tools or [] %}{{- '\\n' + (tool | tojson(indent=4)) }}{% endfor %}
{{- '<|eot_id|>' }}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{- raise_exception('one call at once') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name }}
        {{- '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + (m.content | tojson) }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
        {{- (m.content | trim) + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""White space around every message goes; one call a turn; a result is JSON."""

_DEEPSEEK = """
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{- messages[0].content }}{% endif %}
{%- for tool in tools or [] %}{{- '\\n\\n' + (tool | tojson) }}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<｜Assistant｜>' }}
        {%- endif %}
        {%- set content = m.content or '' %}
        {%- if DROPS and '</think>' in content %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {%- if loop.first %}{{- '<｜tool▁calls▁begin｜>' }}{% endif %}
            {{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' }}
            {{- call.function.arguments + '<｜tool▁call▁end｜>' }}
            {%- if loop.last %}{{- '<｜tool▁calls▁end｜>' }}{% endif %}
        {%- endfor %}
        {{- '<｜end▁of▁sentence｜>' }}
    {%- elif m.role == 'tool' %}
        {{- '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt and messages[-1].role != 'tool' %}{{- OPENING }}{% endif %}
"""
DEEPSEEK_V3 = _DEEPSEEK.replace("DROPS", "false").replace("OPENING", "'<｜Assistant｜>'")
"""Arguments of calls must be text; no generation prompt behind a result."""
DEEPSEEK_R1 = _DEEPSEEK.replace("DROPS", "true").replace("OPENING", "'<｜Assistant｜><think>\\n'")
"""The generation prompt opens the thought, and every thought goes."""

GLM = """
{{- '[gMASK]<sop>' }}
{%- for tool in tools or [] %}
    {%- if loop.first %}{{- '<|system|>\\nTools:' }}{% endif %}
    {{- '\\n' + (tool | tojson) }}
{%- endfor %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role in ['system', 'user'] %}{{- '<|' + m.role + '|>\\n' + m.content }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}
        {%- set thought = '' %}
        {%- if m.reasoning_content is string %}{% set thought = m.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1] %}
        {%- endif %}
        {{- '<|assistant|>' }}
        {%- if loop.index0 > ns.last and thought %}
            {{- '\\n<think>' + thought.strip() + '</think>' }}
        {%- else %}{{- '\\n<think></think>' }}{% endif %}
        {%- if content.strip() %}{{- '\\n' + content.strip() }}{% endif %}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>' + call.function.name }}
            {%- for name, value in call.function.arguments.items() %}
                {{- '\\n<arg_key>' + name + '</arg_key>\\n<arg_value>' }}
                {{- value if value is string else value | tojson }}
                {{- '</arg_value>' }}
            {%- endfor %}
            {{- '\\n</tool_call>' }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|observation|>' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}
"""
"""As GLM-4.5: a turn ends with the token that begins the next one; arguments must be a table."""

KIMI = """
{%- if tools %}
    {{- '<|im_system|>tool_declare<|im_middle|>' + (tools | tojson) + '<|im_end|>' }}
{%- endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_system|>tool<|im_middle|>## Return of ' + m.tool_call_id + '\\n' + m.content }}
    {%- else %}
        {{- '<|im_' + m.role + '|>' + m.role + '<|im_middle|>' + m.content }}
        {%- if m.tool_calls %}
            {{- '<|tool_calls_section_begin|>' }}
            {%- for call in m.tool_calls %}
                {{- '<|tool_call_begin|>' + call.id + '<|tool_call_argument_begin|>' }}
                {%- if call.function.arguments is string %}{{- call.function.arguments }}
                {%- else %}{{- call.function.arguments | tojson }}{% endif %}
                {{- '<|tool_call_end|>' }}
            {%- endfor %}
            {{- '<|tool_calls_section_end|>' }}
        {%- endif %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{% endif %}
"""
"""As Kimi-K2: the name of a call is in its id."""

MISTRAL = """
{{- bos_token }}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- set ns.spoken = 0 %}
{%- for m in messages %}
    {%- if m.role in ['user', 'assistant'] and not m.tool_calls %}
        {%- if (m.role == 'user') != (ns.spoken % 2 == 0) %}
            {{- raise_exception('user and assistant must take turns') }}
        {%- endif %}
        {%- set ns.spoken = ns.spoken + 1 %}
    {%- endif %}
    {%- if m.role == 'tool' and (m.tool_call_id | default('')) | length != 9 %}
        {{- raise_exception('an id must have nine signs') }}
    {%- endif %}
    {%- if m.role == 'system' %}{{- '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}
    {%- elif m.role == 'user' %}
        {%- if tools and loop.index0 == ns.last %}
            {{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- m.content + '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {{- '{"name": "' + call.function.name + '", "arguments": ' }}
            {{- (call.function.arguments | tojson) + ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{% endif %}
        {%- endfor %}
        {{- ']' + eos_token }}
    {%- elif m.role == 'assistant' %}{{- m.content + eos_token }}
    {%- elif m.role == 'tool' %}
        {{- '[TOOL_RESULTS]{"content": ' + (m.content | tojson) + '}[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}
"""
"""No generation prompt; tools stand in front of the last question, so that they move; users and
policy must take turns, and ids of calls have nine signs."""

PLAIN = """
{%- for tool in tools or [] %}{{- 'Tool: ' + (tool | tojson) + '\\n' }}{% endfor %}
{%- for m in messages %}
    {{- m.role + ': ' + m.content }}
    {%- for call in m.tool_calls or [] %}{{- ' -> ' + (call.function | tojson) }}{% endfor %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{% endif %}
"""
"""Made up: no special token anywhere, so that the tokenizer may join a reply and what follows."""


@dataclass(frozen=True)
class Family:
    """A template, its special tokens (those of `plain_marks` are added, not special), what begins a
    text, what ends a turn, and arguments of the template."""

    template: str
    marks: tuple[str, ...]
    ends: tuple[str, ...]
    plain_marks: tuple[str, ...] = ()
    arguments: tuple[tuple[str, Any], ...] = ()


_IM = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
_TAGS = (
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
)
_DEEPSEEK_MARKS = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>",
)
FAMILIES = {
    "qwen3": Family(QWEN3, _IM, ("<|im_end|>",), _TAGS),
    "qwen3_not_thinking": Family(QWEN3, _IM, ("<|im_end|>",), _TAGS, (("enable_thinking", False),)),
    "llama3": Family(
        LLAMA3,
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        ("<|eot_id|>",),
    ),
    "deepseek_v3": Family(DEEPSEEK_V3, _DEEPSEEK_MARKS, ("<｜end▁of▁sentence｜>",)),
    "deepseek_r1": Family(
        DEEPSEEK_R1, _DEEPSEEK_MARKS, ("<｜end▁of▁sentence｜>",), ("<think>", "</think>")
    ),
    "glm": Family(
        GLM,
        ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|user|>", "<|observation|>"),
        (*_TAGS, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "kimi": Family(
        KIMI,
        (
            "<|im_system|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_end|>",
            "<|tool_call_argument_begin|>",
        ),
        ("<|im_end|>",),
    ),
    "mistral": Family(
        MISTRAL,
        (
            "</s>",
            "[INST]",
            "[/INST]",
            "[SYSTEM_PROMPT]",
            "[/SYSTEM_PROMPT]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_CALLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        ("</s>",),
    ),
    "plain": Family(PLAIN, ("</s>",), ("</s>",)),
}
_CORPUS = [
    "assistant: user: The answer is 42, and what then?\n\n  It is so.\n",
    '{"name": "search", "arguments": {"x": "1", "y": 2}}\n\n\n',
    "The tool returned an error:\n\n    line 3\n\tno such file\n",
]


def write_family(directory: Path, name: str) -> Path:
    """A checkpoint's tokenizer: bytes with merges that join letters, spaces and newlines."""
    from transformers import PreTrainedTokenizerFast

    family = FAMILIES[name]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_CORPUS * 3, trainer)
    backend.add_tokens([AddedToken(mark, normalized=False) for mark in family.plain_marks])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token=family.ends[0],
        additional_special_tokens=list(family.marks),
    )
    tokenizer.chat_template = family.template
    tokenizer.save_pretrained(directory)
    ends = [tokenizer.convert_tokens_to_ids(end) for end in family.ends]
    settings = {"eos_token_id": ends}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    return directory


def reply_message(turns: TurnTokens, state: TurnState, sampled_ids: Sequence[int]) -> Message:
    """Return the reply as a message without calls."""
    return {"role": "assistant", "content": turns.reply_text(state, sampled_ids)}
