"""Chat templates in the manner of model families, and a tokenizer that has one."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

QWEN = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
"""As Qwen3: earlier thoughts go, `enable_thinking` switches thinking off."""

LLAMA = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined and dated is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not message.role in ['user', 'assistant', 'ipython'] %}
        {{- raise_exception("unknown role " + message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'
        + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
"""As Llama 3: the template writes BOS, and a date."""

DEEPSEEK = """
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(system_prompt='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system_prompt }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{{ '<｜User｜>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' %}
{% set content = message['content'] %}
{% if '</think>' in content %}{% set content = content.split('</think>')[-1] %}{% endif %}
{{ '<｜Assistant｜>' + content + '<｜end▁of▁sentence｜>' }}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"""
"""As DeepSeek-R1: the generation prompt opens the thought."""

DROPS_SYSTEM = """
{%- for message in messages if message.role != 'system' %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

REFUSES_SYSTEM = """
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>model\\n' }}{%- endif %}
"""
"""As Gemma 2."""

NO_GENERATION_PROMPT = """
{%- for message in messages %}
    {{- message.role + ': ' + message.content + '\\n' }}
{%- endfor %}
"""

TEMPLATES = {
    "qwen": QWEN,
    "llama": LLAMA,
    "deepseek": DEEPSEEK,
    "drops_system": DROPS_SYSTEM,
    "refuses_system": REFUSES_SYSTEM,
    "no_generation_prompt": NO_GENERATION_PROMPT,
}
_ENDS = {"qwen": "<|im_end|>", "llama": "<|eot_id|>", "deepseek": "<｜end▁of▁sentence｜>"}
_MARKS = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜end▁of▁sentence｜>",
]


def write_tokenizer(directory: Path, name: str | None) -> Path:
    """A checkpoint's tokenizer, one token a byte and the marks of all families; `name` is of
    TEMPLATES, None is a tokenizer without a chat template."""
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|begin|>",
        eos_token=_ENDS.get(name, "<|im_end|>"),
        pad_token="<|pad|>",
        additional_special_tokens=_MARKS,
    )
    if name is not None:
        tokenizer.chat_template = TEMPLATES[name]
    tokenizer.save_pretrained(directory)
    return directory
