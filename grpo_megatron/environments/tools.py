"""Environments whose replies are results of tools, and whose episode ends with an answer.

A tool is a method with plain parameters; its schema is made of its signature:

    class Clock(ToolEnvironment):
        @tool("The time at a place.", place="a city")
        async def time_at(self, place: str) -> str: ..."""

import hashlib
import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.data.conversation import Message, conversation_of, with_last_question
from grpo_megatron.environments.protocol import (
    Observation,
    Outcome,
    Reply,
    Step,
    ToolCall,
    ToolSchema,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards.registry import BoundReward, bind, to_float
from grpo_megatron.types import Problem

NUMERIC_MATCH = "grpo_megatron.rewards.functions:numeric_match"
EXACT_MATCH = "grpo_megatron.rewards.functions:exact_match"

_JSON_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}
_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list, tuple),
    "object": (Mapping,),
}
_MORE_NAMES = ("patternProperties", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "$ref")
"""Parts of a JSON schema that may name arguments beside `properties`."""
_Tool = typing.TypeVar("_Tool", bound=Callable[..., Awaitable[str]])


class ToolError(Exception):
    """A call that cannot work, for a reason that the policy is to read."""


def tool(description: str, **parameters: str) -> Callable[[_Tool], _Tool]:
    """Make a method of a `ToolEnvironment` a tool under its own name; `parameters` describes each.

    Raises EpisodeError where a parameter is no str, int, float or bool, or is not described."""

    def mark(method: _Tool) -> _Tool:
        method.schema = schema_of(method, description, parameters)  # type: ignore[attr-defined]
        return method

    return mark


def schema_of(
    method: Callable[..., Any], description: str, parameters: Mapping[str, str]
) -> ToolSchema:
    """Return the schema of a method with plain parameters; EpisodeError as by `tool`."""
    hints = typing.get_type_hints(method)
    properties = {}
    required = []
    for name, parameter in inspect.signature(method).parameters.items():
        if name == "self":
            continue
        kind = _JSON_TYPES.get(hints.get(name))
        if kind is None or name not in parameters:
            raise EpisodeError(
                f"parameter {name!r} of tool {method.__name__!r} has no plain type or description",
                where=f"{method.__module__}:{method.__qualname__}",
                remedy=f'annotate it with str, int, float or bool, and give @tool {name}="…"',
            )
        properties[name] = {"type": kind, "description": parameters[name]}
        if parameter.default is inspect.Parameter.empty:
            required.append(name)
    return tool_schema(
        method.__name__,
        description,
        {"type": "object", "properties": properties, "required": required},
    )


def tool_schema(name: str, description: str, parameters: Mapping[str, Any]) -> ToolSchema:
    """Return a tool as chat templates take it; `parameters` is a JSON schema of an object."""
    function = {"name": name, "description": description, "parameters": dict(parameters)}
    return {"type": "function", "function": function}


def check_arguments(schema: ToolSchema, arguments: Mapping[str, Any]) -> None:
    """Raise ToolError where arguments do not fit a schema: unknown, missing, or of another type.

    What JSON schemas allow is taken, 2.0 for an integer too, but for one thing: a schema that names
    `properties` and says nothing of others takes no others. A mistyped name would be ignored."""
    parameters = schema["function"]["parameters"]
    properties = parameters.get("properties", {})
    for name in parameters.get("required", ()):
        if name not in arguments:
            raise ToolError(f"argument {name!r} is missing")
    for name, value in arguments.items():
        of_argument = properties.get(name, _schema_of_others(parameters))
        if of_argument is False:
            raise ToolError(f"there is no argument {name!r}; {did_you_mean(name, properties)}")
        kind = None
        if isinstance(of_argument, Mapping):  # else it is true: anything fits
            kind = of_argument.get("type")
        if isinstance(kind, str) and not _is_of(value, kind):
            raise ToolError(f"argument {name!r} must be of type {kind}, not {_json_type(value)}")


def _schema_of_others(parameters: Mapping[str, Any]) -> Any:
    """Return the schema of arguments that `properties` does not name; False: there are none."""
    if any(part in parameters for part in _MORE_NAMES):
        return True
    return parameters.get("additionalProperties", "properties" not in parameters)


def _as_python(schema: ToolSchema, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments that fit the schema of a method, as its annotations have them: JSON's 2.0
    is 2 where it is an integer."""
    properties = schema["function"]["parameters"]["properties"]
    found = dict(arguments)
    for name, value in arguments.items():
        if properties[name]["type"] == "integer":
            found[name] = int(value)
    return found


def _is_of(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    for kind in ("boolean", "integer", "number", "string", "array", "object"):
        if _is_of(value, kind):
            return kind
    return type(value).__name__


def first_messages(problem: Problem) -> tuple[Message, ...]:
    """Return the conversation with which a problem begins: that of the recipe, or its question."""
    messages = conversation_of(problem.metadata)
    if not messages:
        messages = [{"role": "user", "content": problem.question}]
    return tuple(messages)


def messages_with(problem: Problem, told: str) -> tuple[Message, ...]:
    """Return the conversation with which a problem begins, and what an environment tells below what
    the user says last: its rules, its first state."""
    messages = first_messages(problem)
    return tuple(with_last_question(messages, lambda said: f"{said}\n\n{told}".strip()))


class History:
    """Names the state of an episode by all that its environment has said, and what was done in it
    that later turns find again."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def add(self, *said: Any) -> None:
        """Take what the environment said, or what was done, next: values of JSON."""
        self._digest.update(json.dumps(said, sort_keys=True, default=str).encode())

    @property
    def state(self) -> str:
        """16 hexadecimal digits, equal for equal histories."""
        return self._digest.hexdigest()[:16]


class FinalAnswer:
    """Scores the text that ends an episode by a reward function of texts.

    RewardError where it cannot be bound, EpisodeError where it asks for more than texts."""

    def __init__(self, reward: str, arguments: Mapping[str, Any] | None):
        self._reward: BoundReward = bind(reward, arguments)
        asked = [name for name in self._reward.context if name not in ("prompt", "metadata")]
        if asked:
            raise EpisodeError(
                f"reward {reward} asks for {asked[0]}, which an environment does not know",
                remedy="name it among the domain's rewards instead",
            )

    @classmethod
    def check(
        cls,
        *,
        reward: str = NUMERIC_MATCH,
        reward_arguments: Mapping[str, Any] | None = None,
        **_: object,
    ) -> None:
        """Raise what the constructor would."""
        cls(reward, reward_arguments)

    async def score(self, text: str, problem: Problem) -> float:
        """Return the reward of an answer to the problem; NaN: it cannot be scored."""
        context = {"prompt": problem.question, "metadata": dict(problem.metadata)}
        value = self._reward(text, problem.answer, context)
        if inspect.isawaitable(value):
            value = await value
        return to_float(value)


class ToolEnvironment:
    """Calls tools until the policy answers without a call; the answer is scored by `score`.

    A call that is malformed, unknown or fails is answered with what is wrong, and counted. Metrics
    of the outcome: `tool_calls`, `tool_errors`. Subclasses have methods under `@tool`, `score`, and
    where they need it `start` and `close`.

    States are named by what the environment said. A tool that leaves something behind for later
    calls, which its result need not show, says so by `remember`; where `names_states_by_results` is
    False, nothing but this and the problem names them."""

    problem: Problem
    names_states_by_results: ClassVar[bool] = True

    def __init__(self) -> None:
        self._history = History()
        self._num_calls = 0
        self._num_errors = 0

    async def start(self, problem: Problem, seed: int) -> None:
        """Prepare the episode; nothing, unless a subclass does."""

    async def score(self, text: str) -> float:
        """The reward of the text that ends the episode, in a subclass."""
        raise NotImplementedError

    async def close(self) -> None:
        """Give back what the episode holds; nothing, unless a subclass does."""

    def remember(self, *done: Any) -> None:
        """Take what a call did, as values of JSON, into the names of all later states: episodes
        that did something else are then in other states, whatever they were told."""
        self._history.add("done", *done)

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """The schemas of all tools, in the order of their definition."""
        return tuple(method.schema for method in self._tool_methods().values())

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin with the problem's conversation."""
        self.problem = problem
        await self.start(problem, seed)
        messages = first_messages(problem)
        self._history.add(messages)
        return Observation(messages, self.tools, self._history.state, self._outcome(0.0))

    async def step(self, reply: Reply) -> Step:
        """Return results of the calls, or the end where there are none."""
        if not reply.tool_calls and reply.error is None:
            reward = await self.score(reply.text)
            return Step(done=True, state=self._history.state, outcome=self._outcome(reward))
        messages = []
        for call in reply.tool_calls:
            messages.append(result_message(call, await self._result(call)))
        if reply.error is not None:
            self._num_calls += 1
            self._num_errors += 1
            append_error(messages, f"error: {reply.error}")
        if self.names_states_by_results:
            self._history.add(messages)
        return Step(tuple(messages), state=self._history.state, outcome=self._outcome(0.0))

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result of a tool. Raises ToolError for a call that cannot work."""
        methods = self._tool_methods()
        if name not in methods:
            raise ToolError(f"there is no tool {name!r}; {did_you_mean(name, methods)}")
        method = methods[name]
        check_arguments(method.schema, arguments)
        result: str = await method(self, **_as_python(method.schema, arguments))
        return result

    async def _result(self, call: ToolCall) -> str:
        self._num_calls += 1
        try:
            return await self.call(call.name, call.arguments)
        except ToolError as error:
            self._num_errors += 1
            return f"error: {error}"

    def _outcome(self, reward: float) -> Outcome:
        metrics = {"tool_calls": float(self._num_calls), "tool_errors": float(self._num_errors)}
        return Outcome(reward, metrics)

    @classmethod
    def _tool_methods(cls) -> dict[str, Any]:
        methods: dict[str, Any] = {}
        for base in reversed(cls.__mro__):
            for name, method in vars(base).items():
                if hasattr(method, "schema"):
                    methods[name] = method
        return methods


def append_error(messages: list[Message], error: str) -> None:
    """Append what is wrong with a call that could not be read: behind the results of the others,
    since templates want a result for each call and no more, or as the user's where there is
    none."""
    if messages:
        messages[-1]["content"] += f"\n\n{error}"
        return
    messages.append({"role": "user", "content": error})


def result_message(call: ToolCall, content: str) -> Message:
    """Return a tool's result, as chat templates take it."""
    message: Message = {"role": "tool", "name": call.name, "content": content}
    if call.id:
        message["tool_call_id"] = call.id
    return message
