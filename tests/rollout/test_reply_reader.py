"""Parsers of calls are loaded beside the sampling of the first turn."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest

from grpo_megatron.config.run import DomainConfig, ModelConfig
from grpo_megatron.data.format_advice import advice_on_formats
from grpo_megatron.data.tool_calls import FORMATS
from grpo_megatron.environments.protocol import Reply
from grpo_megatron.errors import ConfigError, EpisodeError
from grpo_megatron.launch import bindings
from grpo_megatron.rollout import reply_reader
from grpo_megatron.rollout.reply_reader import ReplyReader
from grpo_megatron.rollout.tool_parsers import ReadReply
from grpo_megatron.rollout.turn_sampler import TurnSampler
from grpo_megatron.types import Completion, VersionSpan
from tests.data.turn_templates import write_family
from tests.rollout.scripted import TOOL

SAMPLED = Completion(np.array([5]), np.array([-0.5]), (VersionSpan(0, 0, 1),), "stop", "")


def sample(sampler, ask, tools):
    return sampler.sample(ask, [1], max_tokens=1, seed=None, routes_from=0, tools=tools)


def test_parsers_are_made_once_in_a_thread(monkeypatch):
    threads = []

    class Reader:
        def __init__(self, format_name, directory):
            threads.append(threading.current_thread())

        def read(self, text, tools, *, turn):
            return ReadReply(Reply(text), {})

    monkeypatch.setattr(reply_reader, "ToolCallReader", Reader)
    reader = ReplyReader("hermes", None, None)

    async def load_often():
        await reader.load(())
        assert not threads
        await asyncio.gather(*(reader.load([TOOL]) for _ in range(8)))

    asyncio.run(load_often())
    assert reader("a", [TOOL], 0).reply.text == "a"
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


def test_domains_load_their_parsers_one_after_the_other(monkeypatch):
    """They import transformers, which two threads must not import at once."""
    running = []
    most = []

    class Reader:
        def __init__(self, format_name, directory):
            running.append(directory)
            most.append(len(running))
            time.sleep(0.02)
            running.remove(directory)

    monkeypatch.setattr(reply_reader, "ToolCallReader", Reader)
    readers = [ReplyReader("hermes", None, number) for number in range(4)]

    async def load_all():
        await asyncio.gather(*(reader.load([TOOL]) for reader in readers))

    asyncio.run(load_all())
    assert most == [1, 1, 1, 1]


def test_a_turn_is_sampled_while_parsers_are_loaded():
    async def play():
        is_asked = asyncio.Event()
        is_loading = asyncio.Event()
        loaded = []

        async def load(tools):
            is_loading.set()
            await is_asked.wait()
            loaded.append(tools)

        async def ask(token_ids, **_):
            is_asked.set()
            await is_loading.wait()
            return [SAMPLED]

        sampler = TurnSampler(turn_tokens=None, read_reply=None, load_reading=load, decode=None)
        async with asyncio.timeout(30):
            await sample(sampler, ask, [TOOL])
        assert loaded == [[TOOL]]

    asyncio.run(play())


def test_a_format_that_nobody_reads_ends_the_turn():
    async def ask(token_ids, **_):
        return [SAMPLED]

    async def load(tools):
        raise ConfigError("there is no format")

    sampler = TurnSampler(turn_tokens=None, read_reply=None, load_reading=load, decode=None)
    with pytest.raises(ConfigError, match="no format"):
        asyncio.run(sample(sampler, ask, [TOOL]))


class Recipe:
    """As much of one as names of formats need."""

    def __init__(self, name, model="absent"):
        settings = {"name": "calculator", "tool_format": name}
        self.model = ModelConfig(path=model)
        self.domains = [
            DomainConfig.model_validate(
                {
                    "name": "d",
                    "source": "file",
                    "path": "rows.jsonl",
                    "template": "chat",
                    "rewards": [{"function": "environment"}],
                    "environment": settings,
                }
            )
        ]


@pytest.mark.parametrize("name", ["auto", *FORMATS])
def test_known_formats_are_not_looked_up(name, monkeypatch):
    monkeypatch.setattr(bindings, "require_format", None)
    bindings.refuse_unbound_environments(Recipe(name))


def test_a_mistyped_format_is_refused_before_the_run():
    with pytest.raises(EpisodeError, match="tool_format: there is no format 'hermse'") as caught:
        bindings.refuse_unbound_environments(Recipe("hermse"), remedy="or else")
    assert caught.value.where == "[[domains]] d, environment"
    assert "'hermes'" in caught.value.remedy and caught.value.remedy.endswith("; or else")
    bindings.refuse_unbound_environments(Recipe("pythonic"))


def test_a_format_that_the_tokenizer_cannot_serve_is_refused_before_the_run(tmp_path):
    write_family(tmp_path, "qwen3")
    with pytest.raises(
        EpisodeError, match="does not know calls in the format 'deepseek_v31'"
    ) as caught:
        bindings.refuse_unbound_environments(Recipe("deepseek_v31", tmp_path))
    assert caught.value.message.startswith("tool_format: ")
    assert caught.value.where == "[[domains]] d, environment"
    assert '"auto"' in caught.value.remedy
    bindings.refuse_unbound_environments(Recipe("glm45", tmp_path))


def test_the_format_of_the_template_needs_no_parsers(tmp_path, monkeypatch):
    write_family(tmp_path, "qwen3")
    monkeypatch.setattr(bindings, "ToolCallReader", None)
    for name in ("hermes", "auto"):
        bindings.refuse_unbound_environments(Recipe(name, tmp_path))


def test_formats_beside_that_of_the_template_are_told(tmp_path):
    write_family(tmp_path / "qwen3", "qwen3")
    write_family(tmp_path / "plain", "plain")
    (told,) = advice_on_formats(Recipe("glm45", tmp_path / "qwen3"))
    assert told.startswith('domains.0.environment.tool_format = "glm45": the chat template')
    assert told.endswith('in the format "hermes"')
    assert advice_on_formats(Recipe("hermes", tmp_path / "qwen3")) == []
    assert advice_on_formats(Recipe("auto", tmp_path / "qwen3")) == []
    assert advice_on_formats(Recipe("glm45", tmp_path / "plain")) == []
    assert advice_on_formats(Recipe("glm45")) == []


def test_a_machine_without_vllm_leaves_unknown_formats_to_the_workers(monkeypatch):
    def require_format(name):
        raise ImportError(name)

    monkeypatch.setattr(bindings, "require_format", require_format)
    bindings.refuse_unbound_environments(Recipe("hermse"))
