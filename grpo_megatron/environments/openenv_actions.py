"""How a turn of the policy becomes actions of an OpenEnv server, by the JSON schema of its actions:
a text in a field, a call whose arguments are the fields, or calls of the tools that it has."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from grpo_megatron.config.suggest import did_you_mean
from grpo_megatron.environments.protocol import ToolCall, ToolSchema
from grpo_megatron.environments.tools import ToolError, check_arguments, tool_schema
from grpo_megatron.errors import EpisodeError

ACT = "act"
"""The tool whose arguments are the fields of an action."""
METADATA = "metadata"
"""What every action and every observation may carry beside its own fields."""

LIST_TOOLS = {"type": "list_tools"}
"""The action that asks for tools."""
_OF_TOOLS = {"type", "tool_name", "arguments"}
"""Fields of the action that calls one."""


@dataclass(frozen=True, slots=True)
class TextField:
    """The text of a turn is the field `name` of an action that has `constants` beside it."""

    name: str
    constants: Mapping[str, Any]

    def action(self, text: str) -> dict[str, Any]:
        """Return the action of a turn."""
        return {**self.constants, self.name: text}


@dataclass(frozen=True, slots=True)
class Act:
    """A call of the tool `ACT` has the fields of an action, but for `constants`."""

    schema: ToolSchema
    constants: Mapping[str, Any]

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """The one tool."""
        return (self.schema,)

    def action(self, call: ToolCall) -> dict[str, Any]:
        """Return the action of a call. Raises ToolError where it is none."""
        if call.name != ACT:
            raise ToolError(f"there is no tool {call.name!r}; {did_you_mean(call.name, [ACT])}")
        check_arguments(self.schema, call.arguments)
        return {**self.constants, **call.arguments}


@dataclass(frozen=True, slots=True)
class ServerTools:
    """A call is one of a tool of the server."""

    schemas: Mapping[str, ToolSchema]

    @property
    def tools(self) -> tuple[ToolSchema, ...]:
        """In the order of the server."""
        return tuple(self.schemas.values())

    def action(self, call: ToolCall) -> dict[str, Any]:
        """Return the action of a call. Raises ToolError where it fits no tool."""
        if call.name not in self.schemas:
            raise ToolError(
                f"there is no tool {call.name!r}; {did_you_mean(call.name, self.schemas)}"
            )
        check_arguments(self.schemas[call.name], call.arguments)
        return {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}

    def result(self, observation: Mapping[str, Any]) -> str:
        """Return what the tool has returned. Raises ToolError where it failed."""
        error = observation.get("error")
        if isinstance(error, Mapping):
            raise ToolError(str(error.get("message")))
        result = observation.get("result")
        text = _text_of_result(result)
        if isinstance(result, Mapping) and result.get("is_error"):
            raise ToolError(text)
        return text


def asks_for_tools(schema: Mapping[str, Any]) -> bool:
    """Whether actions are calls of tools that the server has: it names the fields of such a call,
    or none at all, which is how a server says that it leaves actions to its tools."""
    fields = set(schema.get("properties", {}))
    fields.discard(METADATA)
    return not fields or fields == _OF_TOOLS


def tools_of(listed: Mapping[str, Any]) -> ServerTools:
    """Return the tools of the observation that answers `LIST_TOOLS`. Raises EpisodeError where it
    names none."""
    schemas = {}
    for tool in listed.get("tools") or ():
        parameters = tool.get("input_schema") or {"type": "object"}
        schemas[tool["name"]] = tool_schema(tool["name"], tool.get("description", ""), parameters)
    if not schemas:
        raise EpisodeError("the server has no tools, and its actions have no fields")
    return ServerTools(schemas)


def form_of(
    schema: Mapping[str, Any], text_field: str | None, constants: Mapping[str, Any]
) -> TextField | Act:
    """Return how turns become actions with these fields: a text where `text_field` names one, or
    where nothing else is to be chosen, else a call. Raises EpisodeError for fields that there are
    not."""
    properties = dict(schema.get("properties", {}))
    properties.pop(METADATA, None)
    named = list(constants)
    if text_field is not None:
        named.append(text_field)
    for name in named:
        if name not in properties:
            raise EpisodeError(
                f"actions of the server have no field {name!r}",
                remedy=did_you_mean(name, properties),
            )
    for name in constants:
        del properties[name]
    if text_field is None:
        text_field = _only_text(properties)
    if text_field is not None:
        return TextField(text_field, constants)
    parameters = dict(schema)
    parameters.pop("title", None)
    description = parameters.pop("description", None) or "Take an action."
    parameters["properties"] = properties
    parameters["required"] = [name for name in schema.get("required", ()) if name in properties]
    return Act(tool_schema(ACT, description, parameters), constants)


def shown_observation(observation: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the fields `names` of an observation as the policy reads them, all that have a value
    where none are named: a text by itself, else JSON. Raises EpisodeError for one that is not
    there."""
    shown = {}
    for name in names or observation:
        if name not in observation:
            raise EpisodeError(
                f"observations of the server have no field {name!r}",
                remedy=did_you_mean(name, observation),
            )
        if observation[name] is not None and (names or name != METADATA):
            shown[name] = observation[name]
    if not shown:
        return ""
    values = list(shown.values())
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return json.dumps(shown, ensure_ascii=False)


def _only_text(properties: Mapping[str, Any]) -> str | None:
    """Return the one field, if there is one and it is a text."""
    if len(properties) != 1:
        return None
    name, part = next(iter(properties.items()))
    if part.get("type") != "string" or "enum" in part:
        return None
    return name


def _text_of_result(result: Any) -> str:
    if isinstance(result, str):
        return result
    if isinstance(result, Mapping) and isinstance(result.get("content"), list):
        return "\n".join(map(_text_of_part, result["content"]))
    return msgspec.json.encode(result).decode()


def _text_of_part(part: Any) -> str:
    """Return a part of a tool's result; what is no text is named."""
    if isinstance(part, Mapping):
        text = part.get("text")
        if isinstance(text, str):
            return text
        return f"[{part.get('type', 'data')}: not shown]"
    return str(part)
