"""What is done about roles that hang: they are named, and ended where they hang for too long."""

from typing import Any

from grpo_megatron import errors
from grpo_megatron.config.run import RunConfig
from grpo_megatron.launch.run_processes import RunProcesses
from grpo_megatron.launch.spares import Spares
from grpo_megatron.launch.training_restarts import TrainingRestarts
from grpo_megatron.launch.watcher import News, Watcher
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.screen import Screen


class HangPolicy:
    """Has a watcher look at all roles, where the recipe says so (`[watch]`), and acts on what it
    finds. remedy: what a user does whose run ends."""

    def __init__(
        self,
        config: RunConfig,
        processes: RunProcesses,
        spares: Spares,
        training: TrainingRestarts,
        *,
        screen: Screen,
        remedy: str,
    ):
        self._config = config
        self._processes = processes
        self._spares = spares
        self._training = training
        self._screen = screen
        self._remedy = remedy
        self._told: dict[str, str] = {}  # of hangs, by role

    def start(self) -> None:
        """Begin to look; all processes were started."""
        processes = self._processes
        if self._config.watch.enabled:
            processes.watcher = Watcher(self._config, processes.run_dir, {}, processes.roles.look)
        for child in processes.all:
            processes.watch(child)
        if processes.watcher is not None:
            processes.watcher.start()

    def close(self) -> None:
        """Look no more."""
        if self._processes.watcher is not None:
            self._processes.watcher.close()

    def check(self) -> None:
        """Tell which roles hang, once, and end what hangs for too long.

        Raises TrainerError for a trainer rank, GrpoMegatronError for the controller."""
        watcher = self._processes.watcher
        if watcher is None:
            return
        for role, child in self._processes.of_role.items():
            if not child.alive:
                watcher.forget(role)
        watcher.awaits_start = self._spares.are_starts_planned
        for news in watcher.take_news():
            self._tell(news)
        for role, seconds in watcher.overdue().items():
            self._end_overdue(watcher, role, seconds)

    def _tell(self, news: News) -> None:
        self._screen.message(news.text)
        if news.kind == "files":
            return
        fields: dict[str, Any] = {"role": news.role, "seconds": news.seconds}
        if news.kind == "hung":
            self._told[news.role] = news.text
            fields |= {"phase": news.phase, "detail": news.detail, "cause": news.cause}
            fields |= {"stack": news.stack}
        append_event(self._processes.run_dir.events, news.kind, **fields)

    def _end_overdue(self, watcher: Watcher, role: str, seconds: float) -> None:
        """End a role that was named `seconds` ago, where the recipe says so by now."""
        processes = self._processes
        child = processes.of_role[role]
        settings = self._config.watch
        if child in processes.trainers or child is processes.controller:
            if not _is_over(seconds, settings.kill_after_s):
                return
            if child is processes.controller or not self._training.are_left:
                raise self._error(role, seconds)
            self._end(watcher, role, seconds)
            return
        # a worker that is only slow waits for engines, which have time-outs of their own
        serves = child in (*processes.replicas, *processes.all_environments)
        waits = watcher.cause_of(role) == "stuck" and not serves
        if not waits and _is_over(seconds, settings.replace_after_s):
            self._end(watcher, role, seconds)

    def _end(self, watcher: Watcher, role: str, seconds: float) -> None:
        """End a role that hangs; then it counts as dead."""
        self._screen.message(f"{role} is ended: it was named {seconds:.0f} s ago and still hangs")
        watcher.forget(role)
        self._processes.roles.kill(self._processes.of_role[role])

    def _error(self, role: str, seconds: float) -> errors.GrpoMegatronError:
        kind: type[errors.GrpoMegatronError] = errors.TrainerError
        if self._processes.of_role[role] is self._processes.controller:
            kind = errors.GrpoMegatronError
        return kind(
            f"{self._told[role]}\n{role} was given {seconds:.0f} s more (watch.kill_after_s)",
            where=str(self._processes.run_dir.logs / f"{role}.log"),
            remedy=self._remedy,
        )


def _is_over(seconds: float, limit_s: float) -> bool:
    """Whether a time limit is over; a limit of 0 is none."""
    if limit_s == 0:
        return False
    return seconds >= limit_s
