"""Questions for whose answer the policy may run Python, in the sandbox of programs.

Names live on from call to call: each call runs the cells of the episode again, the earlier ones
silently. An interpreter for each episode would be a process that waits for the policy most of the
time, thousands of them at once; so a waiting episode holds nothing but text, a program that crashes
or hangs takes nothing with it, and the same turns give the same episode. The price is that k calls
run k²/2 cells."""

import asyncio
import inspect
import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from grpo_megatron.environments.protocol import Unscorable
from grpo_megatron.environments.registry import BoundEnvironment, traits
from grpo_megatron.environments.tools import NUMERIC_MATCH, FinalAnswer, ToolEnvironment, tool
from grpo_megatron.errors import EpisodeError
from grpo_megatron.rewards import sandbox
from grpo_megatron.rewards.argument_checks import check_number, check_whole_number
from grpo_megatron.rewards.sandbox import MIB, Limits
from grpo_megatron.types import Problem

_INSIDE = {"/inside.py": Path(__file__).with_name("python_inside.py").read_text()}
_MOST_CHARACTERS = 1 << 20  # of all cells
_LEAST_MEMORY_MIB = 32  # twice what an interpreter starts in
_running: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


def _check(*, timeout_s: float = 4.0, memory_mib: int = 512, **arguments: Any) -> None:
    check_number("timeout_s", timeout_s, above=0)
    check_whole_number("memory_mib", memory_mib, least=_LEAST_MEMORY_MIB)
    FinalAnswer.check(**arguments)
    reason = sandbox.why_not()
    if reason:
        raise EpisodeError(f"programs cannot be isolated: {reason}", remedy=sandbox.REMEDY)


@traits(check=_check)
class PythonInterpreter(ToolEnvironment):
    """One tool, `run_python`, with `timeout_s` and `memory_mib` for a call and all cells before it.
    The outcome is `reward` of the answer that ends the episode. States are named by the cells, not
    by what they print.

    A process runs as many programs at a time as the machine has cores; others wait."""

    names_states_by_results = False

    def __init__(
        self,
        *,
        reward: str = NUMERIC_MATCH,
        reward_arguments: Mapping[str, Any] | None = None,
        timeout_s: float = 4.0,
        memory_mib: int = 512,
    ):
        super().__init__()
        self._final = FinalAnswer(reward, reward_arguments)
        self._limits = Limits(wall_s=timeout_s, memory_bytes=memory_mib * MIB)
        self._cells: list[str] = []
        self._seed = 0

    async def start(self, problem: Problem, seed: int) -> None:
        """Remember the seed of the programs' random numbers and hashes."""
        self._seed = seed

    @tool(
        "Run Python code and get what it prints. Names stay defined in later calls; the value of "
        "an expression in the last line is printed.",
        code="the code",
    )
    async def run_python(self, code: str) -> str:
        """What the code prints, with what it raises; a cell that does not come to its end is
        forgotten. Raises Unscorable where the sandbox fails."""
        cells = [*self._cells, code]
        if sum(len(cell) for cell in cells) > _MOST_CHARACTERS:
            return f"error: the code of an episode may have {_MOST_CHARACTERS} characters"
        mark = secrets.token_hex(16)  # which no cell knows before it runs
        task = json.dumps({"cells": cells, "seed": self._seed, "mark": mark})
        async with _free():
            outcome = await sandbox.run(_INSIDE, task, limits=self._limits, hash_seed=self._seed)
        if outcome.ending == "failed":
            raise Unscorable(f"the sandbox failed: {outcome.stderr.decode(errors='replace')[:300]}")
        _, _, printed = outcome.stdout.decode(errors="replace").partition(f"{mark}\n")
        printed, ended, _ = printed.partition(f"{mark}\n")
        if ended:
            self._cells = cells
            self.remember(code)
            return printed or "(no output)"
        return f"{printed}\nerror: {self._why(outcome)}; the cell was undone".lstrip()

    async def score(self, text: str) -> float:
        """Return the reward of the answer."""
        return await self._final.score(text, self.problem)

    def _why(self, outcome: sandbox.ProgramOutcome) -> str:
        if outcome.ending == "timed_out":
            return f"the code ran for longer than {self._limits.wall_s:g} s"
        if outcome.ending == "flooded":
            return f"the code printed more than {self._limits.output_bytes} bytes"
        return f"the interpreter ended with exit code {outcome.exit_code}"


def refuse_long_programs(bound: BoundEnvironment, step_s: float) -> None:
    """EpisodeError where a program of this environment may run for as long as a step may take: its
    episode would be unscorable, where the policy is to be told."""
    if bound.factory is not PythonInterpreter:
        return
    default_s = inspect.signature(PythonInterpreter).parameters["timeout_s"].default
    timeout_s = bound.arguments.get("timeout_s", default_s)
    if timeout_s >= step_s:
        raise EpisodeError(
            f"environment {bound.name}: timeout_s = {timeout_s:g} is not below step_s "
            f"({step_s:g} s)",
            remedy=f"set timeout_s to less, or step_s to {2 * timeout_s:g}",
        )


def _free() -> asyncio.Semaphore:
    """Return what lets as many programs run at a time as there are cores, for each event loop."""
    loop = asyncio.get_running_loop()
    if loop not in _running:
        _running[loop] = asyncio.Semaphore(os.cpu_count() or 1)
    return _running[loop]
