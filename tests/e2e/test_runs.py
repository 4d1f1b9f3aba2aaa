"""Whole runs on the real engines: what they leave, how they resume, how they die."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.manifest import read_manifest
from tests import engine_faults
from tests.e2e import runs

pytestmark = pytest.mark.engine

PER_STEP = (
    "reward/mean",
    "reward/vowels/mean",
    "reward/exact_match/mean",
    "advantage/mean",
    "advantage/std",
    "clip/low_fraction",
    "clip/high_fraction",
    "mismatch/k3",
    "mismatch/abs_max",
    "policy/entropy",
    "grad/norm",
    "response/length_mean",
    "throughput/rollout_tokens_per_s",
    "throughput/train_tokens_per_s",
    "time/rollout_s",
    "time/reward_s",
    "time/train_s",
    "time/publish_s",
    "idle/trainer",
    "idle/engines",
    "idle/rewards",
    "policy/version",
    "policy/staleness",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """An uninterrupted deterministic run of six steps."""
    root = tmp_path_factory.mktemp("runs")
    with runs.command_lines() as seen:
        done = runs.command(
            "train",
            runs.RECIPE,
            f"runs_dir={root}",
            "name=whole",
            "domains.0.rewards.0.arguments.api_key=$REWARD_KEY",
        )
    (root / "whole_command_lines").write_bytes(b"\n".join(seen))
    (root / "whole_output").write_text(done.stdout + done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("held-out accuracy before 0.0")
    return root / "whole"


def test_metrics_of_every_step(whole):
    records = runs.metrics(whole)
    assert [r["step"] for r in records] == list(range(6))
    for record in records:
        missing = [name for name in PER_STEP if record.get(name) is None]
        assert not missing
        assert record["policy/version"] == record["step"]
        assert record["policy/staleness"] == 0
        assert record["mismatch/abs_max"] < 1e-4  # fp32: trainer and engine agree
        assert record["canary/abs_max"] < 1e-4
        assert record["clip/low_fraction"] == record["clip/high_fraction"] == 0  # on-policy
    assert any(record["grad/norm"] > 0 for record in records)


def test_what_a_run_leaves_behind(whole):
    assert runs.no_survivors(whole)
    assert (whole / "config.json").exists()
    assert sorted(p.name for p in (whole / "checkpoints").iterdir()) == [
        "step_000004",
        "step_000006",
    ]  # two are kept
    sample = json.loads((whole / "samples/step_000000.jsonl").read_text().splitlines()[0])
    assert sample["rank"] == "best" and set(sample["components"]) == {"vowels", "exact_match"}
    assert not list(whole.rglob("*.tmp"))


def test_no_secret_is_shown(whole):
    """Those of the environment, one that the recipe names, and the tokens of the run's servers: not
    in its files, its output, its page, or any command line."""
    page = whole.with_name("page.html")
    done = runs.command("report", str(whole), "--to", str(page))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "$REWARD_KEY" in (whole / "config.json").read_text()
    assert runs.tokens(whole)
    assert runs.shown_secrets(whole) == {}
    for name in ("whole_command_lines", "whole_output", page.name):
        content = whole.with_name(name).read_bytes()
        assert content
        for secret in {*runs.SECRETS.values(), *runs.tokens(whole)}:
            assert secret.encode() not in content, name


def test_transformers_loads_the_export(whole):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(whole / "export", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(whole / "export")
    assert tokenizer.decode(tokenizer.encode("12 + 30 =")) == "12 + 30 ="
    before, after = (load_file(whole / d / "model.safetensors") for d in ("model", "export"))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    logits = model(torch.tensor([tokenizer.encode("1 + 2 =")])).logits
    assert bool(torch.isfinite(logits).all())


@pytest.mark.matrix
def test_what_a_run_has_exported_is_evaluated(whole):
    """The accuracy is the one that the run itself measured last; a second one needs a word."""
    arguments = ("eval", runs.RECIPE, str(whole), f"runs_dir={whole.parent}")
    done = runs.command(*arguments, "evaluation.num_samples=2")
    assert done.returncode == 0, done.stdout + done.stderr
    measured = json.loads((whole.parent / "eval-whole/result.json").read_text())["eval"]
    by_the_run = json.loads((whole / "result.json").read_text())["eval"]
    assert measured["all"]["accuracy"] == by_the_run["all"]["accuracy"]
    assert re.search(r"^all .*accuracy \d\.\d{3} .*pass@2 \d\.\d{3}", done.stdout, re.M)
    assert runs.no_survivors(whole.parent / "eval-whole")
    again = runs.command(*arguments)
    assert again.returncode == 2 and "replace it: --overwrite" in again.stderr


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_it(whole):
    """The same metrics, bit for bit: step 4 is trained from the store, step 5 sampled again. Later
    its controller is killed: the run ends and leaves no process."""
    run = Path(shutil.copytree(whole, whole.with_name("damaged")))
    shutil.rmtree(run / "store/step_000005")
    (run / "events.jsonl").unlink()  # ids of processes that others may have by now
    file = max((run / "checkpoints/step_000006/weights").iterdir(), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    process = runs.start("resume", str(run), "num_steps=5000")
    runs.wait_for_steps(run, 7, process)
    runs.kill(runs.role_pid(run, "controller"))
    code, output = runs.finish(process)
    assert f"checkpoint of step 6 is damaged (step_000006/weights/{file.name})" in output
    assert "resumed after step 4" in output
    assert runs.timeless(runs.metrics(run)[:6]) == runs.timeless(runs.metrics(whole))
    assert code not in (0, 130), output
    assert "remedy" in output and "resume" in output
    assert runs.no_survivors(run)


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_resumed_run_equals_an_uninterrupted_one(whole, how):
    """Its controller killed after a checkpoint, or stopped by Ctrl-C, then resumed to the end: the
    same metrics, bit for bit. Steps after the checkpoint are trained from the store."""
    run = whole.parent / how
    process = runs.start(
        "train",
        runs.RECIPE,
        f"runs_dir={whole.parent}",
        f"name={how}",
        *runs.HELD,
        environment=runs.hold(run, 3),
    )
    runs.wait_for_steps(run, 3, process)
    if how == "killed":
        runs.kill(runs.role_pid(run, "controller"))
        runs.release(run)
        code, output = runs.finish(process)
        assert code not in (0, 130), output
    else:
        process.send_signal(signal.SIGINT)
        runs.release(run)
        code, output = runs.finish(process)
        assert code == 130, output
    assert "resume" in output
    assert runs.no_survivors(run)
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert runs.timeless(runs.metrics(run)) == runs.timeless(runs.metrics(whole))


@pytest.mark.chaos
def test_a_clock_that_jumps_by_days_changes_nothing(whole, monkeypatch):
    """In every Python process of the run: the same metrics, and nobody is named."""
    monkeypatch.setenv("PYTHONPATH", str(runs.HERE / "jumping_clock"), prepend=os.pathsep)
    done = runs.command("train", runs.RECIPE, f"runs_dir={whole.parent}", "name=jumping")
    assert done.returncode == 0, done.stdout + done.stderr
    run = whole.parent / "jumping"
    assert runs.timeless(runs.metrics(run)) == runs.timeless(runs.metrics(whole))
    times = [record["time_s"] for record in runs.metrics(run)]
    assert max(times) - min(times) > 80000  # it has jumped
    assert not runs.events(run, "hung") and not runs.events(run, "died")


@pytest.mark.chaos
def test_a_killed_controller_loses_no_recorded_step(whole):
    """Steps after the checkpoint are trained from the store, not sampled again."""
    root, run = whole.parent, whole.parent / "sampled"
    process = runs.start(
        "train",
        runs.RECIPE,
        f"runs_dir={root}",
        "name=sampled",
        "checkpoint.interval=2",
        "rollout.deterministic=false",
        *runs.HELD,
        environment=runs.hold(run, 3),
    )
    runs.wait_for_steps(run, 3, process)
    runs.kill(runs.role_pid(run, "controller"))
    runs.release(run)
    code, output = runs.finish(process)
    assert code not in (0, 130), output
    assert runs.no_survivors(run)
    recorded = runs.metrics(run)[2]
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    records = runs.metrics(run)
    assert [r["step"] for r in records] == list(range(6))
    assert records[2]["reward/mean"] == recorded["reward/mean"]
    np.testing.assert_allclose(records[2]["grad/norm"], recorded["grad/norm"], rtol=1e-6)


@pytest.mark.parametrize(
    ("pause", "num_replicas"), [("wait", 1), pytest.param("abort", 2, marks=pytest.mark.chaos)]
)
def test_one_step_ahead_with_two_updates_and_mirrors(tmp_path, pause, num_replicas):
    """Staleness 1, weights published (abort: to running requests), segments,
    truncated sampling, guided retries, two updates per rollout, offline wandb, TensorBoard."""
    from tests.telemetry.wandb_reader import read_offline_wandb

    done = runs.command(
        "train",
        runs.RECIPE,
        f"runs_dir={tmp_path}",
        "num_steps=3",
        "batch.max_staleness=1",
        "batch.updates_per_rollout=2",
        "rollout.deterministic=false",
        f"rollout.num_replicas={num_replicas}",
        "objective.preset=grpo",
        "correction.cue= No! ",
        "correction.answer_cue= No, {answer}! ",
        f"publish.pause={pause}",
        "rollout.segment_tokens=4",
        "rollout.top_p=0.9",
        "telemetry.wandb=offline",
        "telemetry.tensorboard=true",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = runs.metrics(tmp_path / "short")
    assert [r["policy/staleness"] for r in records] == [0, 1, 1]
    assert records[1]["time/old_logprobs_s"] > 0
    assert all(r["correction/retries"] > 0 for r in records)
    assert all(r["sampling_mask/size_mean"] > 1 and not r["sampling_mask/missing"] for r in records)
    # over kept ids on both sides; retries are trained where they were sampled
    assert records[0]["mismatch/abs_max"] < 1e-4
    mirrored = read_offline_wandb(tmp_path / "short")
    assert [{k: v for k, v in m.items() if not k.startswith("_")} for m in mirrored] == records
    assert list((tmp_path / "short").rglob("events.out.tfevents*"))
    assert runs.shown_secrets(tmp_path / "short") == {}


@pytest.mark.chaos
def test_an_engine_that_computes_something_else_trains_nothing(tmp_path):
    """Its samples are kept aside; without the fault, `resume` goes on from the start."""
    done = runs.command(
        "train",
        runs.RECIPE,
        f"runs_dir={tmp_path}",
        "name=wrong",
        "num_steps=2",
        environment=engine_faults.environment(runs.FOLDER, noise="mlp.gate:0.02"),
    )
    run, said = tmp_path / "wrong", done.stdout + done.stderr
    assert done.returncode == 7 and "step 0, rollout-0 and the trainer disagree" in said, said
    assert runs.metrics(run) == [] and runs.no_survivors(run)
    assert [p.name for p in (run / "store").rglob("*step_000000*")] == ["rejected_step_000000"]
    assert not list((run / "checkpoints").rglob("*step_000000*"))
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["step"] for record in runs.metrics(run)] == [0, 1]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("role", "code", "message"),
    [
        ("rollout-0", 5, "rollout-0"),
        ("worker-0", 5, "worker-0"),
        ("trainer-1", 6, "trainer-1 ended with exit code 137"),
    ],
)
def test_a_dead_process_ends_the_run(tmp_path, role, code, message):
    once = ("num_steps=5000", "rollout.max_restarts=0", "trainer.max_restarts=0")
    process = runs.start("train", runs.RECIPE, f"runs_dir={tmp_path}", *once)
    run = tmp_path / "short"
    runs.wait_for_steps(run, 1, process)
    runs.kill(runs.role_pid(run, role))
    found, output = runs.finish(process)
    assert found == code, output
    assert message in output and "remedy" in output
    assert runs.no_survivors(run)


@pytest.mark.chaos
@pytest.mark.parametrize("role", ["rollout-1", "worker-1"])
def test_a_dead_replica_or_worker_is_named_and_the_run_goes_on(tmp_path, role):
    run = tmp_path / "short"
    process = runs.start(
        "train", runs.RECIPE, f"runs_dir={tmp_path}", "num_steps=5000", "rollout.num_replicas=2"
    )
    runs.wait_for_steps(run, 2, process)
    runs.kill(runs.role_pid(run, role))
    runs.wait_for_steps(run, len(runs.metrics(run)) + 4, process)
    process.send_signal(signal.SIGTERM)
    code, output = runs.finish(process)
    assert code == 130, output
    assert f"{role} died" in output
    assert "stopping after this step with a checkpoint" in output
    assert runs.no_survivors(run)


@pytest.mark.chaos
def test_steps_sampled_ahead_survive_a_kill(tmp_path):
    """Up to four steps ahead, with weights that come in while completions are running: what was
    recorded before the kill is trained as it is, and no token is older than the bound."""
    process = runs.start(
        "train",
        runs.RECIPE,
        f"runs_dir={tmp_path}",
        "num_steps=10",
        "batch.max_staleness=4",
        "publish.pause=keep",
        "rollout.deterministic=false",
        "rollout.segment_tokens=4",
        "objective.preset=grpo",
        "checkpoint.interval=3",
    )
    run = tmp_path / "short"
    runs.wait_for_steps(run, 4, process)
    os.kill(runs.role_pid(run, "controller"), signal.SIGKILL)
    runs.finish(process)
    recorded = {path.name: read_manifest(path) for path in (run / "store").glob("step_*[0-9]")}
    done = runs.command("resume", str(run))
    assert done.returncode == 0, done.stdout + done.stderr
    records = runs.metrics(run)
    assert [record["step"] for record in records] == list(range(10))
    for record in records:
        ages = [name for name in record if name.removeprefix("staleness/").isdigit()]
        assert max(int(name.removeprefix("staleness/")) for name in ages) <= 4
    assert recorded
    for manifest in recorded.values():
        trained = records[manifest.step]
        assert trained["reward/mean"] == manifest.metrics["reward/mean"]
        assert trained["policy/version"] == manifest.version
