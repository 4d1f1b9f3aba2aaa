"""Adapters in every other kind of run than RL that trains a policy, through the real command: SFT,
preferences and distillation."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.runs import command, metrics

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

NUM_STEPS = 4
COMMON = """
num_steps = {steps}

[[domains]]
name = "sums"
source = "file"
path = "{rows}"
template = "{{question}}"
{rewards}

[batch]
num_prompts = 32
num_samples_per_prompt = {samples}

[optimizer]
lr = 2e-3

[trainer]
num_ranks = 2
expert_parallel_size = 2
precision = "float32"
max_tokens_per_microbatch = 4096

[rollout]
dtype = "float32"
max_new_tokens = 8
max_model_len = 64
kv_cache_gib = 0.125

[data]
num_validation = 0
num_heldout = 8

[lora]
rank = 4
"""
REWARDS = 'rewards = [{ function = "grpo_megatron.rewards.functions:exact_match" }]'


def write_rows(folder: Path) -> tuple[Path, Path]:
    """Supervised rows, and pairs of which the shorter answer is preferred."""
    rng = random.Random(0)
    supervised = []
    pairs = []
    for _ in range(200):
        first, second = rng.randint(10, 99), rng.randint(10, 99)
        question = f"{first} + {second} ="
        answer = str(first + second)
        supervised.append({"question": question, "answer": answer, "responses": [f" {answer}"]})
        pairs.append({"prompt": question, "chosen": f" {answer}", "rejected": f" {answer}00"})
    files = (folder / "supervised.jsonl", folder / "pairs.jsonl")
    for file, rows in zip(files, (supervised, pairs), strict=True):
        file.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return files


def train(
    folder: Path,
    kind: str,
    head: str,
    rows: Path,
    *,
    rewards: str = REWARDS,
    samples: int = 1,
    lora: str = "",
) -> Path:
    """Train a few steps; returns the run's directory."""
    recipe = folder / f"{kind}.toml"
    common = COMMON.format(steps=NUM_STEPS, rows=rows, rewards=rewards, samples=samples)
    recipe.write_text(f'name = "{kind}"\nkind = "{kind}"\n{common}{lora}\n{head}', "utf-8")
    done = command("train", str(recipe), f'runs_dir="{folder}"')
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / kind


def changed(before: Path, after: Path) -> set[str]:
    """The last parts of the names of tensors that differ."""
    [old, new] = (
        {
            name: tensor
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        for folder in (before, after)
    )
    assert old.keys() == new.keys()
    return {name.split(".")[-2] for name in old if not torch.equal(old[name], new[name])}


def values(run: Path, name: str) -> list[float]:
    found = [step[name] for step in metrics(run)]
    assert len(found) == NUM_STEPS
    return found


PROJECTIONS = {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}


def test_adapters_alone_learn_in_every_kind(tmp_path):
    supervised, pairs = write_rows(tmp_path)
    preset = '[model]\npreset = "tiny-qwen3-moe"'
    sft = train(tmp_path, "sft", preset, supervised)
    nll = values(sft, "loss/nll")
    assert nll[-1] < nll[0]
    assert changed(sft / "model", sft / "export") == PROJECTIONS

    preferences = train(
        tmp_path, "preferences", f'{preset}\n\n[preferences]\nloss = "dpo"', pairs, rewards=""
    )
    losses = values(preferences, "preference/loss")
    assert losses[-1] < losses[0] == pytest.approx(0.6931, abs=1e-4)
    assert changed(preferences / "model", preferences / "export") == PROJECTIONS

    student = f'[model]\npath = "{sft / "export"}"'
    teacher = f'path = "{preferences / "export"}", domains = ["sums"]'
    distil = train(
        tmp_path,
        "distil",
        f"{student}\n\n[distillation]\nteachers = [{{ {teacher} }}]",
        supervised,
        samples=2,
    )
    divergence = values(distil, "distillation/kl")
    assert divergence[-1] < divergence[0]
    assert changed(sft / "export", distil / "export") == PROJECTIONS


BY_DOMAIN = """
[model]
preset = "tiny-qwen3-moe"

[[domains]]
name = "equations"
source = "file"
path = "{rows}"
template = "{{question}} ="
rewards = [{{ function = "run_rewards:vowels" }}]
"""


def test_every_domain_has_an_adapter_of_its_own(tmp_path):
    """Two domains with the same prompts, but for a sign, and with what engines compute of each: the
    run, its next attempt, a replay, and an evaluation of one domain's export."""
    supervised, _ = write_rows(tmp_path)
    run = train(
        tmp_path,
        "rl",
        BY_DOMAIN.format(rows=supervised)
        + '\n[objective]\npreset = "grpo"\nkl = "k3"\nkl_beta = 0.01',
        supervised,
        rewards='rewards = [{ function = "run_rewards:vowels" }]',
        samples=4,
        lora='per_domain = true\npublish = "adapter"\ntargets = ["self_attn"]',
    )
    for step in metrics(run):
        for domain in ("sums", "equations"):
            assert step[f"canary/abs_max@{domain}"] < 1e-4
            assert step[f"grad/norm@{domain}"] > 0
    exports = [run / "export" / domain for domain in ("sums", "equations")]
    projections = {f"{name}_proj" for name in "qkvo"}
    for export in exports:
        assert changed(run / "model", export) == projections
    assert changed(*exports) == projections
    done = command("replay", f"{run}@2")
    assert done.returncode == 0, done.stdout + done.stderr
    done = command("resume", str(run), f"num_steps={NUM_STEPS + 1}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(metrics(run)) == NUM_STEPS + 1
    done = command("eval", str(tmp_path / "rl.toml"), str(exports[0]), f'runs_dir="{tmp_path}"')
    assert done.returncode == 0, done.stdout + done.stderr
