"""Kept sets from the store to the loss, through a real model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_megatron.batching.store import SampleTable
from tests.trainer.models import VOCAB, write_samples

pytestmark = pytest.mark.engine
OBJECTIVES = {
    "kl": {
        "preset": "grpo",
        "kl": "is_k3",
        "kl_beta": 0.1,
        "entropy_weight": 0.01,
        "mismatch": "tis",
    },
    "preference": {"preset": "gspo", "preference_weight": 0.3, "off_policy_mask": "opsm"},
    "reward_kl": {"preset": "reinforce_pp"},
}
CASES = "tests.trainer.trainer_ranks:"


@pytest.fixture(scope="module")
def truncated(tmp_path_factory) -> str:
    return write_samples(
        tmp_path_factory.mktemp("store") / "step_000001",
        num_updates=2,
        num_domains=2,
        truncated=True,
    )


def expected_logprobs(model: str, table: SampleTable) -> np.ndarray:
    """transformers' log-probs over the kept sets, and over the vocabulary: [2, n]."""
    from transformers import AutoModelForCausalLM

    policy, found = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval(), []
    for row in range(len(table)):
        prompt, (completion, _) = table.prompt_ids(row), table.completion(row)
        ids = torch.from_numpy(np.concatenate([prompt, completion]).astype(np.int64))[None]
        with torch.no_grad():
            logits = policy(ids).logits[0, len(prompt) - 1 : -1]
        kept = table.kept(row)
        sets = torch.zeros(len(completion), VOCAB, dtype=torch.bool)
        sets[np.repeat(np.arange(len(completion)), kept.sizes), kept.ids.astype(np.int64)] = True
        target = ids[0, len(prompt) :, None]
        sets[~sets.gather(1, target)[:, 0]] = True
        found.append(
            torch.cat(
                [
                    scores.log_softmax(-1).gather(1, target).T
                    for scores in (logits.masked_fill(~sets, -torch.inf), logits)
                ]
            ).numpy()
        )
    return np.concatenate(found, 1)


@pytest.mark.parametrize("splits", [None, "tensor_parallel_size", "context_parallel_size"])
def test_logprobs_over_kept_sets(request, moe_model, truncated, splits):
    size = 2 if splits else 1
    world = request.getfixturevalue(f"world{size}")
    found, usable = world.run(
        CASES + "truncated_logprobs",
        model=moe_model,
        samples=truncated,
        layout={splits: size} if splits else {},
    )
    expected = expected_logprobs(moe_model, SampleTable(Path(truncated)))
    np.testing.assert_allclose(found, expected, atol=2e-5)
    same = found[0] == found[1]
    assert (same == ~usable).mean() > 0.99 and 0.6 < usable.mean() < 0.9


def updates(world, model: str, samples: str, layout: dict) -> dict:
    return world.run(
        CASES + "train_objectives",
        model=model,
        samples=samples,
        objectives=OBJECTIVES,
        layout=layout,
    )


@pytest.fixture(scope="module")
def updates_of_one_rank(world1, moe_model, truncated) -> dict:
    return updates(world1, moe_model, truncated, {"share_prefixes": False})


@pytest.mark.parametrize(
    "layout",
    [
        {"tensor_parallel_size": 2},
        pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.matrix),
        pytest.param({"context_parallel_size": 2}, marks=pytest.mark.matrix),
    ],
)
def test_updates_do_not_depend_on_the_layout(
    world2, moe_model, truncated, updates_of_one_rank, layout
):
    found = updates(world2, moe_model, truncated, layout)
    for name, report in updates_of_one_rank.items():
        for key in ("losses", "grad_norms"):
            np.testing.assert_allclose(found[name][key], report[key], rtol=1e-4, atol=1e-6)
        assert report["metrics"]["tokens/infinite_fraction"] > 0.1
