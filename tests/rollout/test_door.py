"""The door, asked by OpenAI's own client and by clients that are up to no good."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import openai
import pytest

from grpo_megatron.config.presets import load_preset
from grpo_megatron.data.chat_template import ChatTemplate
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.data.tokenizer import load_tokenizer
from grpo_megatron.data.turn_tokens import TurnTokens
from grpo_megatron.errors import EngineError
from grpo_megatron.rollout.conversation_session import ConversationSession
from grpo_megatron.rollout.door import LARGEST_BODY, Door
from grpo_megatron.rollout.turn_sampler import TurnSampler
from grpo_megatron.types import require_sound
from tests.rollout.scripted import (
    CALL,
    TOOL,
    Policy,
    limits,
    read_reply,
    require_as_sampled,
    sampler_of,
)

QUESTION = {"role": "user", "content": "12*34"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, load_preset("tiny-qwen3-moe-agent"))
    return load_tokenizer(directory)


@pytest.fixture(scope="module")
def sampler(tokenizer):
    return sampler_of(tokenizer)


def through(policy, sampler, program, **changes):
    """The record of a session that `program(client, opened)` drives with OpenAI's client."""

    async def run():
        session = ConversationSession(policy, sampler, limits(**changes))
        async with Door("127.0.0.1") as door:
            with door.serving(session) as opened:
                client = openai.AsyncOpenAI(base_url=opened.url, api_key=opened.key, max_retries=0)
                async with client:
                    await program(client, opened)
                found = session.completion(1.0)
        return found

    found = asyncio.run(run())
    if found is not None:
        require_sound(found, "p")
        require_as_sampled(policy, found)
    return found


async def refused(asked):
    """The error of a request, as OpenAI's client raises it."""
    with pytest.raises(openai.APIStatusError) as caught:
        await asked
    return caught.value


def test_openais_client_plays_an_episode_with_a_tool(tokenizer, sampler):
    policy = Policy(tokenizer, CALL, "408")

    async def program(client, opened):
        messages = [QUESTION]
        answer = await client.chat.completions.create(
            model="gpt-4o",
            messages=messages,
            tools=[TOOL],
            temperature=0,
            parallel_tool_calls=False,
        )
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.content is None
        [call] = choice.message.tool_calls
        assert call.function.name == "calculate" and answer.model == "gpt-4o"
        assert json.loads(call.function.arguments) == {"expression": "12*34"}
        assert answer.usage.total_tokens == len(policy.asked[0][0]) + len(policy.sampled[0])
        # as the client keeps them: an object of the answer among tables
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "408"}]
        answer = await client.chat.completions.create(model="x", messages=messages, tools=[TOOL])
        assert answer.choices[0].message.content == "408"
        assert answer.choices[0].finish_reason == "stop"

    found = through(policy, sampler, program)
    assert len(found.turns) == 2 and found.earlier == ()
    assert "temperature" not in policy.asked[0][1]


def test_a_stream_says_the_same(tokenizer, sampler):
    policy = Policy(tokenizer, f"so: {CALL}", "408")

    async def program(client, opened):
        stream = await client.chat.completions.create(
            model="x",
            messages=[QUESTION],
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(delta.content or "" for delta in deltas) == "so: "
        [call] = [call for delta in deltas for call in delta.tool_calls or ()]
        assert chunks[-1].usage.completion_tokens == len(policy.sampled[0])
        assert chunks[-2].choices[0].finish_reason == "tool_calls"
        reply = {
            "role": "assistant",
            "content": "so: ",
            "tool_calls": [call.model_dump(exclude={"index"})],
        }
        result = {"role": "tool", "tool_call_id": call.id, "content": "408"}
        async with client.chat.completions.stream(
            model="x", messages=[QUESTION, reply, result], tools=[TOOL]
        ) as stream:
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == "408"

    assert len(through(policy, sampler, program).turns) == 2


def test_stop_strings(tokenizer, sampler):
    policy = Policy(tokenizer, "a;b;c")

    async def program(client, opened):
        for stop, text in ((";", "a"), ([";c", "x"], "a;b"), ("", "a;b;c")):
            answer = await client.chat.completions.create(model="x", messages=[QUESTION], stop=stop)
            assert answer.choices[0].message.content == text
            assert answer.choices[0].finish_reason == "stop"
        policy.sampled[0] = policy.sampled[0][:2]
        policy.sampled[1] = policy.sampled[1][:5]

    assert len(through(policy, sampler, program).sequences) == 3


def test_models(tokenizer, sampler):
    async def program(client, opened):
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("gpt-4o")).id == "gpt-4o"

    assert through(Policy(tokenizer, "a"), sampler, program) is None


def test_keys_are_of_one_session(tokenizer, sampler):
    policies = [Policy(tokenizer, text) for text in ("a", "b")]

    async def run():
        sessions = [ConversationSession(policy, sampler, limits()) for policy in policies]
        async with Door("127.0.0.1") as door:
            with door.serving(sessions[0]) as first, door.serving(sessions[1]) as second:
                # equal conversations, which have nothing to do with one another
                answers = [await ask(door.url, opened.key) for opened in (first, second)]
                wrong = [await ask(door.url, key) for key in (first.key[:-1], "", None)]
            wrong.append(await ask(door.url, first.key))  # of a session that has ended
        return answers, wrong, [session.completion(1.0) for session in sessions]

    answers, wrong, records = asyncio.run(run())
    texts = [json.loads(body)["choices"][0]["message"]["content"] for _, body in answers]
    assert texts == ["a", "b"]
    assert [status for status, _ in wrong] == [401] * 4
    for policy, record in zip(policies, records, strict=True):
        require_as_sampled(policy, record)
        assert len(record.turns) == 1


async def ask(url, key, body: object = None, path="/chat/completions", method="POST"):
    """(status, body) of a bare HTTP request."""
    headers = {}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    if body is None:
        body = {"model": "x", "messages": [QUESTION]}
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url + path, data=body, headers=headers) as response,
    ):
        return response.status, await response.read()


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 2}, "n", "one reply at a time"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 stop strings"),
        ({"stop": 5}, None, "no request"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not constrained"),
        ({"tool_choice": "required", "tools": [TOOL]}, "tool_choice", "cannot be forced"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "bias"),
        ({"logprobs": True}, "logprobs", "log-probs"),
        ({"functions": [{"name": "f"}]}, "functions", "use `tools`"),
        ({"modalities": ["audio"]}, "modalities", "text"),
        ({"max_tokens": 0}, "max_tokens", "at least one token"),
        ({"max_completion_tokens": -3}, "max_tokens", "at least one token"),
        ({"messages": []}, "messages", "no message"),
        ({"tools": [{"type": "function"}]}, "tools", "a tool is"),
        ({"tools": [TOOL] * 300}, "tools", "at most 256"),
        ({"messages": "hello"}, None, "no request"),
        ({"messages": [5]}, None, "no request"),
        ({"max_tokens": "many"}, None, "no request"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None, "no text"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, None, "template"),
    ],
)
def test_what_is_refused_is_named(tokenizer, sampler, fields, param, words):
    policy = Policy(tokenizer, "a")

    async def program(client, opened):
        body = {"model": "x", "messages": [QUESTION], **fields}
        status, answer = await ask(opened.url, opened.key, body)
        error = json.loads(answer)["error"]
        assert (status, error["param"]) == (400, param) and words in error["message"]
        await client.chat.completions.create(model="x", messages=[QUESTION])

    assert len(through(policy, sampler, program).turns) == 1


def test_a_call_that_the_template_refuses_is_an_error_of_the_request(tokenizer, sampler):
    policy = Policy(tokenizer, "a")

    async def program(client, opened):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages = [QUESTION, {"role": "assistant", "tool_calls": [call] * 2}]
        with pytest.raises(openai.BadRequestError, match="one call at once"):
            await client.chat.completions.create(model="x", messages=messages)
        assert not opened.failure.done()

    def turn_tokens(tools):
        refuses = "{% if messages[-1].tool_calls %}{{ raise_exception('one call at once') }}"
        source = load_preset("tiny-qwen3-moe-agent").tokenizer["chat_template"]
        template = ChatTemplate(refuses + "{% endif %}" + source, {}, "x")
        return TurnTokens(tokenizer, template, tools=tools)

    guarded = TurnSampler(turn_tokens=turn_tokens, read_reply=read_reply, decode=tokenizer.decode)
    assert through(policy, guarded, program) is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"[]", 400),
        (b"\xff\xfe", 400),
        (b"[" * 100_000, 400),
        (b'{"messages": "\\ud800"}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "n": NaN}', 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}], "seed": 1e999}', 400),
        (b'{"messages": [], "user": "\\ud800", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"', 400),
        (b'{"messages": [{"role": "user", "content": "' + b"x" * LARGEST_BODY + b'"}]}', 413),
    ],
)
def test_bodies_that_are_no_requests(tokenizer, sampler, body, status):
    async def program(client, opened):
        found, answer = await ask(opened.url, opened.key, body)
        assert found == status and json.loads(answer)["error"]["message"]

    assert through(Policy(tokenizer, "a"), sampler, program) is None


def test_half_of_a_character_is_no_text_and_refuses_nothing(tokenizer, sampler):
    """A program that cuts a text within a character sends one."""
    policy = Policy(tokenizer, "a")

    async def program(client, opened):
        message = {**QUESTION, "content": "1\ud83d", "name": "\udc00"}
        body = {"model": "\ud83d", "messages": [message], "\ud83d": 1}
        status, answer = await ask(opened.url, opened.key, body)
        assert status == 200 and json.loads(answer)["model"] == "\ufffd"

    through(policy, sampler, program)
    tokens = [tokenizer.token_text(token) for token in policy.asked[0][0]]
    assert tokens[:3] == ["<|user|>", "1", "?"]


def test_other_paths_are_answered_in_openais_form(tokenizer, sampler):
    async def program(client, opened):
        error = await refused(client.responses.create(model="x", input="hello"))
        assert error.status_code == 404 and "/v1/responses" in error.message
        status, _ = await ask(opened.url, opened.key, method="GET")
        assert status == 405

    assert through(Policy(tokenizer, "a"), sampler, program) is None


def test_an_episode_that_is_over_has_one_code(tokenizer, sampler):
    async def program(client, opened):
        messages = [QUESTION]
        for _ in range(2):
            answer = await client.chat.completions.create(model="x", messages=messages)
            messages += [answer.choices[0].message, QUESTION]
        for more in (messages, [QUESTION]):
            error = await refused(client.chat.completions.create(model="x", messages=more))
            assert (error.status_code, error.code) == (400, "episode_over")
            assert "2 turns (max_turns)" in error.message

    assert through(Policy(tokenizer, "a", "b"), sampler, program, max_turns=2).truncated


def test_ignored_fields_are_told_in_a_header(tokenizer, sampler):
    async def program(client, opened):
        response = await client.chat.completions.with_raw_response.create(
            model="x",
            messages=[QUESTION],
            temperature=0.3,
            top_p=0.5,
            extra_body={"line\nbreak": 1},
        )
        assert response.headers["x-ignored-fields"] == "temperature, top_p"

    through(Policy(tokenizer, "a"), sampler, program)


def test_a_request_whose_client_went_is_not_recorded(tokenizer, sampler):
    policy = Policy(tokenizer, "a", "b", delays=[30])

    async def program(client, opened):
        with pytest.raises(openai.APITimeoutError):
            await client.with_options(timeout=0.5).chat.completions.create(
                model="x", messages=[QUESTION]
            )
        answer = await client.chat.completions.create(model="x", messages=[QUESTION])
        assert answer.choices[0].message.content == "b"

    assert len(through(policy, sampler, program).turns) == 1


def test_an_engine_that_fails_is_told_to_who_runs_the_program(sampler):
    async def failing(*_, **__):
        raise EngineError("no engine is alive")

    async def program(client, opened):
        error = await refused(client.chat.completions.create(model="x", messages=[QUESTION]))
        assert error.status_code == 500 and "no engine is alive" in error.message
        with pytest.raises(EngineError):
            await opened.failure

    assert through(failing, sampler, program) is None
