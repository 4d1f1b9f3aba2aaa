"""A small graph with every kind of stage on the real engines: what runs, what is left out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e import runs

pytestmark = [pytest.mark.engine, pytest.mark.matrix, pytest.mark.timeout(1500)]

GRAPH = """
name = "graph"
runs_dir = "{root}"

[stages.base]
recipe = "{recipe}"
settings = ["kind=sft", "num_steps=3", "evaluation.num_samples=4"]
gates = ["eval.addition.prompts >= 8", "steps >= 3"]

[stages.sampled]
recipe = "{recipe}"
inputs = {{ "model.path" = "base" }}
settings = ["kind=rejection_sample", "num_steps=0", "rejection.max_prompts=24",
            "rejection.max_per_prompt=2", "domains.0.accuracy_threshold=0.01"]

[stages.again]
recipe = "{recipe}"
inputs = {{ "model.path" = "base", "domains.0.path" = "sampled" }}
settings = ["kind=sft", "num_steps=2", "batch.num_prompts=4", "domains.0.source=file",
            "domains.0.dataset=null", "domains.0.arguments={{}}", "domains.0.num_problems=null",
            "domains.0.template={{question}}", "data.num_heldout=2", "data.num_validation=0"]

[stages.distilled]
recipe = "{recipe}"
inputs = {{ "model.path" = "base", "distillation.teachers.0.path" = "again" }}
settings = ["kind=distil", "num_steps=2", "distillation.mode=full",
            'distillation.teachers=[{{path="x"}}]', "placement.mode=colocated"]

[stages.soup]
merge = {{ base = 1, distilled = 3 }}

[stages.last]
recipe = "{recipe}"
inputs = {{ "model.path" = "soup" }}
settings = ["kind=eval", "num_steps=0"]
gates = ["seconds <= 0"]

[stages.never]
export = "last"
"""


def test_a_graph(tmp_path):
    file = tmp_path / "graph.toml"
    text = GRAPH.format(root=tmp_path, recipe=runs.RECIPE)
    file.write_text(
        text.replace(
            'export = "last"',
            f'recipe = "{runs.RECIPE}"\ninputs = {{ "model.path" = "soup" }}\n'
            'settings = ["kind=eval", "num_steps=0"]\n'
            'gates = ["no domain drops more than 1 against last"]',
        )
    )
    done = runs.command("stages", "run", str(file), timeout_s=1200)
    said = done.stdout + done.stderr
    assert done.returncode == 11, said  # the last gate cannot be met
    root = tmp_path / "graph"
    result = json.loads((root / "base" / "result.json").read_text())
    assert result["steps"] == 3 and {"pass_at_4", "majority_at_4"} <= result["eval"]["all"].keys()
    rows = [json.loads(line) for line in (root / "sampled/dataset.jsonl").read_text().splitlines()]
    assert rows and all(1 <= len(row["responses"]) <= 2 for row in rows)
    losses = [record["loss/nll"] for record in runs.metrics(root / "again")]
    assert len(losses) == 2
    kls = [record["distillation/kl"] for record in runs.metrics(root / "distilled")]
    assert len(kls) == 2 and all(kl > 0 for kl in kls)
    tensors = [
        load_file(root / name / "export" / "model.safetensors")
        for name in ("base", "distilled", "soup")
    ]
    for name, mean in tensors[2].items():
        assert (0.25 * tensors[0][name] + 0.75 * tensors[1][name] - mean).abs().max() < 1e-6
    assert "never: not run, because of last" in said
    assert not (root / "never").exists()
    stamps = {
        name: (root / name / "result.json").stat().st_mtime_ns
        for name in ("base", "sampled", "again", "distilled", "soup")
    }
    again = runs.command("stages", "run", str(file), "--only", "distilled")
    assert again.returncode == 0 and "done and unchanged" in again.stdout
    assert stamps == {name: (root / name / "result.json").stat().st_mtime_ns for name in stamps}
    states = runs.command("stages", "status", str(file)).stdout
    assert "gate closed" in states and "seconds <= 0 (seen: " in states
    assert all(runs.no_survivors(Path(root / name)) for name in stamps)


WITH_A_CRITIC = """
name = "critic"
runs_dir = "{root}"

[stages.scorer]
recipe = "stages/tiny-reward-model"
settings = ["num_steps=3", "model.preset=tiny-qwen3-moe"]

[stages.scored]
recipe = "{recipe}"
inputs = {{ "critic.path" = "scorer" }}
settings = ["num_steps=2", "objective.preset=ppo", "critic={{}}"]

[stages.plain]
recipe = "{recipe}"
settings = ["num_steps=2", "objective.preset=ppo", "critic={{}}"]
"""


def test_a_reward_model_of_an_earlier_stage_begins_the_critic(tmp_path):
    """Once: a resume goes on without it."""
    file = tmp_path / "graph.toml"
    file.write_text(WITH_A_CRITIC.format(root=tmp_path, recipe=runs.RECIPE))
    done = runs.command("stages", "run", str(file), timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    root = tmp_path / "critic"
    first, _ = runs.metrics(root / "scored")
    plain, _ = runs.metrics(root / "plain")
    assert first["reward/mean"] == plain["reward/mean"]  # the same samples
    assert abs(first["critic/value_mean"] - plain["critic/value_mean"]) > 1e-3
    shutil.rmtree(root / "scorer")
    resumed = runs.command("resume", str(root / "scored"), "num_steps=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert [record["step"] for record in runs.metrics(root / "scored")] == [0, 1, 2]
