"""Parts `run-…`: the whole command on tiny models with the real engine, judged by what it left."""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from grpo_megatron.config.loader import read_resolved
from grpo_megatron.errors import GrpoMegatronError
from grpo_megatron.launch.last_words import telling_lines
from grpo_megatron.orphans import die_with_parent
from grpo_megatron.prove.conditions import Conditions
from grpo_megatron.prove.part import Job
from grpo_megatron.prove.runner import last_lines
from grpo_megatron.prove.workload import ENGINE_NARROW, WIDE, models
from grpo_megatron.rehearsal.evidence import of_run
from grpo_megatron.rehearsal.tiny_family import write_tiny_checkpoint
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.metrics import read_metrics

_RECIPE = """\
# One of the runs of `grpo-megatron prove`: two-digit sums, and a coin that says what is right.
name = "run"
num_steps = 2

[[domains]]
name = "sums"
source = "reasoning_gym"
dataset = "basic_arithmetic"
arguments = { min_terms = 2, max_terms = 2, min_digits = 2, max_digits = 2, operators = ["+"] }
num_problems = 200
template = "{metadata[expression]} ="
rewards = [{ function = "grpo_megatron.rehearsal.coin:coin" }]

[data]
num_validation = 2
num_heldout = 2

[objective]
preset = "grpo"

[batch]
num_prompts = 4
num_samples_per_prompt = 4

[optimizer]
lr = 1e-4

[trainer]
precision = "bfloat16"
max_tokens_per_microbatch = 4096

[rollout]
dtype = "bfloat16"
max_new_tokens = 32
max_model_len = 256
max_num_seqs = 64
kv_cache_gib = 0.125

[checkpoint]
interval = 1
"""
_STREAMED_STEPS = 2
"""Before the run is resumed with another method."""
_SHARE_OF_GPU = "0.3"
"""Of the GPU's memory, for an engine that shares it with the trainer or not: tiny models."""
_CACHE_BYTES = str(1 << 30)
"""Of the engine's KV cache, which it then does not have to find out: vLLM measures what is free
before and after a pass, and dies where the trainer has given memory back meanwhile."""
_EAGER = "--enforce-eager"
"""No compiler and no graphs: an engine is ready half a minute earlier."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is special about a run."""

    model: str
    """One of `workload.models`."""
    settings: Sequence[str] = ()
    engine_arguments: Sequence[str] = ()
    colocated: bool = False
    is_resumed: bool = True
    """Stopped after two steps and resumed for a third, which publishes through files."""
    is_wide: bool = False
    """Of a GPU's widths on a CPU too: its matrices divide into blocks of FP8."""


DENSE = Wanted("dense")
EXPERTS = Wanted("moe", ["routing.replay=r3", "routing.on_missing=fail"], [_EAGER])
COLOCATED = Wanted("dense", (), [_EAGER], colocated=True, is_resumed=False)
FP8 = Wanted("dense", ["trainer.fp8=blockwise"], [_EAGER], is_resumed=False)
FP8_ENGINE = Wanted(
    "moe",
    ["rollout.fp8=blockwise", *EXPERTS.settings],
    [_EAGER],
    is_resumed=False,
    is_wide=True,
)


def run_dense(job: Job) -> None:
    """A dense model; the engine is compiled and has graphs, as recipes have it."""
    _run(job, DENSE)


def run_experts(job: Job) -> None:
    """A mixture of experts whose routes the engine records and the trainer replays."""
    on_gpu = job.conditions.device == "cuda"
    _run(job, replace(EXPERTS, is_resumed=on_gpu))
    if not on_gpu:
        job.recorder.note("On a CPU it is not resumed, to save time: run-dense is.")


def run_colocated(job: Job) -> None:
    """Trainer and engine on one GPU; the engine sleeps while the trainer works."""
    _run(job, COLOCATED)
    if job.conditions.device != "cuda":
        job.recorder.note(
            "On a CPU an engine has nothing to give back: it pauses, it does not sleep."
        )


def run_fp8(job: Job) -> None:
    """FP8 in the trainer, bfloat16 in the engine: how far are their log-probs apart?"""
    _run(job, FP8)


def run_fp8_engine(job: Job) -> None:
    """FP8 in the engine, whose weights the trainer rounds and publishes: how far apart are they?"""
    _run(job, FP8_ENGINE)


def _run(job: Job, wanted: Wanted) -> None:
    """Train two steps with weights streamed, resume for one with weights through files, and record
    what the run has shown."""
    run_dir = RunDir(job.folder / "run")
    _write_model(job, wanted)
    recipe, settings = recipe_of(job.conditions, wanted, job.folder)
    _command(run_dir, "train", str(recipe), *settings)
    num_attempts = 1
    if wanted.is_resumed:
        others = [
            "num_steps=3",
            "publish.method=file",
            *_engine_arguments(job.conditions, [_EAGER]),
        ]
        _command(run_dir, "resume", str(run_dir.root), *others)
        num_attempts = 2
    config = read_resolved(run_dir.config).config
    for finding in of_run(config, run_dir, num_attempts):
        job.recorder.check(finding.what, finding.holds, finding.detail)
    steps = read_metrics(run_dir.metrics)
    _record_publishes(job, wanted, steps)
    _record_agreement(job, config.canary_tolerance, steps)


def recipe_of(conditions: Conditions, wanted: Wanted, folder: Path) -> tuple[Path, list[str]]:
    """Write the recipe of a run into `folder`; returns it and what is set otherwise."""
    recipe = folder / "recipe.toml"
    recipe.write_text(_RECIPE, encoding="utf-8")
    settings = [*_placement(conditions, wanted), *wanted.settings]
    settings.append(f"runs_dir={_toml(str(folder))}")
    settings.append(f"model.path={_toml(str(folder / 'model'))}")
    return recipe, settings


def _write_model(job: Job, wanted: Wanted) -> None:
    size = ENGINE_NARROW
    if job.conditions.device == "cuda" or wanted.is_wide:
        size = WIDE
    write_tiny_checkpoint(job.folder / "model", models(size)[wanted.model], (), 1)


def _placement(conditions: Conditions, wanted: Wanted) -> list[str]:
    """Return which GPUs trainer and engine get: one each where there are two, else both the
    same."""
    if conditions.device != "cuda":
        if wanted.colocated:
            return ["placement.mode=colocated"]
        return []
    settings = _engine_arguments(conditions, wanted.engine_arguments)
    if wanted.colocated:
        return [*settings, "placement.mode=colocated", "placement.gpus_per_node=1"]
    if conditions.num_gpus > 1:
        return [*settings, "placement.gpus_per_node=2"]
    return settings  # without a placement nobody is told which GPU is whose


def _engine_arguments(conditions: Conditions, others: Sequence[str]) -> list[str]:
    """Return what engines on a GPU are started with."""
    if conditions.device != "cuda":
        return []
    memory = ["--gpu-memory-utilization", _SHARE_OF_GPU, "--kv-cache-memory-bytes", _CACHE_BYTES]
    arguments = [*memory, *others]
    return [f"rollout.engine_arguments={json.dumps(arguments)}"]


def _toml(text: str) -> str:
    """Return a string as the command line takes it."""
    return json.dumps(text)


def _command(run_dir: RunDir, *arguments: str) -> None:
    """Run `grpo-megatron`; its output goes to this part's log.

    Raises GrpoMegatronError, with the last lines of the processes' logs, where it fails."""
    print(f"$ grpo-megatron {shlex.join(arguments)}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "grpo_megatron.cli.main", *arguments],
        check=False,
        preexec_fn=partial(die_with_parent, os.getpid()),
    )
    if done.returncode == 0:
        return
    error = GrpoMegatronError(
        f"`grpo-megatron {arguments[0]}` ended with exit code {done.returncode}\n"
        + "\n".join(_last_words(run_dir)),
        where=str(run_dir.root),
    )
    error.exit_code = done.returncode
    raise error


def _last_words(run_dir: RunDir) -> list[str]:
    """Return what the log of every process of the newest attempt says of its end."""
    found = []
    for log in sorted((run_dir.root / "logs" / "latest").glob("*.log")):
        printable = "\n".join(last_lines(log))
        for line in telling_lines(printable):
            found.append(f"    {log.stem}| {line}")
    return found


def _record_publishes(job: Job, wanted: Wanted, steps: Sequence[dict[str, Any]]) -> None:
    """Record that every step brought its weights into the engine, by which method.

    Where a tensor arrived changed, the publish has ended the run already."""
    num_published = sum(step.get("time/publish_s") is not None for step in steps)
    num_streamed = min(num_published, _STREAMED_STEPS)
    job.recorder.check(
        "weights were streamed to the engine, digests of all tensors equal on both sides",
        num_streamed == _STREAMED_STEPS,
        f"after {num_streamed} steps",
    )
    if wanted.is_resumed:
        num_by_file = num_published - num_streamed
        job.recorder.check(
            "weights were read by the engine from files",
            num_by_file == 1,
            f"after {num_by_file} step",
        )


def _record_agreement(job: Job, tolerance: float, steps: Sequence[dict[str, Any]]) -> None:
    """Record how far trainer and engine were apart in each step."""
    recorder = job.recorder
    worst = max((step.get("canary/abs_mean", 0.0) for step in steps), default=0.0)
    num_compared = sum("canary/abs_mean" in step for step in steps)
    recorder.check(
        "the canary of every step was below its bound",
        num_compared == len(steps) and worst <= tolerance,
        f"{num_compared} of {len(steps)} steps; largest mean difference {worst:.2g} nats, allowed "
        f"{tolerance:g}",
    )
    for name, told, expected in _FIGURES:
        values = [step[name] for step in steps if step.get(name) is not None]
        if values:
            shown = ", ".join(f"{value:.3g}" for value in values)
            recorder.figure(f"{told}, by step", shown, expected=expected)


_FIGURES = (
    (
        "mismatch/abs_mean",
        "mean |trainer - engine| of trained tokens (nats)",
        "bfloat16: 0.01",
    ),
    ("mismatch/abs_max", "largest |trainer - engine| (nats)", ""),
    ("mismatch/k3", "KL of trainer and engine (k3)", "below 0.001"),
    ("canary/abs_mean", "canary, mean difference (nats)", ""),
    (
        "routing/rollout_slot_flip_rate",
        "experts that the live router would choose otherwise than the engine",
        "bfloat16: a few percent",
    ),
    ("routing/unusable_fraction", "routes that could not be replayed", "0"),
    ("time/publish_s", "seconds of a publish", ""),
    ("trainer/peak_memory_gib", "highest memory of the trainer (GiB)", ""),
)
