"""Whom the writer of lessons asks: a server, which may fail, or the policy."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from aiohttp import web

from grpo_megatron.config.experience import ExperienceConfig
from grpo_megatron.controller.experience.asking import PolicyWriter, ServedWriter, writer_of
from grpo_megatron.errors import ConfigError, DataError
from tests.controller.character_texts import characters
from tests.controller.scored_groups import recipe

BROKEN = {
    "cut": b'{"choices": [{"mess',
    "no text": b"\xff\xfe{}",
    "empty": b"",
    "deep": b"[" * 100_000,
    "null": b"null",
    "a text": b'{"choices": "abc"}',
    "no content": b'{"choices": [{"message": {"content": null}}]}',
}
"""Replies that are no JSON, or have no text, by what asks for them."""


def served(texts, **settings):
    """Replies of a server that repeats what it is asked, and the requests that it got."""
    requests = []

    async def reply(request):
        body = await request.json()
        requests.append((request.headers.get("Authorization"), body))
        said = body["messages"][0]["content"]
        if said == "fail":
            return web.Response(status=500)
        if said == "odd":
            return web.json_response({"choices": []})
        if said in BROKEN:
            return web.Response(body=BROKEN[said], content_type="application/json")
        if said == "busy" and len(requests) == 1:
            return web.Response(status=503)
        return web.json_response({"choices": [{"message": {"content": said * 2}}]})

    async def run():
        app = web.Application()
        app.router.add_post("/v1/chat/completions", reply)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        url = f"http://{host}:{port}/"
        given = ExperienceConfig(writer_url=url, writer_model="m", **settings)
        try:
            return await ServedWriter(given, url)(texts)
        finally:
            await runner.cleanup()

    return asyncio.run(run()), requests


def test_a_server_is_asked_as_openais_api_has_it(monkeypatch):
    monkeypatch.setenv("WRITER", "secret-1")
    replies, requests = served(["a", "fail", "odd", "b"], writer_api_key="$WRITER")
    assert replies == ["aa", None, None, "bb"]
    assert {key for key, _ in requests} == {"Bearer secret-1"}
    assert {body["model"] for _, body in requests} == {"m"}
    assert {body["max_tokens"] for _, body in requests} == {1024}


def test_a_malformed_reply_is_none():
    replies, _ = served(["a", *BROKEN, "b"])
    assert replies == ["aa", *[None] * len(BROKEN), "bb"]


def test_a_busy_server_is_asked_as_often_as_its_settings_say():
    replies, requests = served(["busy"])
    assert (replies, len(requests)) == (["busybusy"], 2)
    replies, requests = served(["busy"], writer_attempts=1)
    assert (replies, len(requests)) == ([None], 1)


def test_without_a_key_none_is_sent():
    _, [(key, _)] = served(["a"])
    assert key is None


def test_a_key_that_the_environment_lacks_is_refused(monkeypatch):
    monkeypatch.delenv("WRITER", raising=False)
    settings = ExperienceConfig(writer_api_key="$WRITER")
    with pytest.raises(ConfigError, match="WRITER is not set"):
        ServedWriter(settings, "http://127.0.0.1:1")


def tokenizer_with_turns():
    tokenizer = characters()
    tokenizer.chat_template = SimpleNamespace(
        render=lambda messages, arguments, day: f"<{messages[0]['content']}>"
    )
    return tokenizer


class Engines:
    """Answers with the prompt's text, turned around."""

    async def rollouts(self, step, prompts, *, num_samples, max_tokens):
        assert (num_samples, max_tokens) == (1, 30)
        groups = []
        for prompt in prompts:
            completion = SimpleNamespace(text="".join(map(chr, prompt.token_ids[::-1])))
            groups.append(SimpleNamespace(completions=(completion,)))
        return groups


def test_the_policy_is_asked_in_its_chat_template_what_fits():
    config = recipe(d={}, rollout={"max_model_len": 40, "max_new_tokens": 20})
    settings = ExperienceConfig(writer_max_tokens=30)
    ask = writer_of(config, settings, dispatcher=Engines(), tokenizer=tokenizer_with_turns())
    assert isinstance(ask, PolicyWriter)
    texts = ["ab", "x" * 9, "no @", "x" * 8]
    assert asyncio.run(ask(texts)) == [">ba<", None, None, f">{'x' * 8}<"]
    assert asyncio.run(ask(["x" * 99])) == [None]


def test_a_policy_without_chat_template_writes_no_lessons():
    with pytest.raises(DataError, match=r"no chat template[\s\S]*writer_url"):
        writer_of(recipe(d={}), ExperienceConfig(), dispatcher=Engines(), tokenizer=characters())
