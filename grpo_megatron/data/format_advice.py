"""Formats of calls that a recipe names and its chat template does not write."""

import contextlib

from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.chat_template import ChatTemplate, read_chat_template
from grpo_megatron.data.prompt_text import tokenizer_directory
from grpo_megatron.data.tool_calls import AUTO, other_format
from grpo_megatron.errors import DataError


def advice_on_formats(config: RunConfig) -> list[str]:
    """Return a line for each domain whose `tool_format` is not the one of its chat template; none
    where the checkpoint is not on this machine."""
    named = {}
    for number, domain in enumerate(config.domains):
        if domain.episodes is not None and domain.episodes.tool_format != AUTO:
            key = f"domains.{number}.{domain.episodes_table}.tool_format"
            named[key] = domain.episodes.tool_format
    if not named:
        return []
    template = _chat_template(config)
    if template is None:
        return []
    advice = []
    for key, name in named.items():
        found = other_format(name, template)
        if found is not None:
            advice.append(
                f'{key} = "{name}": the chat template writes calls in the format "{found}"'
            )
    return advice


def _chat_template(config: RunConfig) -> ChatTemplate | None:
    with (
        contextlib.suppress(DataError),  # a template that is none is told where prompts are read
        tokenizer_directory(config.model) as directory,
    ):
        if directory is not None:
            return read_chat_template(directory)
    return None
