"""The programs of a run as steps of the Slurm job in which this process runs.

    nodes   t0 t1 … | r0 r1 … | e0 …  placement.trainer_nodes | rollout_nodes | environment_nodes
    steps   trainer (all ranks)       rollout-0, rollout-1, … (one server each)
            controller on t0          worker-0, worker-1, … (beside their servers), reward-host-0, …
                                      environment-0, … (on e0 …, else on r0 …)

One allocation is split in this order, as are the parts of a heterogeneous job. Steps share
their nodes' resources (`--overlap`), so every role says itself which GPUs are its own."""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_megatron.config.engine_places import place_of_engine
from grpo_megatron.config.run import RunConfig
from grpo_megatron.errors import SetupError
from grpo_megatron.launch.look import Look
from grpo_megatron.launch.processes import ChildProcess, End, stop_all
from grpo_megatron.launch.roles import (
    CONTROLLER,
    ENVIRONMENT_SERVER,
    ONE_THREAD,
    QUIET,
    RANK_VARIABLES,
    REPLICA,
    REWARD_HOST,
    TRAINER,
    WORKER,
    thread_limit,
)
from grpo_megatron.network import NODES_VARIABLE
from grpo_megatron.progress import ProgressRecord
from grpo_megatron.rundir import RunDir, engine_name, engine_number

GRACE_S = 5.0
_LOOK_S = 18.0  # with the start of a step
_SHARED_FILE_PROBE = "shared-file-probe"
"""Name of a file that all nodes must see, and of the steps that look for it."""
# "srun: error: node2: task 1: Exited with exit code 6", "…: tasks 0-3: Killed"
_TASK_ENDED = re.compile(r"tasks? (\d+)[^:]*: (?:Exited with exit code (\d+)|(\w+))")
_REFUSED = re.compile(r"^srun: error: Unable to create step for job \S+: (.+)$", re.MULTILINE)
"""What srun says where the job has not what a step asks for; what is busy, it waits for."""
_PASSING = re.compile(r"contact|connect|timed out|Zero Bytes|busy|completing|down", re.IGNORECASE)
"""In reasons of such a refusal that may be others a moment later."""
_SIGNALS = {"Killed": 137, "Terminated": 143, "Aborted": 134, "Segmentation": 139}


@dataclass
class SlurmStep(ChildProcess):
    """An srun. Its log has srun's own words; every task has a log of its own."""

    task_log: str = ""  # `%t` is the number of the task
    log_start: int = 0
    """Where in the log its own words begin, behind those of one with its name before it."""

    def start(self) -> None:
        """Start the step as any child; it is killed when the supervisor dies."""
        if self.log.exists():
            self.log_start = self.log.stat().st_size
        super().start()

    def end(self) -> End:
        """Return the end of the task that ended first, srun's own exit code is the highest of all
        tasks; or the refusal of a step that was never made."""
        said = self.log.read_bytes()[self.log_start :].decode(errors="replace")
        words = _TASK_ENDED.search(said)
        if not words:
            refused = _REFUSED.search(said)
            if refused is None or _PASSING.search(refused[1]):
                return super().end()
            return End(self.name, SetupError.exit_code, self.log, refused[1])
        code = int(words[2] or _SIGNALS.get(words[3], 1))
        log = self.log.with_name(self.task_log.replace("%t", words[1]))
        return End(log.stem, code, log)


class SlurmSteps:
    """Makes the steps of a run in this job's allocation, as `LocalProcesses` does its processes.

    Raises SetupError: the job has another number of nodes than the recipe, or they do not all see
    the run directory."""

    def __init__(self, config: RunConfig, run_dir: RunDir):
        self.config = config
        self.run_dir = run_dir
        self.placement = config.placement
        self.components = _components()
        self.nodes: list[str] = []
        for component in self.components:
            self.nodes += component
        wanted = self.placement.num_nodes
        if len(self.nodes) != wanted:
            raise SetupError(
                f"the job has {len(self.nodes)} nodes, the recipe is for "
                f"{self.placement.trainer_nodes} that train, "
                f"{self.placement.rollout_nodes} that generate and "
                f"{self.placement.environment_nodes} that serve environments",
                where="placement",
                remedy=f"sbatch --nodes={wanted}",
            )
        self.check()

    def check(self) -> None:
        """Have every node read a file that this one writes into the run directory, on nodes that
        train with a task for each rank.

        Raises SetupError with all nodes that see none, or another directory, and where Slurm makes
        no such step."""
        shared_file = self.run_dir.endpoints / _SHARED_FILE_PROBE
        shared_file.touch()
        blind: list[str] = []
        reasons: list[str] = []
        for nodes, tasks_per_node in self._probes():
            srun = self._srun(nodes, tasks_per_node, f"--job-name={_SHARED_FILE_PROBE}")
            done = subprocess.run(
                [*srun, "cat", str(shared_file)], text=True, check=False, capture_output=True
            )
            if done.returncode == 0:
                continue
            said = re.findall("^.*cat: (.*)", done.stderr, re.MULTILINE)
            if not said:
                raise SetupError(
                    f"srun starts no step: {done.stderr.strip()[-500:]}",
                    where=" ".join(done.args),
                    remedy="look at the flags of job and site; a node that is not the job's own "
                    f"(--exclusive) must give it {tasks_per_node} CPUs "
                    f"(--mincpus={tasks_per_node} in SBATCH_FLAGS)",
                )
            blind += re.findall(r"error: (\S+): tasks? ", done.stderr)
            reasons += said
        if reasons:
            raise SetupError(
                f"{', '.join(sorted(set(blind))) or 'a node'} cannot read what another wrote: "
                f"{reasons[0]}",
                where=str(self.run_dir.root),
                remedy="set runs_dir to a file system that all nodes share; "
                "containers must mount it",
            )

    def _probes(self) -> Iterator[tuple[list[str], int]]:
        """Yield the nodes of each step that looks for the file, and its tasks on each of them."""
        that_train = self.nodes[: self.placement.trainer_nodes]
        for component in self.components:
            training = [node for node in component if node in that_train]
            others = [node for node in component if node not in that_train]
            if training:
                yield training, self._ranks_per_node
            if others:
                yield others, 1

    def trainers(self) -> list[ChildProcess]:
        """Return one step for all ranks."""
        per_node = self._ranks_per_node
        return [
            self._step(
                "trainer",
                TRAINER,
                nodes=self.nodes[: self.placement.trainer_nodes],
                tasks_per_node=per_node,
                log="trainer-%t.log",
                env=thread_limit(per_node, self.config.trainer.num_threads),
            )
        ]

    @property
    def _ranks_per_node(self) -> int:
        return self.config.trainer.num_ranks // self.placement.trainer_nodes

    def replicas(self) -> list[ChildProcess]:
        """Return a step for each server, so that one can die alone; wide ones take several
        nodes."""
        return [self.replica(index) for index in range(self.config.num_replicas)]

    def replica(self, index: int) -> ChildProcess:
        """Return the step of one server."""
        nodes = self._nodes_of_replica(index)
        name = engine_name(index)
        return self._step(
            name,
            REPLICA,
            str(index),
            str(len(nodes)),
            nodes=nodes,
            log=f"{name}.log",
        )

    def why_no_room(self, index: int) -> str:
        """Why there is no place for a server of this number; empty: there is one."""
        places = self.config.num_replicas
        if index < places:
            return ""
        return f"the nodes of the job have places for {places} engines, which are all taken"

    def workers(self) -> list[ChildProcess]:
        """Return a step for each server's worker, on the node where the server answers."""
        return [self.worker(index) for index in range(self.config.num_replicas)]

    def worker(self, index: int) -> ChildProcess:
        """Return the step of one server's worker."""
        return self._step(
            f"worker-{index}",
            WORKER,
            str(index),
            nodes=self._nodes_of_replica(index)[:1],
            log=f"worker-{index}.log",
            env=ONE_THREAD,
        )

    def reward_hosts(self) -> list[ChildProcess]:
        """Return a step each, spread over the nodes that generate."""
        count = self.config.data.reward_hosts
        nodes = self._rollout_nodes()
        steps: list[ChildProcess] = []
        for index in range(count):
            node = nodes[index * len(nodes) // count]
            steps.append(
                self._step(
                    f"reward-host-{index}",
                    REWARD_HOST,
                    str(index),
                    nodes=[node],
                    log=f"reward-host-{index}.log",
                    env=ONE_THREAD,
                )
            )
        return steps

    def environment_server(self, number: int) -> ChildProcess:
        """Return a step; servers are spread over the nodes that are theirs, or else over those that
        generate."""
        nodes = self._environment_nodes() or self._rollout_nodes()
        count = len(self.config.environment_servers)
        name = f"environment-{number}"
        return self._step(
            name,
            ENVIRONMENT_SERVER,
            str(number),
            nodes=[nodes[number * len(nodes) // count]],
            log=f"{name}.log",
            env=ONE_THREAD,
        )

    def _rollout_nodes(self) -> list[str]:
        """Return nodes that generate; those that train where there are no others."""
        first = self.placement.trainer_nodes
        end = first + self.placement.rollout_nodes
        return self.nodes[first:end] or self.nodes[:first]

    def _environment_nodes(self) -> list[str]:
        """Return nodes with nothing but servers of environments."""
        return self.nodes[self.placement.trainer_nodes + self.placement.rollout_nodes :]

    def _nodes_of_replica(self, index: int) -> list[str]:
        """Return the nodes of a server, of which the first answers."""
        place = place_of_engine(self.config, index)
        return self._rollout_nodes()[place.nodes.start : place.nodes.stop]

    def controller(self) -> ChildProcess:
        """On the first node that trains; its standard output comes through srun."""
        return self._step(
            "controller",
            CONTROLLER,
            nodes=self.nodes[:1],
            log="controller.log",
            env=ONE_THREAD,
            piped=True,
        )

    def stop(self, children: list[ChildProcess]) -> None:
        """TERM to every process of every step, so that servers can clean up; then KILL."""
        if any(child.alive for child in children):
            subprocess.run(
                ["scancel", "--signal=TERM", os.environ["SLURM_JOB_ID"]],
                check=False,
                capture_output=True,
            )
        deadline = time.monotonic() + GRACE_S
        while any(child.alive for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop_all(children)  # a TERM makes srun kill its tasks

    def pids(self, child: ChildProcess) -> dict[str, int | None]:
        """Return the roles of a step; their processes are on nodes, so that their numbers say
        nothing here."""
        if child.name == "trainer":
            return {f"trainer-{rank}": None for rank in range(self.config.trainer.num_ranks)}
        roles: dict[str, int | None] = {child.name: None}
        index = engine_number(child.name)
        if index is not None:
            for node in range(1, len(self._nodes_of_replica(index))):
                roles[f"{child.name}-node-{node}"] = None
        return roles

    def look(self, record: ProgressRecord, log: Path, probe: Path) -> Look | None:
        """Look at the process of a role by a short step on its node, see `look_at`; None where that
        node does not answer, or the role did not say where it runs."""
        short = record.host.partition(".")[0]
        nodes = [node for node in self.nodes if node.partition(".")[0] == short]
        if not nodes:
            return None
        log_argument = ""
        if record.dumps_stacks:
            log_argument = str(log)
        argv = [
            *self._srun(nodes[:1], 1, "--job-name=look"),
            os.environ.get("GRPO_MEGATRON_PYTHON", sys.executable),
            "-m",
            "grpo_megatron.launch.look",
            str(record.pid),
            log_argument,
            str(probe),
        ]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_LOOK_S, check=False
            )
            return Look(**json.loads(done.stdout.splitlines()[-1]))
        except (OSError, subprocess.TimeoutExpired, ValueError, TypeError, IndexError):
            return None

    def kill(self, child: ChildProcess) -> None:
        """End a step at once: Slurm kills its tasks when srun gets a second SIGTERM."""
        _terminate_twice([child])

    def end(self, children: Sequence[ChildProcess]) -> None:
        """End some steps at once while the others go on; they have ended when this returns."""
        _terminate_twice(children)
        deadline = time.monotonic() + GRACE_S
        while any(child.alive for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        stop_all(children, grace_s=0.0)

    def _step(
        self,
        name: str,
        module: str,
        *arguments: str,
        nodes: Sequence[str],
        log: str,
        tasks_per_node: int = 1,
        env: dict[str, str] | None = None,
        piped: bool = False,
    ) -> SlurmStep:
        logs = self.run_dir.logs
        logged = "output"
        if piped:
            logged = "error"
        plain = str(logs).replace("%", "%%")
        srun = self._srun(
            nodes,
            tasks_per_node,
            f"--job-name={name}",
            "--open-mode=append",
            f"--{logged}={plain}/{log}",
        )
        python = os.environ.get("GRPO_MEGATRON_PYTHON", sys.executable)
        argv = [
            *srun,
            python,
            "-m",
            module,
            str(self.run_dir.root),
            self.run_dir.attempt,
            *arguments,
        ]
        env = QUIET | {NODES_VARIABLE: " ".join(self.nodes)} | (env or {})
        return SlurmStep(
            name,
            argv,
            logs / f"srun-{name}.log",
            env,
            piped,
            not_inherited=RANK_VARIABLES,  # of a shell or a job around: Slurm tells the tasks
            task_log=log,
        )

    def _component_of(self, node: str) -> int:
        for number, nodes in enumerate(self.components):
            if node in nodes:
                return number
        raise AssertionError(f"{node} is no node of the job")

    def _srun(self, nodes: Sequence[str], tasks_per_node: int, *flags: str) -> list[str]:
        argv = [
            "srun",
            f"--nodes={len(nodes)}",
            f"--nodelist={','.join(nodes)}",
            f"--ntasks={len(nodes) * tasks_per_node}",
            f"--ntasks-per-node={tasks_per_node}",
            "--distribution=block",  # also where the job has another: ranks are neighbours
            "--overlap",
            "--cpu-bind=none",
            "--export=ALL",
            "--kill-on-bad-exit=1",
            *flags,
        ]
        needs_no_gpu = set(nodes) <= set(self._environment_nodes())
        if self.placement.gpus_per_node and not needs_no_gpu:
            argv.append(f"--gpus-per-node={self.placement.gpus_per_node}")
        if len(self.components) > 1:
            argv.append(f"--het-group={self._component_of(nodes[0])}")
        return [
            *argv,
            *shlex.split(os.environ.get("GRPO_MEGATRON_SRUN_FLAGS", "")),
            *shlex.split(os.environ.get("GRPO_MEGATRON_ENTER", "")),
        ]


def _terminate_twice(steps: Sequence[ChildProcess]) -> None:
    """Have Slurm kill the tasks of steps that have not ended."""
    for number in range(2):
        if number > 0:
            time.sleep(0.2)
        for step in steps:
            if step.alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(step.started.pid, signal.SIGTERM)


def _components() -> list[list[str]]:
    """Return nodes of the job; of a heterogeneous one those of each of its parts."""
    parts: list[list[str]] = []
    for number in itertools.count():
        compressed = os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{number}")
        if compressed is None:
            break
        parts.append(_nodes(compressed))
    if not parts:
        parts.append(_nodes(os.environ["SLURM_JOB_NODELIST"]))
    return parts


def _nodes(compressed: str) -> list[str]:
    """`node[1-3]` spelled out."""
    done = subprocess.run(
        ["scontrol", "show", "hostnames", compressed], check=True, text=True, stdout=subprocess.PIPE
    )
    return done.stdout.split()
