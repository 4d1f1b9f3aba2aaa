"""Run a recipe on one machine: start the roles, watch them, end them together.

A finished controller ends the run. A dead trainer rank, a dead controller or the last dead
rollout server end it with an error that shows the dead one's last lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from pathlib import Path

from grpo_megatron.config.presets import load_preset
from grpo_megatron.config.resolved import ResolvedConfig, write_resolved
from grpo_megatron.config.run import RunConfig
from grpo_megatron.data.tiny_model import write_tiny_model
from grpo_megatron.errors import (
    INTERRUPTED_EXIT_CODE,
    ConfigError,
    EngineError,
    GrpoMegatronError,
    TrainerError,
)
from grpo_megatron.launch import roles
from grpo_megatron.launch.processes import ChildProcess, stop_all, wait_readable
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.plan.resolve import resolve_run
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import append_event
from grpo_megatron.telemetry.screen import make_screen


def train(resolved: ResolvedConfig, *, overwrite: bool = False) -> int:
    """Start a new run; returns the exit code.

    Raises:
        ConfigError: the run directory exists and `overwrite` is off.
    """
    config: RunConfig = resolved.config
    run_dir = RunDir(resolved.run_path)
    if run_dir.config.exists() and not overwrite:
        raise ConfigError(f"run {config.name!r} exists", where=str(run_dir.root),
                          remedy=f"continue it with `grpo-megatron resume {run_dir.root}`, choose "
                                 "another name=…, or replace it with --overwrite")
    run_dir.root.mkdir(parents=True, exist_ok=True)
    with run_lock(run_dir):
        _empty(run_dir)
        run_dir.create()
        write_resolved(run_dir.config, resolved)
        return Supervisor(config, run_dir).run()


def resume(path: Path, overrides: list[str]) -> int:
    """Continue a run from its newest complete checkpoint; returns the exit code."""
    run_dir = RunDir(path)
    if not run_dir.config.exists():
        raise ConfigError("not a run directory: config.json is missing", where=str(path))
    with run_lock(run_dir):
        resolved = resolve_run(run_dir.config, overrides)
        write_resolved(run_dir.config, resolved)
        return Supervisor(resolved.config, run_dir).run()


def _empty(run_dir: RunDir) -> None:
    """Remove what an earlier run of this name left; keep the lock, which is held."""
    for path in run_dir.root.iterdir():
        if path != run_dir.lock:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


class Supervisor:
    """Owns the processes of one run."""

    def __init__(self, config: RunConfig, run_dir: RunDir):
        self.config, self.run_dir = config, run_dir
        self.screen = make_screen(config.name, config.num_steps)
        self.interrupts = 0
        self._buffer = b""
        self._last_line = self._failure = ""

    def run(self) -> int:
        shutil.rmtree(self.run_dir.endpoints, ignore_errors=True)
        self.run_dir.create()
        self._prepare_model()
        self.replicas, urls = roles.rollout_replicas(self.config, self.run_dir)
        self.trainers = roles.trainer_ranks(self.config, self.run_dir)
        self.controller = roles.controller(self.run_dir, urls)
        self.children = [*self.replicas, *self.trainers, self.controller]
        self._reported_dead: set[str] = set()
        handlers = {n: signal.signal(n, self._interrupt) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            for child in self.children:
                child.start()
                append_event(self.run_dir.events, "started", role=child.name, pid=child.process.pid)
            code = self._watch()
        finally:
            stop_all(self.children)
            self.screen.close()
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._last_line:
            print(self._last_line, flush=True)
        return code

    def _prepare_model(self) -> None:
        """Config and tokenizer must be there when the engines start; weights come later."""
        if self.config.model.path is None and not (self.run_dir.model / "config.json").exists():
            write_tiny_model(self.run_dir.model, load_preset(self.config.model.preset))

    def _watch(self) -> int:
        output = self.controller.process.stdout.fileno()
        os.set_blocking(output, False)
        while True:
            for fd in wait_readable(self._watched(), [output], timeout_s=1.0):
                self._read_messages(fd)
            if self.interrupts > 1:
                return INTERRUPTED_EXIT_CODE
            if not self.controller.alive:
                self._read_messages(output)
                return self._controller_ended()
            self._check_trainers()
            self._check_replicas()

    def _watched(self) -> list[ChildProcess]:
        """Children whose end would be news."""
        trainers = [t for t in self.trainers if t.exit_code != 0]  # 0: told to stop
        replicas = [r for r in self.replicas if r.name not in self._reported_dead]
        return [self.controller, *trainers, *replicas]

    def _controller_ended(self) -> int:
        code = self.controller.exit_code
        if code == 0 or self.interrupts:
            return INTERRUPTED_EXIT_CODE if self.interrupts else 0
        self._check_trainers()  # the controller may only be the first to notice
        self._check_replicas()
        error = GrpoMegatronError(
            self._failure or f"controller ended with exit code {code}\n"
            f"{self.controller.log_tail()}", where=str(self.controller.log))
        error.exit_code = code
        raise error

    def _check_trainers(self) -> None:
        dead = [t for t in self.trainers if t.exit_code]  # 0: told to stop
        if dead:
            first = dead[0]
            append_event(self.run_dir.events, "died", role=first.name, exit_code=first.exit_code)
            error = TrainerError(f"{first.name} ended with exit code {first.exit_code}\n"
                                 f"{first.log_tail()}", where=str(first.log),
                                 remedy=f"grpo-megatron resume {self.run_dir.root}")
            if first.exit_code and 2 <= first.exit_code <= 10:
                error.exit_code = first.exit_code  # the rank's own error class
            raise error

    def _check_replicas(self) -> None:
        for replica in self.replicas:
            if not replica.alive and replica.name not in self._reported_dead:
                self._reported_dead.add(replica.name)
                replica.signal_group(signal.SIGKILL)  # what the dead server had started
                append_event(self.run_dir.events, "died", role=replica.name,
                             exit_code=replica.exit_code)
                self.screen.message(f"{replica.name} died with exit code {replica.exit_code}; "
                                    f"see {replica.log}")
        if len(self._reported_dead) == len(self.replicas):
            last = self.replicas[-1]
            raise EngineError(f"the last rollout server, {last.name}, died with exit code "
                              f"{last.exit_code}\n{last.log_tail()}", where=str(last.log),
                              remedy=f"grpo-megatron resume {self.run_dir.root}")

    def _read_messages(self, fd: int) -> None:
        """Display messages of the controller: one JSON object a line."""
        with contextlib.suppress(BlockingIOError):
            while block := os.read(fd, 1 << 16):
                self._buffer += block
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
            case {"kind": "step", "metrics": metrics, "samples": samples}:
                first = {sample["rank"]: sample for sample in reversed(samples)}
                self.screen.step(metrics, first.get("best"), first.get("worst"))
            case {"kind": "message", "text": text}:
                self.screen.message(text)
            case {"kind": "failure", "text": text}:
                self._failure = text
            case {"kind": "result", "text": text}:
                self._last_line = text

    def _interrupt(self, number, frame) -> None:
        self.interrupts += 1
        if self.interrupts == 1:
            self.screen.message("stopping after this step with a checkpoint; again to stop now")
            self.controller.signal_group(signal.SIGTERM)
