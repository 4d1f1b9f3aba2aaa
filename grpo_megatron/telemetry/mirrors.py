"""Copies of metrics.jsonl for Weights & Biases and TensorBoard.

Files are the truth and services are mirrors: a mirror gets exactly the record that was written,
and one that fails says so once and is left out for the rest of the run."""

import importlib
import importlib.util
import logging
import shutil
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from grpo_megatron.config.run import TelemetryConfig
from grpo_megatron.errors import SetupError
from grpo_megatron.rundir import RunDir

logger = logging.getLogger(__name__)

_WANDB_TIMEOUT_S = 60


class Mirrors:
    """The running mirrors of a run. `mirrors` says by name how to start each, which happens here.
    No method raises: a mirror that fails is logged once and then left out."""

    def __init__(self, mirrors: Mapping[str, Callable[[], Any]]):
        self.running: dict[str, Any] = {}  # those that work, by name
        for name, start in mirrors.items():
            with self._guarded(name):
                self.running[name] = start()

    def log(self, record: Mapping[str, Any]) -> None:
        """Give every running mirror one record of metrics.jsonl."""
        for name, mirror in list(self.running.items()):
            with self._guarded(name):
                mirror.log(record)

    def close(self) -> None:
        """End all mirrors, with what they still hold written."""
        for name, mirror in list(self.running.items()):
            with self._guarded(name):
                mirror.close()
        self.running.clear()

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a service does, the run goes on
            self.running.pop(name, None)
            logger.warning(
                "%s fails and is off for the rest of this run (metrics.jsonl has "
                "everything): %s: %s",
                name,
                type(error).__name__,
                error,
            )


def make_mirrors(
    config: TelemetryConfig, run_dir: RunDir, run_name: str, settings: dict[str, Any] | None = None
) -> Mirrors:
    """Return what the recipe (`settings`, for display) asks for. Raises SetupError where a package
    is missing."""
    wanted: dict[str, Callable[[], Any]] = {}
    if config.wandb != "off":
        wanted["wandb"] = lambda: _wandb_mirror(run_dir, run_name, config, settings)
    if config.tensorboard:
        wanted["tensorboard"] = lambda: _tensorboard_mirror(run_dir.root / "tensorboard")
    for package in wanted:
        if importlib.util.find_spec(package) is None:
            raise SetupError(
                f"telemetry asks for {package}, which is not installed",
                where="[telemetry]",
                remedy="pip install 'grpo-megatron[mirrors]'",
            )
    return Mirrors(wanted)


def _wandb_mirror(
    run_dir: RunDir, run_name: str, config: TelemetryConfig, settings: dict[str, Any] | None
) -> SimpleNamespace:
    """Weights & Biases; a resumed run continues under the id kept in `wandb/run_id`.

    Records go in without wandb's own step, which refuses steps that a resumed run repeats."""
    _import_wandb_with_folders_in(run_dir.root / "wandb" / "tmp")
    import wandb

    id_file = run_dir.root / "wandb" / "run_id"
    if not id_file.is_file():
        id_file.parent.mkdir(parents=True, exist_ok=True)
        id_file.write_text(uuid.uuid4().hex[:12])
    quiet = wandb.Settings(
        silent=True,
        console="off",
        disable_git=True,
        disable_code=True,
        init_timeout=_WANDB_TIMEOUT_S,
        login_timeout=_WANDB_TIMEOUT_S,
    )
    mode: Literal["online", "offline"] = "offline"
    if config.wandb == "online":
        mode = "online"
    run = wandb.init(
        project=config.wandb_project,
        name=run_name,
        id=id_file.read_text().strip(),
        resume="allow",
        dir=run_dir.root,
        mode=mode,
        config=settings,
        settings=quiet,
    )
    run.define_metric("*", step_metric="step")
    return SimpleNamespace(log=run.log, close=run.finish)


def _import_wandb_with_folders_in(directory: Path) -> None:
    """Import wandb so that the temporary folders which it makes at import lie in `directory`.

    It removes them at a regular exit only. What a killed process left is removed here, by the next
    one; a process that has imported wandb already keeps the folders that it has."""
    if "wandb" in sys.modules:
        return
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    before = tempfile.tempdir
    tempfile.tempdir = str(directory.absolute())
    try:
        importlib.import_module("wandb")
    finally:
        tempfile.tempdir = before


def _tensorboard_mirror(directory: Path) -> SimpleNamespace:
    """TensorBoard event files; nulls are left out, values are float32 there."""
    # TensorBoard's own writer: torch's needs torch, which telemetry must not import.
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(directory))
    start = [SessionLog(status=SessionLog.START)]  # hides what an interrupted run wrote from here

    def log(record: Mapping[str, Any]) -> None:
        at = {"step": record["step"], "wall_time": record["time_s"]}
        if start:
            writer.add_event(Event(session_log=start.pop(), **at))
        values = []
        for name, value in record.items():
            if name not in ("step", "time_s") and value is not None:
                values.append(Summary.Value(tag=name, simple_value=value))
        writer.add_event(Event(summary=Summary(value=values), **at))
        writer.flush()

    return SimpleNamespace(log=log, close=writer.close)
