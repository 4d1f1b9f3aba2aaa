"""What an environment hands over is looked at before anybody uses it."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from grpo_megatron.data.conversation import Message
from grpo_megatron.data.environment_text import cleaned, cut
from grpo_megatron.environments.protocol import Observation, Outcome, Step
from grpo_megatron.environments.wire import LONGEST_LINE, too_long
from grpo_megatron.errors import EpisodeError

_DEEPEST = 1000
_REMEDY = "see grpo_megatron/environments/protocol.py for what it returns"


def checked_observation(
    found: object, characters: int, of_recipe: Sequence[Message] = ()
) -> Observation:
    """Return the observation, with messages of at most `characters`, but for those that are equal
    to one of the recipe: they are a question, however long. Raises EpisodeError where it is no
    observation, holds something of another type, or more than a line of 8 MiB takes."""
    if not isinstance(found, Observation):
        raise _fault(f"reset returned {type(found).__name__}, not an Observation")
    messages = _messages(found.messages, "reset")
    if not messages:
        raise _fault("reset returned no message: an episode begins with one")
    for schema in found.tools:
        is_function = isinstance(schema, dict) and isinstance(schema.get("function"), dict)
        if not is_function or not isinstance(schema["function"].get("name"), str):
            raise _fault('a tool is no {"type": "function", "function": {"name": …}}')
    _require(found.state, str, "state")
    messages = _cut_all(messages, characters, of_recipe)
    outcome = _outcome(found.outcome)
    _refuse_more_than_a_line((messages, found.tools, found.state, outcome.metrics))
    return replace(found, messages=messages, tools=tuple(found.tools), outcome=outcome)


def checked_step(found: object, characters: int) -> Step:
    """Return the step, with messages of at most `characters`. Raises EpisodeError where it is no
    step, holds something of another type, or more than a line of 8 MiB takes, or neither replies
    nor ends the episode."""
    if not isinstance(found, Step):
        raise _fault(f"step returned {type(found).__name__}, not a Step")
    messages = _messages(found.messages, "step")
    for name in ("done", "spoilt"):
        _require(getattr(found, name), bool, name)
    _require(found.state, str, "state")
    ends = found.done or found.spoilt
    if not ends and not messages:
        raise _fault("step returned no message although the episode is not done")
    outcome = None
    metrics: Mapping[str, float] = {}
    if found.outcome is not None:
        outcome = _outcome(found.outcome)
        metrics = outcome.metrics
    if found.done and not found.spoilt and outcome is None:
        raise _fault("the last step has no outcome")
    reward = _number(found.reward, "reward")
    messages = _cut_all(messages, characters)
    _refuse_more_than_a_line((messages, found.state, metrics))
    return replace(found, messages=messages, reward=reward, outcome=outcome)


def _messages(found: Any, method: str) -> tuple[Message, ...]:
    if isinstance(found, str) or not isinstance(found, Sequence):
        raise _fault(
            f"the messages of {method} are {type(found).__name__}, not a tuple of messages"
        )
    for message in found:
        is_message = (
            isinstance(message, dict)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
        )
        if not is_message:
            raise _fault(f'a message of {method} is no {{"role": …, "content": text}}')
    return tuple(found)


def _cut_all(
    messages: Sequence[Message], characters: int, of_recipe: Sequence[Message] = ()
) -> tuple[Message, ...]:
    changed = []
    for message in messages:
        if message not in of_recipe:
            content = cleaned(cut(message["content"], characters))
            message = {**message, "content": content}
        changed.append(message)
    return tuple(changed)


def _refuse_more_than_a_line(values: Sequence[Any]) -> None:
    """Raise EpisodeError where the texts and items of `values` alone are more than a line may be
    long. To encode them could take more memory than the process has, of which msgspec's encoder
    dies, and all other episodes of the process with it."""
    size = 0
    containers: list[tuple[Any, int]] = [(values, 0)]
    while containers:
        container, depth = containers.pop()
        items = container
        size += len(container)
        if isinstance(container, Mapping):
            items = itertools.chain.from_iterable(container.items())
            size += len(container)
        if size > LONGEST_LINE:
            raise EpisodeError(too_long(size))
        if depth > _DEEPEST:  # it may contain itself; the encoder refuses it
            continue
        for item in items:
            if isinstance(item, str):
                size += len(item)
            elif isinstance(item, Mapping | list | tuple):
                containers.append((item, depth + 1))
    if size > LONGEST_LINE:
        raise EpisodeError(too_long(size))


def _outcome(found: object) -> Outcome:
    if not isinstance(found, Outcome):
        raise _fault(f"the outcome is {type(found).__name__}, not an Outcome")
    metrics = {}
    for name, value in dict(found.metrics).items():
        _require(name, str, "a metric's name")
        metrics[name] = _number(value, f"metric {name!r}")
    return Outcome(_number(found.reward, "the outcome's reward"), metrics)


def _number(value: Any, name: str) -> float:
    """Return a finite float, or NaN."""
    is_number = hasattr(value, "__float__") or hasattr(value, "__index__")
    if isinstance(value, str) or not is_number:
        raise _fault(f"{name} is {type(value).__name__}, not a number")
    number = float(value)
    if math.isinf(number):
        raise _fault(f"{name} is infinite")
    return number


def _require(value: object, kind: type, name: str) -> None:
    if not isinstance(value, kind):
        raise _fault(f"{name} is {type(value).__name__}, not {kind.__name__}")


def _fault(what: str) -> EpisodeError:
    return EpisodeError(what, remedy=_REMEDY)
