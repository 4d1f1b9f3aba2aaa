"""Every family through the real command: the engine's log-probs are transformers' at each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e import runs
from tests.e2e.family_models import differences, settings_of
from tests.e2e.family_runs import train_and_convert

pytestmark = [pytest.mark.engine, pytest.mark.families]

LAST = 2  # the step that is looked at; its weights are those of a checkpoint
CASES = [
    # config.json as released models have it, or as transformers 5 saves it
    ("qwen2", "tp2", "ours"),
    ("qwen2_tied", "pp2", "transformers"),
    ("qwen3", "pp2", "transformers"),
    ("qwen3_yarn", "tp2", "ours"),
    ("llama", "tp2", "transformers"),
    ("llama_odd", "pp2", "ours"),
    ("mistral", "tp2", "ours"),
    ("mistral", "pp2", "transformers"),
    ("seed_oss", "tp2", "ours"),
    ("seed_oss_unbiased", "pp2", "transformers"),
    ("mixtral", "ep2", "ours"),
    ("mixtral", "tp2", "transformers"),
    ("qwen3_moe_all_sparse", "pp2_ep2", "ours"),
    ("qwen3_moe_mixed", "tp2_etp1", "transformers"),
    ("deepseek_v2", "tp2", "ours"),
    ("deepseek_v2_lite", "ep2", "transformers"),
    ("deepseek_v3", "tp2", "transformers"),
    ("deepseek_v3_odd", "pp2", "ours"),
    ("deepseek_v3_kernel", "ep2", "ours"),
    ("deepseek_v3_groups", "ep2", "transformers"),
    ("kimi_k2", "ep2", "ours"),
    ("kimi_k2", "tp2", "transformers"),
    ("moonlight", "tp2", "ours"),
    ("moonlight", "pp2_ep2", "transformers"),
    ("glm4_moe", "tp2", "ours"),
    ("glm4_moe_air", "ep2", "transformers"),
    ("qwen3_yarn", "cp2", "ours"),
    ("deepseek_v3", "cp2", "ours"),
    ("qwen3_moe_mixed", "cp2_ep2", "transformers"),
]


TWO_ENGINES = ("rollout.data_parallel_size=2",)
WHOLE_EXPERTS = (*TWO_ENGINES, "rollout.expert_parallel=true")
ENGINES = [
    ("qwen2", TWO_ENGINES),
    ("mixtral", WHOLE_EXPERTS),
    ("qwen3_moe_mixed", WHOLE_EXPERTS),
    ("deepseek_v2_lite", WHOLE_EXPERTS),
    ("deepseek_v3_kernel", WHOLE_EXPERTS),
    ("deepseek_v3_groups", WHOLE_EXPERTS),
    ("moonlight", WHOLE_EXPERTS),
    ("glm4_moe_air", WHOLE_EXPERTS),
    ("qwen3_moe_all_sparse", ("rollout.tensor_parallel_size=2", "rollout.expert_parallel=true")),
]


@pytest.mark.parametrize(("name", "layout", "config_of"), CASES)
def test_the_engine_computes_what_transformers_does(tmp_path, name, layout, config_of):
    """Of every token of a step, which was sampled from weights that two steps have trained."""
    compare(tmp_path, name, layout, config_of)


@pytest.mark.parametrize(("name", "engines"), ENGINES)
def test_data_parallel_engines_compute_what_transformers_does(tmp_path, name, engines):
    compare(tmp_path, name, "tp2", "ours", *engines)


def compare(tmp_path: Path, name: str, layout: str, config_of: str, *engines: str) -> None:
    """Train, export, and hold the engine's log-probs against transformers'."""
    hf = settings_of(name)
    trained, step = train_and_convert(
        tmp_path,
        hf,
        layout,
        *engines,
        last=LAST,
        config_of_transformers=config_of == "transformers",
    )
    errors = differences(trained, step)
    print(
        f"{name} {layout} config.json: {config_of}, median {np.median(errors):.2g},",
        f"{(errors > 1e-3).mean():.2%} of {len(errors)} tokens beyond 1e-3",
    )
    assert np.median(errors) < 1e-5
    assert (errors > 1e-3).mean() <= 0.01
    if "num_experts_per_tok" in hf:
        for record in runs.metrics(tmp_path / "run"):
            assert record["routing/rollout_slot_flip_rate"] <= 0.01
