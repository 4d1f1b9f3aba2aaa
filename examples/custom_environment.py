"""An environment of one's own: nothing is registered, a recipe names it as
`custom_environment:Warehouse`.

    environment = { name = "custom_environment:Warehouse", arguments = { most_pieces = 9 } }
    rewards = [{ function = "environment" }]

Run `grpo-megatron` from this directory, or put the module where Python finds it."""

import random

from grpo_megatron.environments.protocol import Unscorable
from grpo_megatron.environments.tools import ToolEnvironment, ToolError, tool
from grpo_megatron.types import Problem


class Warehouse(ToolEnvironment):
    """The question names two items ("bolts, nuts"); the policy looks up both and adds them up."""

    def __init__(self, *, most_pieces: int = 20):
        super().__init__()
        self._most_pieces = most_pieces
        self._stock: dict[str, int] = {}

    async def start(self, problem: Problem, seed: int) -> None:
        """Seed and question alone decide the stock: all samples of a group find the same."""
        randomness = random.Random(f"{seed} {problem.question}")
        for item in problem.question.split(", "):
            self._stock[item] = randomness.randint(0, self._most_pieces)
        if len(self._stock) < 2:  # the row's fault, not the policy's
            raise Unscorable(f"{problem.question!r} names fewer than two items")

    @tool("How many pieces of an item are in stock.", item="name of the item")
    async def pieces(self, item: str) -> str:
        """What raises ToolError is told to the policy, and the episode goes on."""
        if item not in self._stock:
            raise ToolError(f"there is no {item!r}; items: {', '.join(self._stock)}")
        return str(self._stock[item])

    async def score(self, text: str) -> float:
        """1 where the answer ends with the sum."""
        return float(text.split()[-1:] == [str(sum(self._stock.values()))])
