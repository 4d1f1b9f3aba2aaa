"""Environments of an OpenEnv server (https://github.com/huggingface/OpenEnv), as those of a run."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_megatron.data.conversation import Message
from grpo_megatron.environments.openenv_actions import (
    LIST_TOOLS,
    Act,
    ServerTools,
    TextField,
    asks_for_tools,
    form_of,
    shown_observation,
    tools_of,
)
from grpo_megatron.environments.openenv_session import Observed, OpenEnvSession, RefusedAction
from grpo_megatron.environments.protocol import (
    Observation,
    Outcome,
    Reply,
    Step,
    ToolCall,
    ToolSchema,
    Unscorable,
)
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import (
    History,
    ToolError,
    append_error,
    messages_with,
    result_message,
)
from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards.argument_checks import check_number, check_url
from grpo_megatron.types import Problem

RESET = "reset"
"""What a row says of its episode: parameters of the reset."""

_OUTCOMES = ("sum", "last")


def _check(
    *,
    url: str,
    text_field: str | None = None,
    action: Mapping[str, Any] | None = None,
    observation: Sequence[str] = (),
    reset: Mapping[str, Any] | None = None,
    outcome: str = "sum",
    timeout_s: float = 600.0,
    **_: object,
) -> None:
    check_url("url", url)
    check_number("timeout_s", timeout_s, above=0)
    for name, table in (("action", action), ("reset", reset)):
        if table is not None and not isinstance(table, Mapping):
            raise EpisodeError(f"{name} = {table!r} is no table", remedy=f"{name} = {{ … }}")
    if isinstance(observation, str) or not all(isinstance(name, str) for name in observation):
        raise EpisodeError(
            f"observation = {observation!r} are no names of fields",
            remedy='for example observation = ["text"]',
        )
    if text_field is not None and (not isinstance(text_field, str) or not text_field):
        raise EpisodeError(
            f"text_field = {text_field!r} is no name of a field",
            remedy='for example text_field = "message"',
        )
    if outcome not in _OUTCOMES:
        raise EpisodeError(f"outcome = {outcome!r}", remedy='set outcome to "sum" or "last"')


@traits(check=_check, network=True)
class OpenEnvironment:
    """An episode of the server at `url`, which has a session for each.

    Turns become actions by the schema that the server has of them (`openenv_actions`): the text of
    a turn, where they have one field, or that `text_field` names; else calls. Each action has the
    fields `action` too. The policy reads the fields `observation`, or all. An episode begins with
    the parameters `reset`, those of its row, and its seed. The outcome is the sum of all rewards or
    the last one; its metrics are `actions` and `refused_actions`, calls of tools that failed among
    the latter.

    Unscorable is an episode whose server fails or is full."""

    def __init__(
        self,
        *,
        url: str,
        text_field: str | None = None,
        action: Mapping[str, Any] | None = None,
        observation: Sequence[str] = (),
        reset: Mapping[str, Any] | None = None,
        outcome: Literal["sum", "last"] = "sum",
        api_key: str | None = None,
        timeout_s: float = 600.0,
    ):
        headers = {}
        if api_key is not None:
            headers["Authorization"] = f"Bearer {api_key}"
        self._url = url
        self._session = OpenEnvSession(url, headers, timeout_s)
        self._text_field = text_field
        self._constants = dict(action or {})
        self._shown_fields = tuple(observation)
        self._reset = dict(reset or {})
        self._takes_last = outcome == "last"
        self._history = History()
        self._form: TextField | Act | ServerTools | None = None
        self._is_done = False
        self._rewards: list[float] = []
        """Of the actions of this turn."""
        self._worth = 0.0
        self._num_actions = 0
        self._num_refused = 0

    async def reset(self, problem: Problem, seed: int) -> Observation:
        """Begin a session and an episode."""
        schema = await self._session.connect()
        of_row = problem.metadata.get(RESET) or {}
        if not isinstance(of_row, Mapping):
            raise Unscorable(f"the row's {RESET!r} is no table of parameters: {of_row!r}")
        observed = await self._session.reset({"seed": seed, **self._reset, **of_row})
        if observed.done:
            raise Unscorable(f"{self._url} ends the episode before the first turn")
        tools = await self._tools(schema)
        messages = messages_with(problem, self._shown(observed))
        self._history.add(messages)
        return Observation(messages, tools, self._history.state, self._outcome())

    async def step(self, reply: Reply) -> Step:
        """Take the actions of a turn, one after the other."""
        self._rewards.clear()
        if isinstance(self._form, TextField):
            told = await self._answer_to(reply.text, self._form)
            messages: list[Message] = [{"role": "user", "content": told}]
        elif reply.tool_calls or reply.error is not None:
            messages = await self._call_all(reply)
        else:  # a turn that does nothing is the policy's last
            self._is_done = True
            messages = []
        self._history.add(messages)
        if self._is_done:
            messages = []
        reward = self._turn_reward()
        return Step(
            tuple(messages), reward, self._is_done, self._history.state, outcome=self._outcome()
        )

    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _tools(self, schema: Mapping[str, Any]) -> tuple[ToolSchema, ...]:
        """Decide how turns become actions. Returns the tools that the policy may call."""
        if self._text_field is None and not self._constants and asks_for_tools(schema):
            listed = await self._session.step(LIST_TOOLS)
            self._form = tools_of(listed.observation)
            return self._form.tools
        self._form = form_of(schema, self._text_field, self._constants)
        if isinstance(self._form, TextField):
            return ()
        return self._form.tools

    async def _call_all(self, reply: Reply) -> list[Message]:
        """Return results of calls, until one ends the episode."""
        messages = []
        for call in reply.tool_calls:
            if self._is_done:
                break
            messages.append(result_message(call, await self._call(call)))
        if reply.error is not None and not self._is_done:
            self._num_refused += 1
            append_error(messages, f"error: {reply.error}")
        return messages

    async def _call(self, call: ToolCall) -> str:
        form = self._form
        assert isinstance(form, Act | ServerTools), "only tools are called"
        try:
            observed = await self._act(form.action(call))
            if isinstance(form, ServerTools):
                return form.result(observed.observation)
            return self._shown(observed)
        except ToolError as error:
            self._num_refused += 1
            return f"error: {error}"

    async def _answer_to(self, text: str, form: TextField) -> str:
        """Return what the server observes behind a turn that is a text."""
        try:
            return self._shown(await self._act(form.action(text)))
        except RefusedAction as error:
            self._num_refused += 1
            return f"error: {error}"

    async def _act(self, action: Mapping[str, Any]) -> Observed:
        self._history.add(dict(action))  # a server may have a state, and need not show it
        observed = await self._session.step(action)
        self._num_actions += 1
        self._is_done = observed.done
        if observed.reward is not None:
            self._rewards.append(float(observed.reward))
        return observed

    def _turn_reward(self) -> float:
        """Return the reward of a turn, and add it to what the episode is worth; NaN: none."""
        if not self._rewards:
            return math.nan
        reward = sum(self._rewards)
        if self._takes_last:
            self._worth = self._rewards[-1]
        else:
            self._worth += reward
        return reward

    def _shown(self, observed: Observed) -> str:
        return shown_observation(observed.observation, self._shown_fields)

    def _outcome(self) -> Outcome:
        metrics = {
            "actions": float(self._num_actions),
            "refused_actions": float(self._num_refused),
        }
        return Outcome(self._worth, metrics)
