"""Engines that are added to a run and removed from it, as `grpo-megatron engines` asks."""

from collections.abc import Callable

from grpo_megatron import errors
from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.engine_members import EngineMembers
from grpo_megatron.launch.engine_requests import EngineRequest, answer, take_requests
from grpo_megatron.launch.run_processes import RunProcesses, number_of
from grpo_megatron.launch.spares import Spares
from grpo_megatron.rundir import engine_name
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.screen import Screen


class EngineChanges:
    """Starts engines that are asked for, and ends those that the controller has let go.

    is_interrupted: whether the run was told to stop."""

    def __init__(
        self,
        config: RunConfig,
        processes: RunProcesses,
        members: EngineMembers,
        spares: Spares,
        *,
        screen: Screen,
        is_interrupted: Callable[[], bool],
    ):
        self._config = config
        self._processes = processes
        self._run_dir = processes.run_dir
        self._members = members
        self._spares = spares
        self._screen = screen
        self._is_interrupted = is_interrupted

    def answer_requests(self) -> None:
        """Do what `grpo-megatron engines` asks for."""
        for name, request in take_requests(self._run_dir).items():
            told: str | errors.GrpoMegatronError
            try:
                if isinstance(request, errors.ConfigError):
                    raise request
                told = self._change(request)
            except errors.GrpoMegatronError as error:
                told = error
            else:
                self._screen.message(told)
            answer(self._run_dir, name, told)

    def _change(self, request: EngineRequest) -> str:
        """Returns what was done. Raises ConfigError where that cannot be."""
        if self._is_interrupted():
            raise errors.ConfigError("the run is about to end", where=str(self._run_dir.root))
        if not self._processes.replicas:
            raise errors.ConfigError("a run of this kind has no engines", where="kind")
        if request.action == "add":
            return self._add()
        assert request.engine is not None  # `take_requests` sees to it
        self._members.begin_leaving(request.engine)
        return (
            f"{engine_name(request.engine)} gets no more requests, and ends when it has answered "
            "those that it has"
        )

    def _add(self) -> str:
        """Start one more server and its worker, which join once they are up."""
        if self._config.shares_gpus:
            raise errors.ConfigError(
                "engines share their GPUs with the trainer, which may have filled them",
                where="placement.mode",
                remedy="resume with another rollout.num_replicas",
            )
        processes = self._processes
        index = self._members.free_number()
        problem = processes.roles.why_no_room(index)
        if problem:
            raise errors.ConfigError(
                problem,
                where="rollout.num_replicas",
                remedy="remove another one first, or resume with more",
            )
        self._drop(index)  # one that was given up
        replica = processes.roles.replica(index)
        worker = processes.roles.worker(index)
        processes.replicas.append(replica)
        processes.workers.append(worker)
        for child in (replica, worker):
            self._spares.forget_restarts(child.name)
            (self._run_dir.endpoints / f"{child.name}.dead").unlink(missing_ok=True)
            processes.all.append(child)
            processes.start(child, "added")
        self._members.add(index)
        return f"{replica.name} starts; it joins when it has got the present weights"

    def end_left(self, index: int) -> None:
        """End an engine that the controller has let go."""
        if not self._members.is_leaving(index):
            return
        self._drop(index)
        self._members.forget(index)
        name = engine_name(index)
        append_event(self._run_dir.events, "removed", role=name)
        self._screen.message(f"{name} has left the run")

    def _drop(self, index: int) -> None:
        """End the server of this number and its worker, and forget them, where they are there."""
        processes = self._processes
        dropped = []
        for children in (processes.replicas, processes.workers):
            for child in list(children):
                if number_of(child) == index:
                    children.remove(child)
                    processes.all.remove(child)
                    dropped.append(child)
        processes.watch_no_more(dropped)
        processes.roles.end(dropped)
        for child in dropped:
            (self._run_dir.endpoints / f"{child.name}.dead").touch()
            processes.forget_addresses(child.name)
            processes.reported_dead.discard(child.name)
            self._spares.forget_restarts(child.name)
        left = {role: child for role, child in processes.of_role.items() if child not in dropped}
        processes.of_role = left
