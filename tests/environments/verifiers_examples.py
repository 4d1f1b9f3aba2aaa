"""Environments of the library `verifiers`, for `test_verifiers.py`."""

from __future__ import annotations

import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"How much is {n} + 1?", "answer": str(n + 1)} for n in range(3)]


def right(completion, answer) -> float:
    """1 where the last message is the answer."""
    return float(completion[-1].content.strip() == answer)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def with_tools(max_turns: int = 5):
    rubric = vf.Rubric(funcs=[right])
    return vf.ToolEnv(
        dataset=Dataset.from_list(ROWS),
        system_prompt="Be brief.",
        tools=[add],
        rubric=rubric,
        max_turns=max_turns,
    )


class Guess(vf.MultiTurnEnv):
    """The answer is told to be right or wrong, until it is right."""

    async def env_response(self, messages, state, **kwargs):
        said = messages[-1].content
        if said == "fail":
            raise vf.InfraError("the server is away")
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "Right."}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"{said} is wrong."}]


def with_turns(max_turns: int = 3):
    rubric = vf.Rubric(funcs=[lambda state: float(state["final_env_response"] is not None)])
    return Guess(dataset=Dataset.from_list(ROWS), rubric=rubric, max_turns=max_turns)


def of_groups():
    def best(states) -> list[float]:
        return [1.0] * len(states)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[best]))
