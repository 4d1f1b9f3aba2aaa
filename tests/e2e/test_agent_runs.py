"""Agents through the real command: what engines said of every turn is what transformers says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.batching.store import SampleTable
from grpo_megatron.types import policy_mask
from tests.e2e import runs
from tests.e2e.family_models import reference_model

pytestmark = [pytest.mark.engine, pytest.mark.families]

DEMO = "demo/agent-calculator-cpu"
NUM_STEPS = 3
SMALL = (
    f"num_steps={NUM_STEPS}",
    "data.num_validation=64",
    "data.num_heldout=16",
    "cold_start.target_accuracy=0.02",
    "cold_start.batch_size=32",
    "cold_start.steps_per_evaluation=22",
    "batch.num_prompts=8",
    "batch.num_samples_per_prompt=4",
    "checkpoint.interval=1",
    "checkpoint.keep=9",
    "checkpoint.keep_steps=9",
)
REPLAYED = ("routing.replay=r3", "routing.on_missing=fail")
IN_MID_EPISODE = ("batch.max_staleness=1", "publish.pause=keep", "rollout.segment_tokens=2")


@pytest.fixture(scope="module")
def agent_run(tmp_path_factory) -> Path:
    """Rollouts one step ahead, weights that come in mid-episode, the engine's experts replayed."""
    root = tmp_path_factory.mktemp("runs")
    done = runs.command("train", DEMO, f"runs_dir={root}", *SMALL, *REPLAYED, *IN_MID_EPISODE)
    assert done.returncode == 0, done.stdout + done.stderr
    return root / "agent-calculator"


@pytest.fixture(scope="module")
def models(agent_run, tmp_path_factory) -> dict:
    """transformers' models of the weights of every version."""
    found = {}
    for version in range(NUM_STEPS):
        exported = tmp_path_factory.mktemp("exported") / f"{version}"
        checkpoint = agent_run / "checkpoints" / f"step_{version:06d}"
        done = runs.command("convert", "to-hf", str(checkpoint), "--to", str(exported))
        assert done.returncode == 0, done.stdout + done.stderr
        found[version] = reference_model(exported)
    return found


def logprobs_by(model, ids: np.ndarray, num_prompt: int) -> np.ndarray:
    """transformers' log-probs of the tokens behind the prompt."""
    import torch

    tokens = torch.from_numpy(ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = model(tokens).logits[0, num_prompt - 1 : -1]
    of_tokens = logits.log_softmax(-1).gather(-1, tokens[0, num_prompt:, None])[:, 0]
    return of_tokens.numpy()


def test_every_policy_token_of_whole_conversations(agent_run, models):
    differences = []
    num_turns = []
    num_mixed = 0
    for step in range(NUM_STEPS):
        table = SampleTable(agent_run / "store" / f"step_{step:06d}")
        for row in range(len(table)):
            prompt = table.prompt_ids(row)
            response, logprobs = table.completion(row)
            is_policy = policy_mask(table.turns(row), len(response))
            assert (np.isnan(logprobs) == ~is_policy).all()
            num_turns.append(len(table.turns(row)))
            versions = table.versions(row)
            is_first = versions == versions[0]  # behind new weights, older keys are of other ones
            num_mixed += not is_first.all()
            ids = np.concatenate([prompt, response])
            expected = logprobs_by(models[int(versions[0])], ids, len(prompt))
            differences.append(np.abs(expected - logprobs)[is_policy & is_first])
    differences = np.concatenate(differences)
    assert max(num_turns) >= 2 and num_mixed > 0
    assert np.median(differences) < 1e-5
    assert np.mean(differences > 1e-3) <= 0.01


def test_the_trainer_computes_what_the_engine_did(tmp_path):
    """On policy, with the experts of every turn and of what came between them; episodes are played
    on servers of the run."""
    one_rank = ("trainer.num_ranks=1", "trainer.expert_parallel_size=1")
    servers = ("domains.0.environment.servers=2",)
    settings = (*SMALL, *REPLAYED, *one_rank, *servers, "num_steps=2")
    done = runs.command("train", DEMO, f"runs_dir={tmp_path}", *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "agent-calculator"
    records = runs.metrics(run)
    assert len(records) == 2
    started = {event["role"] for event in runs.events(run, "started")}
    assert {"environment-0", "environment-1"} <= started
    assert runs.no_survivors(run)
    for record in records:
        assert record["mismatch/k3"] < 1e-6
        assert record["routing/unusable_fraction"] == 0
        assert record["response/turns_mean"] >= 1
        assert record["response/environment_tokens_mean"] > 0
        assert record["environment/products/episodes"] > 0
        assert record["environment/products/lost"] == 0
        assert 0 < record["prefix_cache/continued_hit_fraction"] < 1
