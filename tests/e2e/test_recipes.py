"""Every shipped recipe and graph, rehearsed whole with a tiny model of its family."""

from __future__ import annotations

import json
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from grpo_megatron import assets
from grpo_megatron.plan.resolve import resolve
from tests.e2e import runs
from tests.e2e.chat_model import write_chat_model, write_sums

pytestmark = [pytest.mark.engine, pytest.mark.recipes, pytest.mark.timeout(1200)]


SMALL = (
    "model.preset=null",
    "placement.gpus_per_node=0",
    "placement.trainer_nodes=1",
    "placement.rollout_nodes=0",
    "trainer.num_ranks=2",
    "trainer.tensor_parallel_size=2",
    "trainer.max_tokens_per_microbatch=1024",
    "rollout.num_replicas=1",
    "rollout.tensor_parallel_size=1",
    "rollout.max_new_tokens=48",
    "rollout.max_model_len=512",
    "batch.num_prompts=8",
    "batch.num_samples_per_prompt=4",
    "sampling.dynamic=false",  # an untrained model is never right
    "domains.0.rewards.1.arguments.buffer=40",
    "data.num_validation=8",
    "data.num_heldout=8",
    "num_steps=2",
)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    root = tmp_path_factory.mktemp("inputs")
    write_chat_model(root / "model")
    write_sums(root / "math.jsonl")
    return root


@pytest.mark.parametrize("recipe", assets.names(assets.root() / "recipes"))
def test_a_recipe_is_rehearsed(tmp_path, recipe):
    done = runs.command("rehearse", recipe, "--to", str(tmp_path / "here"), timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "here" / "rehearsal.json").read_text())
    assert all(finding["holds"] for finding in report["findings"])
    config = resolve(recipe).config
    if config.trains and config.num_steps:
        records = runs.metrics(tmp_path / "here" / "run")
        assert [record["step"] for record in records] == [0, 1, 2]
        if config.critic is not None and config.critic.warmup_steps:
            assert all(record["critic/grad_norm"] > 0 for record in records)
            assert "grad/norm" not in records[0]  # only the critic is trained
            records = records[1:]
        assert all(record["grad/norm"] > 0 for record in records)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("graph", assets.names(assets.root() / "recipes" / "graphs"))
def test_a_graph_is_rehearsed(tmp_path, graph):
    done = runs.command("rehearse", graph, "--to", str(tmp_path / "here"), timeout_s=3600)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "here" / "rehearsal.json").read_text())
    assert all(finding["holds"] for finding in report["findings"])


def test_a_recipe_of_its_users_own_is_rehearsed(tmp_path):
    """Other sizes, a reward in a file of their own, a model that is on the cluster only."""
    recipe = f"{runs.FOLDER}/users_recipe.toml"
    done = runs.command("rehearse", recipe, "--to", str(tmp_path / "here"), timeout_s=900)
    assert done.returncode == 0, done.stdout + done.stderr
    [record, *_] = runs.metrics(tmp_path / "here" / "run")
    assert "reward/vowels/mean" in record


def test_a_recipe_whose_teachers_are_served_is_rehearsed(tmp_path):
    """A real server takes the place of both, and is gone afterwards."""
    done = runs.command(
        "rehearse",
        "stages/tiny-distil",
        "distillation.mode=topk_tail",
        "distillation.teachers="
        "[{url='http://big:8000', domains=['plus', 'minus']}, {url='http://other:8000'}]",
        "--to",
        str(tmp_path / "here"),
        timeout_s=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "here" / "rehearsal.json").read_text())
    found = {finding["what"]: finding for finding in report["findings"]}
    assert all(finding["holds"] for finding in found.values())
    assert "teachers behind servers answered" in found
    [url] = {change["after"] for change in report["changes"] if change["key"].endswith(".url")}
    with pytest.raises(URLError, match="refused"):
        urlopen(f"{url}/health", timeout=5)


def test_a_step_of_which_nothing_is_kept_is_told(inputs, tmp_path):
    """Dynamic sampling with a model that is never right: nothing is trained, and it says so."""
    dynamic = [text for text in SMALL if not text.startswith("sampling")]
    done = runs.command(
        "train",
        "dense/qwen3-8b",
        f"runs_dir={tmp_path}",
        "name=run",
        f"model.path={inputs / 'model'}",
        f"domains.0.path={inputs / 'math.jsonl'}",
        *dynamic,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 0: none of 72 groups was kept: nothing is trained" in done.stdout
