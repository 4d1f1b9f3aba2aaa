"""Mirrors tell what the file tells, and never stop a run."""

from __future__ import annotations

import os
import struct
import subprocess
import sys

import pytest
import wandb

from grpo_megatron.config.run import TelemetryConfig
from grpo_megatron.errors import DataError, SetupError
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import MetricsWriter, read_metrics
from grpo_megatron.telemetry.mirrors import Mirrors, make_mirrors
from tests.telemetry.wandb_reader import read_offline_wandb

STEPS = 40


def metrics_of(step: int) -> dict:
    values = {f"area/name_{i}/mean": (step + 1) / (i + 3) for i in range(40)}
    return {**values, "tiny": 1e-17 * step, "int": step * 10**10, "nan/value": float("nan")}


def run(run_dir: RunDir, config: TelemetryConfig, first: int, last: int) -> None:
    mirrors = make_mirrors(config, run_dir, "demo", {"seed": 3})
    writer = MetricsWriter(run_dir)
    writer.truncate_after(first - 1)
    for step in range(first, last):
        mirrors.log(writer.write(step, metrics_of(step)))
    mirrors.close()
    writer.close()
    if config.wandb != "off":
        wandb.teardown()  # finish() returns while wandb's process still writes its last block


def test_offline_wandb_equals_the_file_value_by_value(tmp_path):
    run_dir = RunDir(tmp_path)
    run(run_dir, TelemetryConfig(wandb="offline"), 0, STEPS)
    records = read_metrics(run_dir.metrics)
    file = next((tmp_path / "wandb").rglob("*.wandb"))
    assert file.stat().st_size > 32768  # records are split over blocks
    assert read_offline_wandb(file) == records and len(records) == STEPS

    # Resumed from step 30: the same wandb run goes on, with the steps that were repeated.
    run(run_dir, TelemetryConfig(wandb="offline"), 30, STEPS + 5)
    pieces = list((tmp_path / "wandb").rglob("*.wandb"))
    assert len(pieces) == 2 and len({piece.name for piece in pieces}) == 1
    mirrored = {record["step"]: record for record in read_offline_wandb(tmp_path / "wandb")}
    assert list(mirrored.values()) == read_metrics(run_dir.metrics)


def test_tensorboard_has_every_value_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run_dir, config = RunDir(tmp_path), TelemetryConfig(tensorboard=True)
    run(run_dir, config, 0, 6)
    run(run_dir, config, 4, 8)
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    records = read_metrics(run_dir.metrics)
    assert "nan/value" not in events.Tags()["scalars"]
    for name in ("area/name_7/mean", "int", "tiny"):
        found = [(e.step, e.value) for e in events.Scalars(name)]
        expected = [(r["step"], struct.unpack("f", struct.pack("f", r[name]))[0]) for r in records]
        assert found == expected


class Broken:
    def __init__(self, fails_at: str):
        self.fails_at, self.calls = fails_at, []
        self._do("start")

    def log(self, record):
        self._do("log")

    def close(self):
        self._do("close")

    def _do(self, what):
        self.calls.append(what)
        if what == self.fails_at:
            raise ConnectionError("service is down")


@pytest.mark.parametrize("fails_at", ["start", "log", "close"])
def test_a_failing_mirror_warns_once_and_the_others_go_on(fails_at, caplog):
    good = Broken("never")
    mirrors = Mirrors({"bad": lambda: Broken(fails_at), "good": lambda: good})
    for step in range(3):
        mirrors.log({"step": step})
    assert list(mirrors.running) == (["good"] if fails_at != "close" else ["bad", "good"])
    mirrors.close()
    mirrors.close()
    assert good.calls == ["start", "log", "log", "log", "close"]
    assert len(caplog.records) == 1 and "service is down" in caplog.text


def test_a_missing_package_is_an_error_before_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_mirrors(TelemetryConfig(), RunDir(tmp_path), "demo").running == {}
    with pytest.raises(SetupError, match="wandb, which is not installed"):
        make_mirrors(TelemetryConfig(wandb="offline"), RunDir(tmp_path), "demo")


def test_what_is_no_wandb_file(tmp_path):
    with pytest.raises(DataError, match="no offline wandb run"):
        read_offline_wandb(tmp_path)
    file = tmp_path / "run-x.wandb"
    file.write_bytes(b"something else")
    with pytest.raises(DataError, match="not an offline wandb file"):
        read_offline_wandb(file)
    file.write_bytes(b":W&B\xe1\xbe\x00" + struct.pack("<IHB", 1, 2, 1) + b"ab")
    with pytest.raises(DataError, match="checksum"):
        read_offline_wandb(file)


def test_a_killed_mirror_leaves_no_folder_in_the_temporary_directory(tmp_path):
    run_root, temporary = tmp_path / "run", tmp_path / "tmp"
    run_root.mkdir()
    temporary.mkdir()
    script = """
import os, signal, sys
from pathlib import Path
from grpo_megatron.config.run import TelemetryConfig
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.mirrors import make_mirrors
mirrors = make_mirrors(TelemetryConfig(wandb="offline"), RunDir(Path(sys.argv[1])), "demo", {})
assert mirrors.running
mirrors.close()
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run(
        [sys.executable, "-c", script, run_root],
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    assert ended.returncode == -9
    left = [*temporary.glob("*wandb-media"), *temporary.glob("*wandb-artifacts")]
    assert left == []
    assert list((run_root / "wandb" / "tmp").glob("*wandb-media"))
