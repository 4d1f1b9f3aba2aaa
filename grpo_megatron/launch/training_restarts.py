"""Training that begins again as a whole where a rank dies: ranks, controller, rollout workers."""

import time
from collections.abc import Callable, Sequence

from grpo_megatron import errors
from grpo_megatron.config.run import RunConfig
from grpo_megatron.files import remove_directory
from grpo_megatron.launch.controller_messages import ControllerMessages
from grpo_megatron.launch.processes import End
from grpo_megatron.launch.restarts import (
    REMEDY_OF_REFUSALS,
    Restarts,
    first_cause,
    may_train_again,
    was_killed,
)
from grpo_megatron.launch.run_processes import RunProcesses, number_of
from grpo_megatron.telemetry.screen import Screen

_SETTLE_S = 5.0
"""Within this the ranks end that lost one: who was first is known then."""
_LAST_WORDS_S = 60.0
"""A controller that has told an error ends within this: its libraries take their time."""
_CODES_OF_CONTROLLER = (
    errors.ConfigError.exit_code,
    errors.SetupError.exit_code,
    errors.DataError.exit_code,
    errors.RewardError.exit_code,
    errors.EpisodeError.exit_code,
    errors.GateError.exit_code,
)
"""Of errors that no death of a trainer rank causes."""
_TRAINING = "training"
"""Under this its restarts are counted."""


class TrainingRestarts:
    """Begins training again at the newest checkpoint, up to `trainer.max_restarts` times; engines,
    environment servers and reward hosts go on.

    is_interrupted: whether the run was told to stop; remedy: what a user does whose run ends."""

    def __init__(
        self,
        config: RunConfig,
        processes: RunProcesses,
        messages: ControllerMessages,
        *,
        screen: Screen,
        remedy: str,
        is_interrupted: Callable[[], bool],
    ):
        self._processes = processes
        self._messages = messages
        self._screen = screen
        self._remedy = remedy
        self._is_interrupted = is_interrupted
        self._restarts = Restarts(config.trainer_restarts)

    @property
    def are_left(self) -> bool:
        """Whether training would begin again if a rank were killed now."""
        return self._restarts.are_left(_TRAINING) and not self._is_interrupted()

    def ends(self) -> list[End]:
        """Say how trainer ranks failed; empty: none did.

        Ranks and the controller may see that one has died before this process can, so they are
        given a moment until it is known who was first; so are ranks that have lost a controller
        before that has ended."""
        trainers = self._processes.trainers
        controller = self._processes.controller
        has_failed = any(trainer.exit_code for trainer in trainers)
        if controller.alive and not has_failed:
            return []
        began_s = time.monotonic()
        while True:
            ends = [trainer.end() for trainer in trainers if trainer.exit_code]  # 0: told to
            if any(was_killed(end) for end in ends):
                return ends
            if not any(process.alive for process in (*trainers, controller)):
                return ends
            self._messages.read(controller.output)
            most_s = _SETTLE_S
            if controller.alive and self._messages.failure is not None:
                most_s = _LAST_WORDS_S
            if time.monotonic() - began_s > most_s:
                return ends
            time.sleep(0.05)

    def followed_controller(self, ends: Sequence[End]) -> bool:
        """Whether ranks that failed have only lost a controller that ended by an error of its own,
        which training would meet again: of data, rewards or the machine."""
        controller = self._processes.controller
        if controller.alive or not may_train_again(ends):
            return False
        is_killed = any(was_killed(end) for end in ends)
        return not is_killed and controller.exit_code in _CODES_OF_CONTROLLER

    def begin_again(self, ends: Sequence[End]) -> bool:
        """Start training again after the failure of ranks; False: told to stop meanwhile.

        Raises TrainerError, with the rank's own exit code, where it is not started again."""
        end = first_cause(ends)
        self._processes.record_death(end)
        restarts = self._restarts
        before = restarts.counts[_TRAINING]
        pause_s = None
        if may_train_again(ends) and not self._is_interrupted():
            pause_s = restarts.plan(_TRAINING)
        if pause_s is None:
            raise self._error(end, before)
        self._screen.message(
            f"{end}\ntraining begins again at the newest checkpoint in {pause_s:.0f} s "
            f"({before + 1} of {restarts.most}, trainer.max_restarts); engines go on serving"
        )
        self._end()
        while not restarts.take_due(_TRAINING):
            if self._is_interrupted():
                return False
            time.sleep(0.05)
        self._begin(before + 1)
        return True

    def _error(self, end: End, num_restarts: int) -> errors.TrainerError:
        text = str(end)
        if num_restarts:
            text = f"after {num_restarts} restarts of training (trainer.max_restarts): {text}"
        remedy = self._remedy
        if end.refusal:
            remedy = f"{REMEDY_OF_REFUSALS}: {remedy}"
        error = errors.TrainerError(text, where=str(end.log), remedy=remedy)
        if 2 <= end.exit_code <= 11:
            error.exit_code = end.exit_code  # the rank's own error class
        return error

    def _end(self) -> None:
        """End what holds a part of the unfinished step: trainer ranks, the controller, rollout
        workers with their requests and episodes. Engines drop requests for which nothing waits."""
        processes = self._processes
        ended = [*processes.trainers, processes.controller]
        for worker in processes.workers:
            if worker.name not in processes.reported_dead:
                ended.append(worker)
        processes.watch_no_more(ended)
        processes.roles.end(ended)
        processes.controller.close_pipes()
        self._messages.forget()

    def _begin(self, number: int) -> None:
        """Start again what `_end` ended, for the `number`-th time."""
        processes = self._processes
        run_dir = processes.run_dir
        remove_directory(run_dir.rollouts.parent)
        (run_dir.endpoints / "trainer.json").unlink(missing_ok=True)
        for ended in (*processes.trainers, processes.controller):
            processes.forget_addresses(ended.name)
            processes.all.remove(ended)
        processes.trainers = processes.roles.trainers()
        processes.controller = processes.roles.controller()
        begun = [*processes.trainers, processes.controller]
        for index, worker in enumerate(processes.workers):
            if worker.name in processes.reported_dead:  # started at its own time, or given up
                continue
            processes.forget_addresses(worker.name)
            processes.all.remove(worker)
            processes.workers[index] = processes.roles.worker(number_of(worker))
            begun.append(processes.workers[index])
        processes.all += begun
        for child in begun:
            processes.start(child, "restarted", number=number)
