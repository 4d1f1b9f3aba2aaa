"""Processes of which others do the work where they die: engines, workers, servers, reward hosts."""

import signal
from collections.abc import Callable, Sequence

from grpo_megatron import errors
from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.engine_members import EngineMembers
from grpo_megatron.launch.processes import ChildProcess, stop_all
from grpo_megatron.launch.restarts import REMEDY_OF_REFUSALS, Restarts
from grpo_megatron.launch.run_processes import RunProcesses, number_of
from grpo_megatron.telemetry.screen import Screen


class Spares:
    """Tells which of these processes died, and starts them again, up to `rollout.max_restarts`
    times each. remedy: what a user does whose run ends."""

    def __init__(
        self,
        config: RunConfig,
        processes: RunProcesses,
        members: EngineMembers,
        *,
        screen: Screen,
        remedy: str,
    ):
        self._processes = processes
        self._members = members
        self._screen = screen
        self._remedy = remedy
        self._restarts = Restarts(config.engine_restarts)
        # these need no GPU that the trainer may have filled
        self._environment_restarts = Restarts(config.rollout.max_restarts)
        self._is_ending = False

    def end_restarts(self) -> None:
        """Start nothing again that dies from now on: the run ends."""
        self._is_ending = True

    def forget_restarts(self, name: str) -> None:
        """Count the restarts of an engine's process from none again."""
        self._restarts.forget(name)

    @property
    def are_starts_planned(self) -> bool:
        """Whether a process that died will be started again, when its pause is over."""
        processes = self._processes
        if self._restarts.are_planned([*processes.replicas, *processes.workers]):
            return True
        return self._environment_restarts.are_planned(processes.all_environments)

    def check(self) -> None:
        """Tell which have died since the last call. Raises EngineError, RewardError or EpisodeError
        with the last of a kind, where that is not started again."""
        processes = self._processes
        self._check(processes.replicas, "rollout server", errors.EngineError)
        self._check(processes.workers, "rollout worker", errors.EngineError)
        self._check(processes.reward_hosts, "reward host", errors.RewardError)
        for domain, servers in processes.environments.items():
            kind = f"environment server of domain {domain}"
            self._check(servers, kind, errors.EpisodeError)

    def _check(
        self,
        children: Sequence[ChildProcess],
        kind: str,
        last: type[errors.GrpoMegatronError],
    ) -> None:
        """Tell which of `children` died; raises `last` with the last that is not started again."""
        reported_dead = self._processes.reported_dead
        for child in children:
            if child.alive or child.name in reported_dead:
                continue
            reported_dead.add(child.name)
            child.signal_group(signal.SIGKILL)  # what the dead one had started
            end = child.end()
            self._processes.record_death(end)
            told = f"{end.name} died with exit code {end.exit_code}"
            if end.refusal:
                told = str(end)
            error = end.error
            if error:
                told += f" ({error})"
            told += f"; see {end.log}"
            restarts = self._restarts_of(child)
            pause_s = None
            if self._is_started_again(child) and not end.refusal:
                pause_s = restarts.plan(child.name)
            if pause_s is None:
                self._give_up(child)
            else:
                self._processes.forget_addresses(child.name)
                number = f"{restarts.counts[child.name]} of {restarts.most}"
                told += f"; it is started again in {pause_s:.0f} s ({number})"
            is_nobody_left = all(other.name in reported_dead for other in children)
            if is_nobody_left and not restarts.are_planned(children):
                remedy = self._remedy
                if end.refusal:
                    remedy = f"{REMEDY_OF_REFUSALS}: {remedy}"
                raise last(
                    f"the last {kind} died{self._after_restarts(child)}: {end}",
                    where=str(end.log),
                    remedy=remedy,
                )
            if is_nobody_left:
                told += f"; no {kind} is left, the run waits for it"
            self._screen.message(told)

    def _is_started_again(self, child: ChildProcess) -> bool:
        """Whether a process that died is started again, as often as its limit allows."""
        processes = self._processes
        if self._is_ending or child in processes.reward_hosts:
            return False
        is_of_engine = child in processes.replicas or child in processes.workers
        return not (is_of_engine and self._members.is_leaving(number_of(child)))

    def _give_up(self, child: ChildProcess) -> None:
        """Say of a process that died that it is not started again."""
        (self._processes.run_dir.endpoints / f"{child.name}.dead").touch()
        index = number_of(child)
        if child in self._processes.replicas and not self._members.is_leaving(index):
            self._members.forget(index)

    def _restarts_of(self, child: ChildProcess) -> Restarts:
        """Return the restarts among which those of a process count."""
        if child in self._processes.all_environments:
            return self._environment_restarts
        return self._restarts

    def _after_restarts(self, child: ChildProcess) -> str:
        """Say how often a process that died had been started again; empty: never."""
        count = self._restarts_of(child).counts[child.name]
        if not count:
            return ""
        return f" after {count} restarts (rollout.max_restarts)"

    def start_again(self) -> None:
        """Start those whose pause is over."""
        processes = self._processes
        roles = processes.roles
        self._start_due(processes.replicas, roles.replica)
        self._start_due(processes.workers, roles.worker)
        for servers in processes.environments.values():
            self._start_due(servers, roles.environment_server)

    def _start_due(self, children: list[ChildProcess], make: Callable[[int], ChildProcess]) -> None:
        """Start those of `children` whose pause is over; they are made by their number."""
        processes = self._processes
        for index, ended in enumerate(children):
            restarts = self._restarts_of(ended)
            if not restarts.take_due(ended.name):
                continue
            stop_all([ended], grace_s=0.0)
            child = make(number_of(ended))
            children[index] = child
            processes.all[processes.all.index(ended)] = child
            processes.reported_dead.discard(child.name)
            processes.start(child, "restarted", number=restarts.counts[child.name])
