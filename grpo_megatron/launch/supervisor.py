"""Start the roles of a run, watch them, end them together.

A finished controller ends the run. A dead rollout server, rollout worker or environment server is
started again, up to `rollout.max_restarts` times (`spares`). Where a trainer rank dies, all ranks,
the controller and the rollout workers begin again at the newest checkpoint, up to
`trainer.max_restarts` times, while the others stay (`training_restarts`). A dead controller, and
the last dead one of any role that is not started again, end the run with an error that shows the
dead one's last lines. What hangs is named, and ended in time (`hang_policy`)."""

import os
import signal

from grpo_megatron import errors
from grpo_megatron.config.presets import load_preset
from grpo_megatron.files import remove_directory
from grpo_megatron.launch.controller_messages import ControllerMessages
from grpo_megatron.launch.engine_changes import EngineChanges
from grpo_megatron.launch.engine_members import EngineMembers
from grpo_megatron.launch.hang_policy import HangPolicy
from grpo_megatron.launch.processes import wait_readable
from grpo_megatron.launch.restarts import REMEDY_OF_REFUSALS
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.run_processes import RunProcesses
from grpo_megatron.launch.spares import Spares
from grpo_megatron.launch.steps import SlurmSteps
from grpo_megatron.launch.training_restarts import TrainingRestarts
from grpo_megatron.telemetry.screen import make_screen


class Supervisor:
    """Owns the processes of one run; `roles` starts and stops them, here or in a Slurm job."""

    def __init__(self, roles: LocalProcesses | SlurmSteps):
        self.roles = roles
        self.config = roles.config
        self.run_dir = roles.run_dir
        self.processes = RunProcesses(roles)
        self.interrupts = 0
        self._screen = make_screen(self.config.name, self.config.num_steps)
        self._remedy = self.run_dir.command("resume")
        members = EngineMembers(self.run_dir, range(self.config.num_replicas))
        self._spares = Spares(
            self.config, self.processes, members, screen=self._screen, remedy=self._remedy
        )
        self._engine_changes = EngineChanges(
            self.config,
            self.processes,
            members,
            self._spares,
            screen=self._screen,
            is_interrupted=self._is_interrupted,
        )
        self._messages = ControllerMessages(self._screen, self._engine_changes.end_left)
        self._training = TrainingRestarts(
            self.config,
            self.processes,
            self._messages,
            screen=self._screen,
            remedy=self._remedy,
            is_interrupted=self._is_interrupted,
        )
        self._hangs = HangPolicy(
            self.config,
            self.processes,
            self._spares,
            self._training,
            screen=self._screen,
            remedy=self._remedy,
        )

    def run(self) -> int:
        """Start all processes and watch them until the controller ends; returns the exit code.

        Raises TrainerError, EngineError and what the controller says, where one of them fails."""
        self._prepare_model()
        self.processes.make()
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            handlers[number] = signal.signal(number, self._interrupt)
        try:
            self.processes.start_all()
            self._hangs.start()
            self._begin_with_controller()
            code = self._watch()
        finally:
            self._hangs.close()
            self.roles.stop(self.processes.all)
            remove_directory(self.run_dir.progress)
            self._screen.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._messages.result:
            print(self._messages.result, flush=True)
        return code

    def _prepare_model(self) -> None:
        """Config and tokenizer must be there when the engines start; weights come later."""
        if self.config.model.path is None and not (self.run_dir.model / "config.json").exists():
            from grpo_megatron.data.tiny_model import write_tiny_model

            assert self.config.model.preset is not None  # rule model_source
            write_tiny_model(self.run_dir.model, load_preset(self.config.model.preset))

    def _begin_with_controller(self) -> None:
        """See to a controller that was started."""
        controller = self.processes.controller
        os.set_blocking(controller.output, False)
        if self._is_interrupted():  # before there was a controller
            controller.write_line("stop")

    def _watch(self) -> int:
        while True:
            controller = self.processes.controller
            output = controller.output
            for fd in wait_readable(self.processes.whose_end_is_news, [output], timeout_s=1.0):
                self._messages.read(fd)
            if self.interrupts > 1:
                return errors.INTERRUPTED_EXIT_CODE
            has_ended = not controller.alive
            if has_ended:
                self._messages.read(output)
                if controller.exit_code in (0, errors.INTERRUPTED_EXIT_CODE):
                    return controller.exit_code
            ends = self._training.ends()
            if ends and not self._training.followed_controller(ends):
                if not self._training.begin_again(ends):
                    return errors.INTERRUPTED_EXIT_CODE
                self._begin_with_controller()
                continue
            if has_ended:
                raise self._controller_error()
            self._spares.check()
            self._spares.start_again()
            self._hangs.check()
            self._engine_changes.answer_requests()

    def _controller_error(self) -> errors.GrpoMegatronError:
        """Return what to raise for a controller that failed while no trainer rank did; raises what
        else it was only the first to notice."""
        self._spares.end_restarts()
        self._spares.check()
        end = self.processes.controller.end()
        where = str(end.log)
        error = self._messages.failure
        if error is None:  # it was killed, or died without a word
            remedy = self._remedy
            if end.refusal:
                remedy = f"{REMEDY_OF_REFUSALS}: {remedy}"
            error = errors.GrpoMegatronError(str(end), remedy=remedy)
        if error.where:
            where = f"{error.where} ({where})"
        error.where = where
        error.exit_code = end.exit_code
        return error

    def _is_interrupted(self) -> bool:
        """Whether the run was told to stop."""
        return self.interrupts > 0

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self._screen.message("stopping after this step with a checkpoint; again to stop now")
            if self.processes.controller.alive:
                self.processes.controller.write_line("stop")
