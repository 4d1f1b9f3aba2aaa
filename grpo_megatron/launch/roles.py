"""The programs of a run, as processes of this machine. `launch.steps` starts the same in a job."""

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.look import Look, look_at
from grpo_megatron.launch.processes import ChildProcess, stop_all
from grpo_megatron.progress import ProgressRecord
from grpo_megatron.rundir import RunDir, engine_name

TRAINER = "grpo_megatron.trainer.trainer_rank"
CONTROLLER = "grpo_megatron.controller.main"
REPLICA = "grpo_megatron.rollout.replica"
REWARD_HOST = "grpo_megatron.rewards.reward_host"
WORKER = "grpo_megatron.rollout.worker_service"
ENVIRONMENT_SERVER = "grpo_megatron.environments.server"
# glibc keeps what a rank frees: giving it back cost a small model 5000 page faults a step
_KEEP_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TOP_PAD_": str(64 << 20),
}
# PYTHONWARNINGS: hundreds of lines about absent CUDA packages would hide a rank's last words
QUIET = {"PYTHONUNBUFFERED": "1", "PYTHONWARNINGS": "ignore"}
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Which rank a process is, of launchers like torchrun; before Slurm's own."""


class LocalProcesses:
    """Makes the processes of a run on this machine; the supervisor starts them."""

    def __init__(self, config: RunConfig, run_dir: RunDir):
        self.config = config
        self.run_dir = run_dir

    def trainers(self) -> list[ChildProcess]:
        """Return one process a rank."""
        layout = self.config.trainer
        ranks = []
        for rank in range(layout.num_ranks):
            env = rank_variables(rank, layout.num_ranks, layout.num_threads)
            ranks.append(self._child(f"trainer-{rank}", TRAINER, env=env))
        return ranks

    def replicas(self) -> list[ChildProcess]:
        """Return one process a vLLM server."""
        return [self.replica(index) for index in range(self.config.num_replicas)]

    def replica(self, index: int) -> ChildProcess:
        """Return the process of one vLLM server."""
        return self._child(engine_name(index), REPLICA, str(index))

    def why_no_room(self, index: int) -> str:
        """Why there is no place for a server of this number; empty: there is one."""
        count = self.config.placement.gpus_per_node
        if not count:
            return ""
        places = (count - self.config.trainer.num_ranks) // self.config.rollout.num_workers
        if index < places:
            return ""
        return f"this machine has GPUs for {places} engines, which are all taken"

    def workers(self) -> list[ChildProcess]:
        """Return one process a server, which has its prompts answered and writes the samples."""
        return [self.worker(index) for index in range(self.config.num_replicas)]

    def worker(self, index: int) -> ChildProcess:
        """Return the process of one server's worker."""
        return self._child(f"worker-{index}", WORKER, str(index), env=ONE_THREAD)

    def reward_hosts(self) -> list[ChildProcess]:
        """Starts reward processes for the controller; none where it does so itself."""
        hosts = []
        for index in range(self.config.data.reward_hosts):
            name = f"reward-host-{index}"
            hosts.append(self._child(name, REWARD_HOST, str(index), env=ONE_THREAD))
        return hosts

    def environment_server(self, number: int) -> ChildProcess:
        """Return one of `RunConfig.environment_servers`."""
        return self._child(f"environment-{number}", ENVIRONMENT_SERVER, str(number), env=ONE_THREAD)

    def controller(self) -> ChildProcess:
        """Its standard output carries display messages, see `controller.display`."""
        return self._child("controller", CONTROLLER, env=ONE_THREAD, piped=True)

    def stop(self, children: list[ChildProcess]) -> None:
        """End all of them, see `stop_all`."""
        stop_all(children)

    def pids(self, child: ChildProcess) -> dict[str, int | None]:
        """Return the roles of a child that was started, with the number of the process on this
        machine that each of them is."""
        return {child.name: child.started.pid}

    def look(self, record: ProgressRecord, log: Path, probe: Path) -> Look | None:
        """Look at the process of a role, see `look_at`."""
        return look_at(record.pid, log=log, dumps_stacks=record.dumps_stacks, probe=probe)

    def kill(self, child: ChildProcess) -> None:
        """End a child at once, also a stopped one."""
        child.signal_group(signal.SIGKILL)

    def end(self, children: Sequence[ChildProcess]) -> None:
        """End some at once while the others go on; they have ended when this returns."""
        for child in children:
            self.kill(child)
        stop_all(children, grace_s=0.0)

    def _child(
        self,
        name: str,
        module: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        piped: bool = False,
    ) -> ChildProcess:
        run_dir = self.run_dir
        argv = [sys.executable, "-m", module, str(run_dir.root), run_dir.attempt, *arguments]
        return ChildProcess(name, argv, run_dir.logs / f"{name}.log", QUIET | (env or {}), piped)


def rank_variables(rank: int, world: int, num_threads: int | None = None) -> dict[str, str]:
    """Return the variables that torchrun would set for one rank."""
    return thread_limit(world, num_threads) | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }


def thread_limit(num_processes: int, num_threads: int | None) -> dict[str, str]:
    """Return variables that give a rank `num_threads`, by default its share of the cores among
    `num_processes`, and that keep freed memory with it."""
    share = max((os.cpu_count() or 1) // num_processes, 1)
    return _KEEP_FREED_MEMORY | {"OMP_NUM_THREADS": str(num_threads or share)}
