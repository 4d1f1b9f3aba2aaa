"""The processes of a run: which there are, which of them have died, and who watches them."""

from collections.abc import Sequence
from typing import Any

from grpo_megatron.launch.processes import ChildProcess, End
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.steps import SlurmSteps
from grpo_megatron.launch.watcher import Watcher
from grpo_megatron.telemetry.events import append_event


class RunProcesses:
    """The processes of a run by what they do, while some end and others take their places.

    roles: makes them, here or in a Slurm job.

    Attributes:
        all: Those that are ended with the run.
        environments: The environment servers of each domain that has some.
        reported_dead: Names of those whose death was told, until they are started again.
        of_role: By the role under which a process says what it does; a step of a job has several.
        watcher: Looks for roles that hang; None where nobody does."""

    controller: ChildProcess

    def __init__(self, roles: LocalProcesses | SlurmSteps):
        self.roles = roles
        self.run_dir = roles.run_dir
        self.replicas: list[ChildProcess] = []
        self.workers: list[ChildProcess] = []
        self.reward_hosts: list[ChildProcess] = []
        self.environments: dict[str, list[ChildProcess]] = {}
        self.trainers: list[ChildProcess] = []
        self.all: list[ChildProcess] = []
        self.reported_dead: set[str] = set()
        self.of_role: dict[str, ChildProcess] = {}
        self.watcher: Watcher | None = None

    def make(self) -> None:
        """Make all that the recipe asks for, without starting them."""
        self.replicas = self.roles.replicas()
        self.workers = self.roles.workers()
        self.reward_hosts = self.roles.reward_hosts()
        for number, domain in enumerate(self.roles.config.environment_servers):
            server = self.roles.environment_server(number)
            self.environments.setdefault(domain, []).append(server)
        self.trainers = self.roles.trainers()
        self.controller = self.roles.controller()
        self.all = [*self.spares, *self.trainers, self.controller]

    @property
    def all_environments(self) -> list[ChildProcess]:
        """The environment servers of all domains."""
        children: list[ChildProcess] = []
        for servers in self.environments.values():
            children += servers
        return children

    @property
    def spares(self) -> list[ChildProcess]:
        """Processes of which others of their kind do the work where they have died."""
        return [*self.replicas, *self.workers, *self.reward_hosts, *self.all_environments]

    @property
    def whose_end_is_news(self) -> list[ChildProcess]:
        """Processes that have not ended as far as was told."""
        found = [self.controller]
        for trainer in self.trainers:
            if trainer.exit_code != 0:  # 0: told to stop
                found.append(trainer)
        for child in self.spares:
            if child.name not in self.reported_dead:
                found.append(child)
        return found

    def start_all(self) -> None:
        """Start what `make` made."""
        for child in self.all:
            child.start()
            self._record("started", child)

    def start(self, child: ChildProcess, event: str, **fields: Any) -> None:
        """Start one more process and watch it; `event` is what the run's events call that."""
        child.start()
        self._record(event, child, **fields)
        self.watch(child)

    def _record(self, event: str, child: ChildProcess, **fields: Any) -> None:
        append_event(self.run_dir.events, event, role=child.name, pid=child.started.pid, **fields)

    def record_death(self, end: End) -> None:
        """Write down how a process ended."""
        append_event(self.run_dir.events, "died", role=end.name, exit_code=end.exit_code)

    def watch(self, child: ChildProcess) -> None:
        """Note the roles of a process, and look whether they hang, where anybody does."""
        for role, pid in self.roles.pids(child).items():
            self.of_role[role] = child
            if self.watcher is not None:
                self.watcher.begin(role, pid)

    def watch_no_more(self, children: Sequence[ChildProcess]) -> None:
        """Do not look any more whether the roles of processes hang."""
        if self.watcher is None:
            return
        for role, child in self.of_role.items():
            if child in children:
                self.watcher.forget(role)

    def forget_addresses(self, name: str) -> None:
        """Remove what a process published that is started again."""
        for file in (f"{name}.json", f"{name}-nodes.json"):
            (self.run_dir.endpoints / file).unlink(missing_ok=True)
        for role, child in self.of_role.items():
            if child.name == name:
                self.run_dir.role_progress(role).unlink(missing_ok=True)


def number_of(child: ChildProcess) -> int:
    """Return the number at the end of a process's name."""
    return int(child.name.rpartition("-")[2])
