"""Start the roles of a run, watch them, end them together.

A finished controller ends the run. A dead rollout server, rollout worker or environment server is
started again, up to `rollout.max_restarts` times. Where a trainer rank dies, all ranks, the
controller and the rollout workers begin again at the newest checkpoint, up to
`trainer.max_restarts` times, while the others stay. A dead controller, and the last dead one of any
role that is not started again, end the run with an error that shows the dead one's last lines."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

from grpo_megatron import errors
from grpo_megatron.config.presets import load_preset
from grpo_megatron.launch.engine_members import EngineMembers
from grpo_megatron.launch.engine_requests import EngineRequest, answer, take_requests
from grpo_megatron.launch.processes import ChildProcess, End, stop_all, wait_readable
from grpo_megatron.launch.restarts import (
    Restarts,
    first_cause,
    may_train_again,
    was_killed,
)
from grpo_megatron.launch.roles import LocalProcesses
from grpo_megatron.launch.steps import SlurmSteps
from grpo_megatron.launch.watcher import Watcher
from grpo_megatron.rundir import engine_name
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.screen import make_screen

_SETTLE_S = 5.0
"""Within this the ranks end that lost one: who was first is known then."""
_TRAINING = "training"
"""Under this its restarts are counted."""


class Supervisor:
    """Owns the processes of one run; `roles` starts and stops them, here or in a Slurm job."""

    def __init__(self, roles: LocalProcesses | SlurmSteps):
        self.roles = roles
        self.config = roles.config
        self.run_dir = roles.run_dir
        self.screen = make_screen(self.config.name, self.config.num_steps)
        self.interrupts = 0
        self.remedy = f"grpo-megatron resume {self.run_dir.root}"
        self._is_ending = False  # since the controller failed: nothing is started again
        self._buffer = b""
        self._reported_dead: set[str] = set()
        self._restarts = Restarts(self.config.engine_restarts)
        # these need no GPU that the trainer may have filled
        self._environment_restarts = Restarts(self.config.rollout.max_restarts)
        self._training_restarts = Restarts(self.config.trainer_restarts)
        self.watcher: Watcher | None = None
        self._child_of: dict[str, ChildProcess] = {}  # by role
        self._engines = EngineMembers(self.run_dir, range(self.config.num_replicas))
        self._told_hangs: dict[str, str] = {}
        self._words = {"failure": "", "result": ""}  # the controller's last

    def run(self) -> int:
        """Start all processes and watch them until the controller ends; returns the exit code.

        Raises TrainerError, EngineError and what the controller says, where one of them fails."""
        self._prepare_model()
        self.replicas = self.roles.replicas()
        self.workers = self.roles.workers()
        self.reward_hosts = self.roles.reward_hosts()
        self.environments = self._environment_servers()
        self.trainers = self.roles.trainers()
        self.controller = self.roles.controller()
        self.children = [
            *self.replicas,
            *self.workers,
            *self.reward_hosts,
            *self._all_environments(),
            *self.trainers,
            self.controller,
        ]
        handlers = {}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            handlers[number] = signal.signal(number, self._interrupt)
        try:
            for child in self.children:
                child.start()
                append_event(self.run_dir.events, "started", role=child.name, pid=child.started.pid)
            os.set_blocking(self.controller.output, False)
            self._start_watcher()
            if self.interrupts:  # before there was a controller
                self.controller.write_line("stop")
            code = self._watch()
        finally:
            if self.watcher is not None:
                self.watcher.close()
            self.roles.stop(self.children)
            shutil.rmtree(self.run_dir.progress, ignore_errors=True)
            self.screen.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._words["result"]:
            print(self._words["result"], flush=True)
        return code

    def _environment_servers(self) -> dict[str, list[ChildProcess]]:
        """Return the environment servers of every domain that has some."""
        found: dict[str, list[ChildProcess]] = {}
        for number, domain in enumerate(self.config.environment_servers):
            found.setdefault(domain, []).append(self.roles.environment_server(number))
        return found

    def _all_environments(self) -> list[ChildProcess]:
        children: list[ChildProcess] = []
        for servers in self.environments.values():
            children += servers
        return children

    def _prepare_model(self) -> None:
        """Config and tokenizer must be there when the engines start; weights come later."""
        if self.config.model.path is None and not (self.run_dir.model / "config.json").exists():
            from grpo_megatron.data.tiny_model import write_tiny_model

            assert self.config.model.preset is not None  # rule model_source
            write_tiny_model(self.run_dir.model, load_preset(self.config.model.preset))

    def _watch(self) -> int:
        while True:
            output = self.controller.output
            for fd in wait_readable(self._watched(), [output], timeout_s=1.0):
                self._read_messages(fd)
            if self.interrupts > 1:
                return errors.INTERRUPTED_EXIT_CODE
            has_ended = not self.controller.alive
            if has_ended:
                self._read_messages(output)
                if self.controller.exit_code in (0, errors.INTERRUPTED_EXIT_CODE):
                    return self.controller.exit_code
            ends = self._trainer_ends()
            if ends:
                if not self._train_again(ends):
                    return errors.INTERRUPTED_EXIT_CODE
                continue
            if has_ended:
                raise self._controller_error()
            self._check_replicas()
            self._check_workers()
            self._check_reward_hosts()
            self._check_environments()
            self._start_again()
            self._check_hangs()
            self._answer_requests()

    def _watched(self) -> list[ChildProcess]:
        """Children whose end would be news."""
        watched = [self.controller]
        for trainer in self.trainers:
            if trainer.exit_code != 0:  # 0: told to stop
                watched.append(trainer)
        spares = (*self.replicas, *self.workers, *self.reward_hosts, *self._all_environments())
        for child in spares:
            if child.name not in self._reported_dead:
                watched.append(child)
        return watched

    def _controller_error(self) -> errors.GrpoMegatronError:
        """Return what to raise for a controller that failed while no trainer rank did; raises what
        else it was only the first to notice."""
        self._is_ending = True
        self._check_replicas()
        self._check_workers()
        self._check_reward_hosts()
        self._check_environments()
        end = self.controller.end()
        where = str(end.log)
        if self._words["failure"]:
            error = errors.GrpoMegatronError(self._words["failure"], where=where)
        else:  # it was killed, or died without a word
            error = errors.GrpoMegatronError(str(end), where=where, remedy=self.remedy)
        error.exit_code = end.exit_code
        return error

    # --- training, which begins again as a whole

    def _trainer_ends(self) -> list[End]:
        """How trainer ranks failed; empty: none did.

        Ranks and the controller may see that one has died before this process can, so they are
        given a moment until it is known who was first."""
        if self.controller.alive and not any(trainer.exit_code for trainer in self.trainers):
            return []
        deadline = time.monotonic() + _SETTLE_S
        while True:
            ends = [trainer.end() for trainer in self.trainers if trainer.exit_code]  # 0: told to
            have_ended = not any(trainer.alive for trainer in self.trainers)
            is_known = have_ended or any(was_killed(end) for end in ends)
            if is_known or time.monotonic() > deadline:
                return ends
            time.sleep(0.05)

    def _train_again(self, ends: Sequence[End]) -> bool:
        """Start training again after the failure of ranks; False: told to stop meanwhile.

        Raises TrainerError, with the rank's own exit code, where it is not started again."""
        end = first_cause(ends)
        append_event(self.run_dir.events, "died", role=end.name, exit_code=end.exit_code)
        restarts = self._training_restarts
        before = restarts.counts[_TRAINING]
        pause_s = None
        if may_train_again(ends) and not self.interrupts:
            pause_s = restarts.plan(_TRAINING)
        if pause_s is None:
            raise self._trainer_error(end, before)
        self.screen.message(
            f"{end}\ntraining begins again at the newest checkpoint in {pause_s:.0f} s "
            f"({before + 1} of {restarts.most}, trainer.max_restarts); engines go on serving"
        )
        self._end_training()
        while not restarts.take_due(_TRAINING):
            if self.interrupts:
                return False
            time.sleep(0.05)
        self._begin_training(before + 1)
        return True

    def _trainer_error(self, end: End, num_restarts: int) -> errors.TrainerError:
        text = str(end)
        if num_restarts:
            text = f"after {num_restarts} restarts of training (trainer.max_restarts): {text}"
        error = errors.TrainerError(text, where=str(end.log), remedy=self.remedy)
        if 2 <= end.exit_code <= 11:
            error.exit_code = end.exit_code  # the rank's own error class
        return error

    def _end_training(self) -> None:
        """End what holds a part of the unfinished step: trainer ranks, the controller, rollout
        workers with their requests and episodes. Engines drop requests for which nothing waits."""
        present = [worker for worker in self.workers if worker.name not in self._reported_dead]
        ended = [*self.trainers, self.controller, *present]
        for role, child in self._child_of.items():
            if child in ended and self.watcher is not None:
                self.watcher.forget(role)
        self.roles.end(ended)
        self.controller.close_pipes()
        self._buffer = b""
        self._words = {"failure": "", "result": ""}

    def _begin_training(self, number: int) -> None:
        """Start again what `_end_training` ended, for the `number`-th time."""
        shutil.rmtree(self.run_dir.rollouts.parent, ignore_errors=True)
        (self.run_dir.endpoints / "trainer.json").unlink(missing_ok=True)
        for ended in (*self.trainers, self.controller):
            self._forget_addresses(ended.name)
            self.children.remove(ended)
        self.trainers = self.roles.trainers()
        self.controller = self.roles.controller()
        begun = [*self.trainers, self.controller]
        for index, worker in enumerate(self.workers):
            if worker.name in self._reported_dead:  # it is started at its own time, or given up
                continue
            self._forget_addresses(worker.name)
            self.children.remove(worker)
            self.workers[index] = self.roles.worker(_number_of(worker))
            begun.append(self.workers[index])
        self.children += begun
        for child in begun:
            child.start()
            append_event(
                self.run_dir.events,
                "restarted",
                role=child.name,
                pid=child.started.pid,
                number=number,
            )
            self._watch_child(child)
        os.set_blocking(self.controller.output, False)
        if self.interrupts:  # before there was a controller
            self.controller.write_line("stop")

    # --- roles of which others do the work meanwhile

    def _check_replicas(self) -> None:
        self._check_spares(self.replicas, "rollout server", errors.EngineError)

    def _check_workers(self) -> None:
        self._check_spares(self.workers, "rollout worker", errors.EngineError)

    def _check_reward_hosts(self) -> None:
        self._check_spares(self.reward_hosts, "reward host", errors.RewardError)

    def _check_environments(self) -> None:
        for domain, servers in self.environments.items():
            role = f"environment server of domain {domain}"
            self._check_spares(servers, role, errors.EpisodeError)

    def _check_spares(
        self,
        children: Sequence[ChildProcess],
        role: str,
        last: type[errors.GrpoMegatronError],
    ) -> None:
        """Report those that died, of which the others do the work until they are started again;
        raises `last` with the last that is not."""
        for child in children:
            if child.alive or child.name in self._reported_dead:
                continue
            self._reported_dead.add(child.name)
            child.signal_group(signal.SIGKILL)  # what the dead one had started
            end = self._died(child)
            told = f"{end.name} died with exit code {end.exit_code}"
            error = end.error
            if error:
                told += f" ({error})"
            told += f"; see {end.log}"
            restarts = self._restarts_of(child)
            pause_s = None
            if self._is_started_again(child):
                pause_s = restarts.plan(child.name)
            if pause_s is None:
                self._give_up(child)
            else:
                self._forget_addresses(child.name)
                number = f"{restarts.counts[child.name]} of {restarts.most}"
                told += f"; it is started again in {pause_s:.0f} s ({number})"
            is_nobody_left = all(other.name in self._reported_dead for other in children)
            if is_nobody_left and not restarts.are_planned(children):
                raise last(
                    f"the last {role} died{self._after_restarts(child)}: {end}",
                    where=str(end.log),
                    remedy=self.remedy,
                )
            if is_nobody_left:
                told += f"; no {role} is left, the run waits for it"
            self.screen.message(told)

    def _is_started_again(self, child: ChildProcess) -> bool:
        """Whether a process that died is started again, as often as its limit allows."""
        if self._is_ending or child in self.reward_hosts:
            return False
        is_of_engine = child in self.replicas or child in self.workers
        return not (is_of_engine and self._engines.is_leaving(_number_of(child)))

    def _give_up(self, child: ChildProcess) -> None:
        """Say of a process that died that it is not started again."""
        (self.run_dir.endpoints / f"{child.name}.dead").touch()
        index = _number_of(child)
        if child in self.replicas and not self._engines.is_leaving(index):
            self._engines.forget(index)

    def _restarts_of(self, child: ChildProcess) -> Restarts:
        """Return the restarts among which those of a process count."""
        if child in self._all_environments():
            return self._environment_restarts
        return self._restarts

    def _is_any_start_planned(self) -> bool:
        """Whether a process that died will be started again, when its pause is over."""
        of_engines = self._restarts.are_planned([*self.replicas, *self.workers])
        return of_engines or self._environment_restarts.are_planned(self._all_environments())

    def _after_restarts(self, child: ChildProcess) -> str:
        """Say how often a process that died had been started again; empty: never."""
        count = self._restarts_of(child).counts[child.name]
        if not count:
            return ""
        return f" after {count} restarts (rollout.max_restarts)"

    def _forget_addresses(self, name: str) -> None:
        """Remove what a process published that is started again."""
        for file in (f"{name}.json", f"{name}-nodes.json"):
            (self.run_dir.endpoints / file).unlink(missing_ok=True)
        for role, child in self._child_of.items():
            if child.name == name:
                self.run_dir.role_progress(role).unlink(missing_ok=True)

    def _start_again(self) -> None:
        """Start servers and workers whose pause is over."""
        self._start_due(self.replicas, self.roles.replica)
        self._start_due(self.workers, self.roles.worker)
        for servers in self.environments.values():
            self._start_due(servers, self.roles.environment_server)

    def _start_due(self, children: list[ChildProcess], make: Callable[[int], ChildProcess]) -> None:
        """Start those of `children` whose pause is over; they are made by their number."""
        for index, ended in enumerate(children):
            restarts = self._restarts_of(ended)
            if not restarts.take_due(ended.name):
                continue
            stop_all([ended], grace_s=0.0)
            child = make(_number_of(ended))
            child.start()
            children[index] = child
            self.children[self.children.index(ended)] = child
            self._reported_dead.discard(child.name)
            append_event(
                self.run_dir.events,
                "restarted",
                role=child.name,
                pid=child.started.pid,
                number=restarts.counts[child.name],
            )
            self._watch_child(child)

    # --- engines that come and go

    def _answer_requests(self) -> None:
        """Do what `grpo-megatron engines` asks for."""
        for name, request in take_requests(self.run_dir).items():
            told: str | errors.GrpoMegatronError
            try:
                told = self._change_engines(request)
            except errors.GrpoMegatronError as error:
                told = error
            else:
                self.screen.message(told)
            answer(self.run_dir, name, told)

    def _change_engines(self, request: EngineRequest) -> str:
        """Returns what was done. Raises ConfigError where that cannot be."""
        if self.interrupts:
            raise errors.ConfigError("the run is about to end", where=str(self.run_dir.root))
        if not self.replicas:
            raise errors.ConfigError("a run of this kind has no engines", where="kind")
        if request.action == "add":
            return self._add_engine()
        assert request.engine is not None  # the command asks for it
        self._engines.begin_leaving(request.engine)
        return (
            f"{engine_name(request.engine)} gets no more requests, and ends when it has answered "
            "those that it has"
        )

    def _add_engine(self) -> str:
        """Start one more server and its worker, which join once they are up."""
        if self.config.shares_gpus:
            raise errors.ConfigError(
                "engines share their GPUs with the trainer, which may have filled them",
                where="placement.mode",
                remedy="resume with another rollout.num_replicas",
            )
        index = self._engines.free_number()
        problem = self.roles.why_no_room(index)
        if problem:
            raise errors.ConfigError(
                problem,
                where="rollout.num_replicas",
                remedy="remove another one first, or resume with more",
            )
        self._drop_engine(index)  # one that was given up
        replica = self.roles.replica(index)
        worker = self.roles.worker(index)
        self.replicas.append(replica)
        self.workers.append(worker)
        for child in (replica, worker):
            self._restarts.forget(child.name)
            (self.run_dir.endpoints / f"{child.name}.dead").unlink(missing_ok=True)
            self.children.append(child)
            child.start()
            append_event(self.run_dir.events, "added", role=child.name, pid=child.started.pid)
            self._watch_child(child)
        self._engines.add(index)
        return f"{replica.name} starts; it joins when it has got the present weights"

    def _engine_left(self, index: int) -> None:
        """End an engine that the controller has let go."""
        if not self._engines.is_leaving(index):
            return
        self._drop_engine(index)
        self._engines.forget(index)
        name = engine_name(index)
        append_event(self.run_dir.events, "removed", role=name)
        self.screen.message(f"{name} has left the run")

    def _drop_engine(self, index: int) -> None:
        """End the server of this number and its worker, and forget them, where they are there."""
        dropped = []
        for children in (self.replicas, self.workers):
            for child in [child for child in children if _number_of(child) == index]:
                children.remove(child)
                self.children.remove(child)
                dropped.append(child)
        for role, child in list(self._child_of.items()):
            if child in dropped and self.watcher is not None:
                self.watcher.forget(role)
        self.roles.end(dropped)
        for child in dropped:
            (self.run_dir.endpoints / f"{child.name}.dead").touch()
            self._forget_addresses(child.name)
            self._reported_dead.discard(child.name)
            self._restarts.forget(child.name)
        self._child_of = {
            role: child for role, child in self._child_of.items() if child not in dropped
        }

    # --- roles that hang

    def _watch_child(self, child: ChildProcess) -> None:
        for role, pid in self.roles.pids(child).items():
            self._child_of[role] = child
            if self.watcher is not None:
                self.watcher.begin(role, pid)

    def _start_watcher(self) -> None:
        """Look for roles that hang, as the recipe says."""
        if self.config.watch.enabled:
            self.watcher = Watcher(self.config, self.run_dir, {}, self.roles.look)
        for child in self.children:
            self._watch_child(child)
        if self.watcher is not None:
            self.watcher.start()

    def _check_hangs(self) -> None:
        """Tell which roles hang, once, and end what hangs for too long.

        Raises TrainerError for a trainer rank, GrpoMegatronError for the controller."""
        if self.watcher is None:
            return
        for role, child in self._child_of.items():
            if not child.alive:
                self.watcher.forget(role)
        self.watcher.awaits_start = self._is_any_start_planned()
        for news in self.watcher.take_news():
            self.screen.message(news.text)
            if news.kind == "files":
                continue
            fields: dict[str, Any] = {"role": news.role, "seconds": news.seconds}
            if news.kind == "hung":
                self._told_hangs[news.role] = news.text
                fields |= {"phase": news.phase, "detail": news.detail, "cause": news.cause}
                fields |= {"stack": news.stack}
            append_event(self.run_dir.events, news.kind, **fields)
        for role, seconds in self.watcher.overdue().items():
            self._end_hung(role, seconds)

    def _end_hung(self, role: str, seconds: float) -> None:
        """End a role that was named `seconds` ago, where the recipe says so by now."""
        assert self.watcher is not None  # it named the role
        child = self._child_of[role]
        settings = self.config.watch
        if child in self.trainers or child is self.controller:
            if not _is_over(seconds, settings.kill_after_s):
                return
            can_begin_again = self._training_restarts.are_left(_TRAINING) and not self.interrupts
            if child is self.controller or not can_begin_again:
                raise self._hung_too_long(role, seconds)
            self._end_named(role, seconds)
            return
        # a worker that is only slow waits for engines, which have time-outs of their own
        serves = child in (*self.replicas, *self._all_environments())
        waits = self.watcher.cause_of(role) == "stuck" and not serves
        if not waits and _is_over(seconds, settings.replace_after_s):
            self._end_named(role, seconds)

    def _end_named(self, role: str, seconds: float) -> None:
        """End a role that hangs; then it counts as dead."""
        assert self.watcher is not None  # it named the role
        self.screen.message(f"{role} is ended: it was named {seconds:.0f} s ago and still hangs")
        self.watcher.forget(role)
        self.roles.kill(self._child_of[role])

    def _hung_too_long(self, role: str, seconds: float) -> errors.GrpoMegatronError:
        kind: type[errors.GrpoMegatronError] = errors.TrainerError
        if self._child_of[role] is self.controller:
            kind = errors.GrpoMegatronError
        return kind(
            f"{self._told_hangs[role]}\n{role} was given {seconds:.0f} s more (watch.kill_after_s)",
            where=str(self.run_dir.logs / f"{role}.log"),
            remedy=self.remedy,
        )

    def _died(self, child: ChildProcess) -> End:
        end = child.end()
        append_event(self.run_dir.events, "died", role=end.name, exit_code=end.exit_code)
        return end

    def _read_messages(self, fd: int) -> None:
        """Display messages of the controller: one JSON object a line."""
        with contextlib.suppress(BlockingIOError):
            block = os.read(fd, 1 << 16)
            while block:
                self._buffer += block
                block = os.read(fd, 1 << 16)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                continue  # some library printed
            self._show(message)

    def _show(self, message: dict) -> None:
        match message:
            case {"kind": "phase", "name": name}:
                self.screen.phase(name)
            case {"kind": "step", "metrics": metrics, **rest}:
                self.screen.step(metrics, rest.get("samples", ()))
            case {"kind": "message", "text": text}:
                self.screen.message(text)
            case {"kind": "failure" | "result" as kind, "text": text}:
                self._words[kind] = text
            case {"kind": "left", "engine": int(index)}:
                self._engine_left(index)

    def _interrupt(self, number: int, frame: object) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self.screen.message("stopping after this step with a checkpoint; again to stop now")
            if self.controller.alive:
                self.controller.write_line("stop")


def _is_over(seconds: float, limit_s: float) -> bool:
    """Whether a time limit is over; a limit of 0 is none."""
    if limit_s == 0:
        return False
    return seconds >= limit_s


def _number_of(child: ChildProcess) -> int:
    """Return the number at the end of a process's name."""
    return int(child.name.rpartition("-")[2])
