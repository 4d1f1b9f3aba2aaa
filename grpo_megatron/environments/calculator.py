"""Questions whose arithmetic a tool does."""

from collections.abc import Mapping
from typing import Any

from grpo_megatron.environments.arithmetic import ArithmeticFault, evaluate, written
from grpo_megatron.environments.registry import traits
from grpo_megatron.environments.tools import (
    NUMERIC_MATCH,
    FinalAnswer,
    ToolEnvironment,
    ToolError,
    tool,
)


@traits(check=FinalAnswer.check)
class Calculator(ToolEnvironment):
    """One tool, `calculate`. The outcome is `reward` of the answer that ends the episode, a reward
    function of texts with its `reward_arguments`."""

    def __init__(
        self, *, reward: str = NUMERIC_MATCH, reward_arguments: Mapping[str, Any] | None = None
    ):
        super().__init__()
        self._final = FinalAnswer(reward, reward_arguments)

    @tool("Compute an arithmetic expression exactly.", expression="for example (3 + 4) * 12 / 5")
    async def calculate(self, expression: str) -> str:
        """The value as text; ToolError where the text is no arithmetic or too large."""
        try:
            return written(evaluate(expression))
        except ArithmeticFault as error:
            raise ToolError(str(error)) from error

    async def score(self, text: str) -> float:
        """Return the reward of the answer."""
        return await self._final.score(text, self.problem)
