"""Start trainer ranks for a part, and read what they answer.

Ranks take seconds to start, so they execute several requests one after another. Where they die or
hang in one of them, others are started for what comes after it: no request hides another."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from grpo_megatron import pretended_cuda
from grpo_megatron.errors import TrainerError
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.roles import QUIET, RANK_VARIABLES, rank_variables, thread_limit
from grpo_megatron.network import NODES_VARIABLE
from grpo_megatron.prove.requests import CarryWeights, Request, encode_requests
from grpo_megatron.prove.runner import last_lines

REQUESTS_FILE = "requests.json"
_RANK = "grpo_megatron.prove.rank"
MEMBER = "grpo_megatron.prove.member"
"""Executes `CarryWeights`, the other module everything else."""
_PATIENCE_S = 120.0
"""Longest time until the next answer."""
_POLL_S = 0.5
WITHOUT_TF32 = {"NVIDIA_TF32_OVERRIDE": "0"}
"""NVIDIA's libraries then multiply float32 as float32: what is compared would differ otherwise."""
ON_CPU = {"CUDA_VISIBLE_DEVICES": "", pretended_cuda.VARIABLE: "0"}
"""The process has no GPU, and none that pretends."""

AnswerType = TypeVar("AnswerType")
Launch = Callable[[Path], list[ChildProcess]]
"""Makes the processes, not yet started, that execute the requests in a folder."""


def answer_file(folder: Path, number: int) -> Path:
    """Return where rank 0 answers request `number`, from 0, of those in `folder`."""
    return folder / f"answer-{number}.json"


class Asked(Generic[AnswerType]):
    """Ranks that are executing requests; they end with this process at the latest.

    They begin when this is made. kind: the type of the answers; folder: for requests, answers and
    logs."""

    def __init__(
        self,
        requests: Sequence[Request | CarryWeights],
        kind: type[AnswerType],
        folder: Path,
        launch: Launch,
        patience_s: float = _PATIENCE_S,
    ):
        self._requests = requests
        self._kind = kind
        self._folder = folder
        self._launch = launch
        self._patience_s = patience_s
        self._children = self._started(folder, requests)

    def answers(self) -> list[AnswerType | TrainerError]:
        """Wait for the answers, one for each request; an error, with the last lines of a log, for
        one in which a rank died or hung."""
        found: list[AnswerType | TrainerError] = []
        folder = self._folder
        while True:
            try:
                found += self._finish(folder, len(self._requests) - len(found))
                return found
            except TrainerError as error:
                found += self._answered(folder)
                found.append(error)
            rest = self._requests[len(found) :]
            if not rest:
                return found
            folder = self._folder / f"after-{len(found)}"
            self._children = self._started(folder, rest)

    def answer(self) -> AnswerType:
        """Wait for the answer to the only request. Raises TrainerError where there is none."""
        [found] = self.answers()
        if isinstance(found, TrainerError):
            raise found
        return found

    def _started(
        self, folder: Path, requests: Sequence[Request | CarryWeights]
    ) -> list[ChildProcess]:
        folder.mkdir(parents=True)
        (folder / REQUESTS_FILE).write_bytes(encode_requests(requests))
        children = self._launch(folder)
        for child in children:
            child.start()
        return children

    def _finish(self, folder: Path, number: int) -> list[AnswerType]:
        """Wait until all ranks have ended, and read `number` answers.

        Raises TrainerError where a rank fails, or no further answer comes for too long."""
        try:
            self._wait(folder)
        finally:
            stop_all(self._children, grace_s=1.0)
        found = self._answered(folder)
        if len(found) < number:
            raise TrainerError("rank 0 ended without an answer", where=str(folder))
        return found

    def _wait(self, folder: Path) -> None:
        num_answered = 0
        deadline = time.monotonic() + self._patience_s
        while True:
            for child in self._children:
                if child.exit_code:
                    raise TrainerError(str(child.end()), where=str(child.log))
            running = [child for child in self._children if child.alive]
            if not running:
                return
            if answer_file(folder, num_answered).exists():
                num_answered += 1
                deadline = time.monotonic() + self._patience_s
            if time.monotonic() > deadline:
                raise TrainerError(_hung(running, self._patience_s), where=str(running[0].log))
            wait_readable(running, [], _POLL_S)

    def _answered(self, folder: Path) -> list[AnswerType]:
        """Read all answers that there are."""
        found: list[AnswerType] = []
        while answer_file(folder, len(found)).exists():
            data = answer_file(folder, len(found)).read_bytes()
            found.append(msgspec.json.decode(data, type=self._kind))
        return found


def _hung(running: Sequence[ChildProcess], patience_s: float) -> str:
    names = ", ".join(child.name for child in running)
    last = "\n    ".join(last_lines(running[0].log, 10))
    return (
        f"{names} answered nothing for {patience_s:.0f} s; the last lines of "
        f"{running[0].name}:\n    {last}"
    )


def on_this_machine(
    world_size: int, environment: Mapping[str, str] | None = None, module: str = _RANK
) -> Launch:
    """Let requests be executed by `world_size` ranks on this machine, which run `module`."""

    def launch(folder: Path) -> list[ChildProcess]:
        children = []
        for rank in range(world_size):
            child = ChildProcess(
                f"rank-{rank}",
                [sys.executable, "-m", module, str(folder)],
                folder / f"rank-{rank}.log",
                {
                    **QUIET,
                    **_nccl_warns(),
                    **rank_variables(rank, world_size, num_threads=1),
                    **(environment or {}),
                },
            )
            children.append(child)
        return children

    return launch


def _nccl_warns() -> dict[str, str]:
    """Let NCCL say in the log what went wrong, unless the user asked for more."""
    return {"NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN")}


def on_nodes(
    num_nodes: int, ranks_per_node: int, environment: Mapping[str, str] | None = None
) -> Launch:
    """Let requests be executed by ranks on `num_nodes` nodes of this Slurm job, which share the
    folder."""
    flags = shlex.split(os.environ.get("GRPO_MEGATRON_SRUN_FLAGS", ""))
    enter = shlex.split(os.environ.get("GRPO_MEGATRON_ENTER", ""))
    python = os.environ.get("GRPO_MEGATRON_PYTHON", sys.executable)
    command = [
        "srun",
        "--overlap",
        f"--nodes={num_nodes}",
        f"--ntasks-per-node={ranks_per_node}",
        "--kill-on-bad-exit=1",
        *flags,
        *enter,
        python,
        "-m",
        _RANK,
    ]
    variables = {
        **QUIET,
        **_nccl_warns(),
        **thread_limit(ranks_per_node, None),
        NODES_VARIABLE: _nodes_of_job(),
        **(environment or {}),
    }

    def launch(folder: Path) -> list[ChildProcess]:
        return [
            ChildProcess(
                "ranks",
                [*command, str(folder)],
                folder / "ranks.log",
                variables,
                not_inherited=RANK_VARIABLES,
            )
        ]

    return launch


def _nodes_of_job() -> str:
    """Return names of the job's nodes, with which processes find the network between them."""
    if NODES_VARIABLE in os.environ:
        return os.environ[NODES_VARIABLE]
    names = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")],
        capture_output=True,
        text=True,
        check=True,
    )
    return " ".join(names.stdout.split())
