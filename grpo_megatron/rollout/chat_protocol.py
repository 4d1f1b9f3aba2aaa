"""The part of OpenAI's chat completions that programs are served: requests, answers, errors.

What a program asks for is done, or refused by name, or ignored and told: it never changes how the
policy is sampled, since only what is sampled as the recipe says can be trained."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.json_bodies import read_json
from grpo_megatron.environments.protocol import ToolSchema
from grpo_megatron.rollout.conversation_session import ChatReply

MODEL = "policy"
"""The only model; requests may name any."""

_MOST_TOOLS = 256
_MOST_STOPS = 16
_MOST_IGNORED = 32
_SAMPLED_BY_RECIPE = "replies are sampled as the recipe says, so that they can be trained"


class RequestRefused(Exception):
    """A request that is not served. status: of HTTP; param: the field that is why."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status


class _StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct, frozen=True):
    """`POST /v1/chat/completions`, as far as it is read."""

    messages: list[dict[str, Any]]
    model: str = MODEL
    tools: list[ToolSchema] | None = None
    tool_choice: Any = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    stop: str | list[str] | None = None
    response_format: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, Any] | None = None
    modalities: list[str] | None = None

    @property
    def longest(self) -> int | None:
        """Tokens that the program allows a reply; None: no matter."""
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts that end a reply; an empty one ends none."""
        stops = self.stop or []
        if isinstance(stops, str):
            stops = [stops]
        return [stop for stop in stops if stop]

    @property
    def offered_tools(self) -> list[ToolSchema]:
        """None with `tool_choice = "none"`."""
        if self.tool_choice == "none":
            return []
        return self.tools or []


def read_request(body: bytes) -> tuple[ChatRequest, list[str]]:
    """Return a request, and the names of its fields that are ignored.

    RequestRefused where it is none, or wants what cannot be trained."""
    try:
        fields = read_json(body)
        request = msgspec.convert(fields, ChatRequest)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestRefused(f"the body is no request: {error}") from error
    _refuse_other_answers(request)
    _refuse_unreadable_tools(request.tools or [])
    if not request.messages:
        raise RequestRefused("there is no message", param="messages")
    if request.longest is not None and request.longest < 1:
        raise RequestRefused("a reply has at least one token", param="max_tokens")
    return request, _ignored(fields)


def _ignored(fields: Mapping[str, Any]) -> list[str]:
    """Return names that can stand in a header, of fields with a value that nobody reads."""
    known = ChatRequest.__struct_fields__
    found = []
    for name, value in fields.items():
        is_name = name.isascii() and name.isidentifier() and len(name) < 40
        if is_name and name not in known and value is not None:
            found.append(name)
    return sorted(found)[:_MOST_IGNORED]


def _refuse_other_answers(request: ChatRequest) -> None:
    """Refuse what would be answered otherwise than the program expects."""
    if request.n not in (None, 1):
        raise RequestRefused("one reply at a time (n = 1): ask again for another", param="n")
    if len(request.stops) > _MOST_STOPS:
        raise RequestRefused(f"at most {_MOST_STOPS} stop strings", param="stop")
    kind = (request.response_format or {}).get("type", "text")
    if kind != "text":
        raise RequestRefused(
            f"replies are not constrained: {_SAMPLED_BY_RECIPE}", param="response_format"
        )
    if request.tool_choice not in (None, "auto", "none"):
        raise RequestRefused(f"calls cannot be forced: {_SAMPLED_BY_RECIPE}", param="tool_choice")
    if request.logit_bias:
        raise RequestRefused(f"no bias: {_SAMPLED_BY_RECIPE}", param="logit_bias")
    if request.logprobs or request.top_logprobs:
        raise RequestRefused("log-probs are not given to programs", param="logprobs")
    if request.functions or request.function_call:
        raise RequestRefused("`functions` are not served: use `tools`", param="functions")
    if request.modalities not in (None, [], ["text"]):
        raise RequestRefused("replies are text", param="modalities")


def _refuse_unreadable_tools(tools: list[ToolSchema]) -> None:
    if len(tools) > _MOST_TOOLS:
        raise RequestRefused(f"{len(tools)} tools; at most {_MOST_TOOLS}", param="tools")
    for tool in tools:
        function = tool.get("function")
        is_named = isinstance(function, dict) and isinstance(function.get("name"), str)
        if not is_named:
            raise RequestRefused(
                'a tool is {"type": "function", "function": {"name": …, "parameters": …}}',
                param="tools",
            )


def error_body(
    message: str, *, kind: str, code: str | None = None, param: str | None = None
) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def models_body() -> dict[str, Any]:
    """`GET /v1/models`."""
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "grpo-megatron"}
    return {"object": "list", "data": [model]}


def answer_body(reply: ChatReply, request: ChatRequest, number: str) -> dict[str, Any]:
    """`chat.completion`; number: the answer's id."""
    choice = {
        "index": 0,
        "message": {"refusal": None, **reply.message},
        "finish_reason": reply.finish_reason,
        "logprobs": None,
    }
    found = _head(request, number, "chat.completion")
    return {**found, "choices": [choice], "usage": _usage(reply)}


def answer_events(reply: ChatReply, request: ChatRequest, number: str) -> Iterator[bytes]:
    """Yield the answer as server-sent events: role, text, calls, the end, usage where it is
    wanted."""
    head = _head(request, number, "chat.completion.chunk")
    for delta in _deltas(reply.message):
        yield _event({**head, "choices": [_choice(delta, None)]})
    yield _event({**head, "choices": [_choice({}, reply.finish_reason)]})
    if request.stream_options is not None and request.stream_options.include_usage:
        yield _event({**head, "choices": [], "usage": _usage(reply)})
    yield b"data: [DONE]\n\n"


def _deltas(message: Message) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": ""}
    if message.get("content"):
        yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls") or ()):
        yield {"tool_calls": [{"index": index, **call}]}


def _choice(delta: Mapping[str, Any], finish_reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}


def _event(content: Mapping[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def _head(request: ChatRequest, number: str, kind: str) -> dict[str, Any]:
    return {"id": number, "object": kind, "created": int(time.time()), "model": request.model}


def _usage(reply: ChatReply) -> dict[str, int]:
    return {
        "prompt_tokens": reply.num_prompt_tokens,
        "completion_tokens": reply.num_tokens,
        "total_tokens": reply.num_prompt_tokens + reply.num_tokens,
    }
