"""Environments of the library `verifiers` (0.1, `load_environment`); needs that package.

The library's own loop runs the episode: it asks its client for an answer, and this client is the
policy. So whatever an environment does between turns, its stop conditions and its rubric, is done
as the library does it.

`python -m grpo_megatron.environments.verifiers_adapter ENV FILE` writes the rows of the data set
that an environment has, for a domain with `source = "file"`."""

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from grpo_megatron.config.imports import imported
from grpo_megatron.data.conversation import MESSAGES, Message
from grpo_megatron.environments.command_line import keyword_arguments
from grpo_megatron.environments.protocol import (
    Observation,
    Outcome,
    Reply,
    Step,
    ToolSchema,
    Unscorable,
)
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import History, first_messages, tool_schema
from grpo_megatron.errors import EpisodeError, GrpoMegatronError, raised_as
from grpo_megatron.files import write_atomically
from grpo_megatron.types import Problem

_INFO = "info"


def _check(*, environment: str, arguments: Mapping[str, Any] | None = None) -> None:
    loaded = load(environment, arguments)
    if loaded.requires_group_rollouts:
        raise EpisodeError(
            f"{environment} scores whole groups, and an episode is scored by itself",
            remedy="use an environment whose rubric has rewards of single episodes only",
        )


@traits(needs=("verifiers",), check=_check, network=True)
class VerifiersEnvironment:
    """An episode of `environment`, a name as `load_environment` takes it or `module:function`, made
    with `arguments` once a process.

    The problem's metadata may have `info`, as rows of the library do. A call that could not be read
    is passed on as text. The outcome is the rubric's reward, its metrics those of the rubric; the
    seed decides nothing here. An environment that rewrites its conversation is unscorable."""

    def __init__(self, *, environment: str, arguments: Mapping[str, Any] | None = None):
        self._name = environment
        self._environment = load(environment, arguments)
        self._asked: asyncio.Queue[tuple[list[Message], tuple[ToolSchema, ...]]] = asyncio.Queue()
        self._replies: asyncio.Queue[Reply] = asyncio.Queue()
        self._episode: asyncio.Task[Any] | None = None
        self._conversation: list[Message] = []
        self._history = History()

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Start the library's loop, until it asks the policy for the first time."""
        row = {
            "prompt": [dict(message) for message in first_messages(problem)],
            "answer": problem.answer,
            "info": problem.metadata.get(_INFO) or {},
            "example_id": 0,
        }
        client = _policy_client(self._exchange)
        self._episode = asyncio.create_task(self._environment.rollout(row, client, "policy", {}))
        asked = await self._next()
        if asked is None:
            state = self._state()
            raise Unscorable(f"it ended before the first turn ({state.get('stop_condition')})")
        self._conversation, tools = asked
        self._history.add(self._conversation)
        return Observation(tuple(self._conversation), tools, self._history.state)

    async def step(self, reply: Reply) -> Step:
        """Hand the turn to the loop, until it asks again or ends."""
        self._replies.put_nowait(reply)
        asked = await self._next()
        if asked is None:
            return Step(done=True, state=self._history.state, outcome=await self._outcome())
        conversation, _ = asked
        known = len(self._conversation)
        if conversation[:known] != self._conversation or len(conversation) < known + 2:
            raise Unscorable("the environment rewrites its conversation")
        said = conversation[known + 1 :]  # behind the turn itself
        self._conversation = conversation
        self._history.add(said)
        return Step(tuple(said), state=self._history.state)

    async def close(self) -> None:
        """End the loop, which lets the environment clean up."""
        episode = self._episode
        self._episode = None
        if episode is not None:
            episode.cancel()
            await asyncio.gather(episode, return_exceptions=True)

    async def _next(self) -> tuple[list[Message], tuple[ToolSchema, ...]] | None:
        """Return what the policy is asked next; None where the episode has ended."""
        assert self._episode is not None, "reset comes first"
        asking = asyncio.create_task(self._asked.get())
        try:
            await asyncio.wait({asking, self._episode}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            return None
        finally:
            asking.cancel()

    def _state(self) -> Any:
        """Return what the loop has left behind. Unscorable where an error ended it."""
        assert self._episode is not None
        state = self._episode.result()
        error = state.get("error")
        if error is not None:
            cause = ""
            if error.__cause__ is not None:
                cause = f", from {error.__cause__!r}"
            raise Unscorable(f"the environment failed: {error!r}{cause}")
        return state

    async def _outcome(self) -> Outcome:
        state = self._state()
        rubric = self._environment.rubric
        await rubric.score_rollout(state)
        await rubric.cleanup(state)
        metrics = {name: float(value) for name, value in (state["metrics"] or {}).items()}
        return Outcome(float(state["reward"]), metrics)

    async def _exchange(self, prompt: Sequence[Any], tools: Sequence[Any] | None) -> Reply:
        """Return the policy's answer to a prompt of the library."""
        schemas = []
        for found in tools or ():
            schemas.append(tool_schema(found.name, found.description, found.parameters))
        self._asked.put_nowait(([_plain(message) for message in prompt], tuple(schemas)))
        return await self._replies.get()


def load(environment: str, arguments: Mapping[str, Any] | None = None) -> Any:
    """Return the library's environment, made once a process. Raises EpisodeError where it cannot be
    made."""
    return _loaded(environment, json.dumps(dict(arguments or {}), sort_keys=True))


@lru_cache(maxsize=8)
def _loaded(environment: str, arguments: str) -> Any:
    with raised_as(
        EpisodeError,
        f"{environment} needs the package verifiers",
        ImportError,
        remedy="pip install 'grpo-megatron[agents]'",
    ):
        import verifiers

    given = json.loads(arguments)
    make: Callable[..., Any] = partial(verifiers.load_environment, environment)
    if ":" in environment:
        make = imported(environment, EpisodeError, "environment of verifiers")
    with raised_as(
        EpisodeError,
        f"verifiers cannot make {environment}",
        remedy="install the package of the environment, and see what it takes",
    ):
        return make(**given)


def _plain(message: Any) -> Message:
    """Return a message of the library in the form of chat templates."""
    found: dict[str, Any] = message.model_dump(exclude_none=True)
    content = found.get("content", "")
    if not isinstance(content, str):
        texts = [part.get("text") for part in content]
        if None in texts:
            raise Unscorable("a message has a part that is no text")
        content = "".join(texts)
    plain: Message = {"role": found["role"], "content": content}
    for name in ("tool_call_id", "name"):
        if name in found:
            plain[name] = found[name]
    return plain


def _policy_client(exchange: Any) -> Any:
    """Return a client of the library whose model is the policy."""
    from verifiers.clients import Client
    from verifiers.types import Response, ResponseMessage, ToolCall

    class PolicyClient(Client):  # type: ignore[misc]
        """A client of which only `get_response` is called."""

        def setup_client(self, config: Any) -> Any:
            raise NotImplementedError

        async def to_native_tool(self, tool: Any) -> Any:
            raise NotImplementedError

        async def to_native_prompt(self, messages: Any) -> Any:
            raise NotImplementedError

        async def get_native_response(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

        async def raise_from_native_response(self, response: Any) -> None:
            raise NotImplementedError

        async def from_native_response(self, response: Any) -> Any:
            raise NotImplementedError

        async def close(self) -> None:
            pass

        async def get_response(
            self, prompt: Any, model: Any, sampling_args: Any, tools: Any = None, **_: Any
        ) -> Any:
            reply = await exchange(prompt, tools)
            calls = []
            for number, call in enumerate(reply.tool_calls):
                arguments = json.dumps(dict(call.arguments))
                identity = call.id or f"call-{number}"
                calls.append(ToolCall(id=identity, name=call.name, arguments=arguments))
            message = ResponseMessage(
                content=reply.text,
                tool_calls=calls or None,
                finish_reason="tool_calls" if calls else "stop",
                is_truncated=False,
            )
            return Response(id="policy", created=0, model="policy", message=message)

    return PolicyClient(None)


def write_rows(environment: str, path: Path, arguments: Mapping[str, Any] | None = None) -> int:
    """Write the rows of the environment's data set as JSON lines: `messages`, `answer`, `info`.
    Returns their number. The file is there when it is whole; an earlier one stays until then. What
    is no file, `/dev/stdout` for example, is written to, and a link followed.

    EpisodeError where the environment cannot be made, or the file not be written; it names the
    first row that cannot be one."""
    lines = []
    for number, row in enumerate(load(environment, arguments).get_dataset(), start=1):
        with raised_as(
            EpisodeError,
            f"row {number} of the data set cannot be written",
            (KeyError, TypeError, ValueError, RecursionError),
            where=environment,
            remedy="a row has messages as its prompt, and `answer` and `info` are values of JSON",
        ):
            lines.append(json.dumps(_written_row(row)) + "\n")
    with raised_as(EpisodeError, "rows cannot be written", OSError, where=path):
        if path.is_symlink() or path.is_fifo() or path.is_char_device():  # /dev/stdout
            path.write_text("".join(lines), encoding="utf-8")
        else:
            write_atomically(path, "".join(lines))
    return len(lines)


def _written_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of a data set as the file has it. TypeError where its prompt is no messages."""
    messages = []
    for message in row["prompt"]:
        if not isinstance(message, Mapping):
            raise TypeError(f"its prompt has {type(message).__name__} in place of a message")
        messages.append({name: value for name, value in message.items() if value is not None})
    answer = row.get("answer")
    if answer is None:
        answer = ""
    written = {MESSAGES: messages, "answer": answer}
    if row.get(_INFO):
        written[_INFO] = row[_INFO]
    return written


def main() -> None:
    """Write rows: `ENV FILE [ARGUMENTS as JSON]`."""
    parser = argparse.ArgumentParser(prog="python -m grpo_megatron.environments.verifiers_adapter")
    parser.add_argument("environment", help="as load_environment takes it, or module:function")
    parser.add_argument("file", type=Path, help="for the rows, as JSON lines")
    parser.add_argument(
        "arguments",
        nargs="?",
        type=keyword_arguments,
        default={},
        help="of the environment, as JSON",
    )
    given = parser.parse_args()
    try:
        num_rows = write_rows(given.environment, given.file, given.arguments)
        print(f"{num_rows} rows in {given.file}")
    except GrpoMegatronError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
