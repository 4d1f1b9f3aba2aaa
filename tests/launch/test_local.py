"""What the supervisor's command does around the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_megatron import pretended_cuda
from grpo_megatron.cli.main import main
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import EngineError, RewardError, SetupError
from grpo_megatron.launch import local, local_gpus
from grpo_megatron.launch.run_lock import run_lock
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (EngineError("rollout-0 died", where="somewhere"), 5, "rollout-0 died"),
        (AssertionError("of a library"), 1, "AssertionError: of a library"),
        (OSError(28, "No space left on device"), 3, "cannot write: No space left on device"),
    ],
)
def test_every_failure_is_an_event(tmp_path, error, exit_code, reason):
    """Also one without a name of its own."""

    def fail() -> int:
        raise error

    run_dir = RunDir(tmp_path)
    with pytest.raises(type(error)) as raised:
        local._supervised(SimpleNamespace(run=fail, run_dir=run_dir))
    assert raised.value is error
    (event,) = read_events(run_dir.events)
    assert (event["kind"], event["exit_code"], event["reason"]) == ("failed", exit_code, reason)


ON_GPUS = ["placement.gpus_per_node=3", "domains.0.num_problems=1600"]


@pytest.fixture
def without_driver(monkeypatch):
    monkeypatch.setattr(local_gpus, "has_gpu_driver", lambda: False)


def test_a_recipe_for_gpus_starts_nothing_on_a_machine_without_one(
    tmp_path, monkeypatch, capsys, without_driver
):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "demo/gspo-moe-cpu", *ON_GPUS]) == 3
    said = capsys.readouterr().err
    assert "this machine has no GPU" in said and "placement.gpus_per_node=0" in said
    assert not list(tmp_path.iterdir())


def test_who_has_a_gpu_or_pretends_to_is_let_through(monkeypatch, without_driver):
    config = resolve("demo/gspo-moe-cpu", ON_GPUS).config
    with pytest.raises(SetupError):
        local_gpus.refuse_absent_gpus(config)
    local_gpus.refuse_absent_gpus(resolve("demo/gspo-moe-cpu").config)
    with monkeypatch.context() as pretending:
        pretending.setenv(pretended_cuda.VARIABLE, "1")
        local_gpus.refuse_absent_gpus(config)
    monkeypatch.setattr(local_gpus, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(local_gpus, "num_gpus", lambda: None)
    local_gpus.refuse_absent_gpus(config)


def test_a_recipe_for_more_gpus_than_this_machine_has_starts_nothing(monkeypatch):
    config = resolve("demo/gspo-moe-cpu", ON_GPUS).config
    monkeypatch.delenv(pretended_cuda.VARIABLE, raising=False)
    monkeypatch.setattr(local_gpus, "has_gpu_driver", lambda: True)
    monkeypatch.setattr(local_gpus, "num_gpus", lambda: 3)
    local_gpus.refuse_absent_gpus(config)
    monkeypatch.setattr(local_gpus, "num_gpus", lambda: 2)
    with pytest.raises(SetupError, match=r"asks for 3 GPUs.* may use 2"):
        local_gpus.refuse_absent_gpus(config)


def test_gpus_are_counted_by_the_drivers_files_and_by_what_is_visible(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus.num_gpus(tmp_path) is None
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert local_gpus.num_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert local_gpus.num_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus.num_gpus(tmp_path) == 0


def test_a_job_is_not_asked_for_gpus(tmp_path, monkeypatch, without_driver):
    """Its batch script may run elsewhere than its ranks."""
    monkeypatch.setattr(local, "_refuse_unbound", lambda config: None)
    monkeypatch.setattr(local, "_run", lambda resolved, run_dir, in_job: 0)
    resolved = resolve("demo/gspo-moe-cpu", [*ON_GPUS, f"runs_dir={tmp_path}"])
    assert local.train(resolved, in_job=True) == 0
    with pytest.raises(SetupError):
        local.train(resolved, overwrite=True)


@pytest.fixture
def stage_run(tmp_path, monkeypatch) -> RunDir:
    """The run of a stage, with a checkpoint and a result; what is started ends at once."""
    run_dir = RunDir(tmp_path / "demo")
    run_dir.create()
    write_resolved(run_dir.config, resolve("demo/gspo-moe-cpu", [f"runs_dir={tmp_path}"]))
    run_dir.stage_record.write_text("before")
    run_dir.result.write_text("{}")
    (run_dir.checkpoints / "file").touch()
    monkeypatch.setattr(local, "_run", lambda *_: 0)
    return run_dir


def train_stage(run_dir: RunDir, *flags: str) -> int:
    """Train with a record of this text, then flags."""
    record, *others = flags
    file = run_dir.root.parent / "record.json"
    file.write_text(record)
    runs = f"runs_dir={run_dir.root.parent}"
    return main(["train", "demo/gspo-moe-cpu", runs, "--stage", str(file), *others])


def test_a_stage_is_recorded_where_the_run_before_it_is_gone(stage_run):
    assert train_stage(stage_run, "after", "--overwrite") == 0
    assert stage_run.stage_record.read_text() == "after"
    assert not (stage_run.checkpoints / "file").exists()


def test_a_run_that_is_no_stage_replaces_one(stage_run):
    assert (
        main(["train", "demo/gspo-moe-cpu", f"runs_dir={stage_run.root.parent}", "--overwrite"])
        == 0
    )
    assert not stage_run.stage_record.exists()


def test_what_is_refused_leaves_a_stage_as_it_was(stage_run, monkeypatch):
    def refuse(*_, **__):
        raise RewardError("no such module", where="domains.0")

    monkeypatch.setattr(local, "_refuse_unbound", refuse)
    assert train_stage(stage_run, "after", "--overwrite") == RewardError.exit_code
    assert train_stage(stage_run, "before", "--resume-if-exists") == RewardError.exit_code
    with run_lock(stage_run):
        assert train_stage(stage_run, "after", "--overwrite") == RewardError.exit_code
    assert stage_run.stage_record.read_text() == "before"
    assert stage_run.result.exists() and (stage_run.checkpoints / "file").exists()


def test_a_stage_that_goes_on_is_the_one_that_began(stage_run, capsys):
    assert train_stage(stage_run, "another", "--resume-if-exists") == 2
    assert "has been replaced meanwhile" in capsys.readouterr().err
    assert stage_run.result.exists()
    assert train_stage(stage_run, "before", "--resume-if-exists") == 0
    assert not stage_run.result.exists() and (stage_run.checkpoints / "file").exists()
    stage_run.stage_record.unlink()  # by a run that is no stage
    assert train_stage(stage_run, "before", "--resume-if-exists") == 2
    assert "has been replaced meanwhile" in capsys.readouterr().err


def test_a_run_that_was_half_removed_is_no_stage_and_can_be_replaced(stage_run, monkeypatch):
    def is_killed(path, kept):
        for part in path.iterdir():
            if part.is_file() and part not in kept:
                part.unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as killed:
        killed.setattr(local, "clear_directory", is_killed)
        with pytest.raises(KeyboardInterrupt):
            local._clear(stage_run)
    assert not stage_run.stage_record.exists()
    assert train_stage(stage_run, "after", "--overwrite") == 0
    assert stage_run.stage_record.read_text() == "after"
