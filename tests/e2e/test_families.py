"""Every family through the real command: the engine's log-probs are transformers' at each step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e import runs
from tests.e2e.family_models import differences, settings_of, write_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.families]

LAST = 2  # the step that is looked at; its weights are those of a checkpoint
R3 = ("routing.replay=r3", "routing.on_missing=fail")
LAYOUTS = {
    "one": (1, {}),
    "tp2": (2, {"tensor_parallel_size": 2}),
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "ep2": (2, {"expert_parallel_size": 2}),
    "cp2": (2, {"context_parallel_size": 2}),
    "cp2_ep2": (2, {"context_parallel_size": 2, "expert_parallel_size": 2}),
    "tp2_etp1": (2, {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 1}),
    "tp2_pp2": (4, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}),
    "pp2_ep2": (4, {"pipeline_parallel_size": 2, "expert_parallel_size": 2}),
}
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
    model, run = tmp_path / "model", tmp_path / "run"
    write_checkpoint(model, name, config_of_transformers=config_of == "transformers")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        Path(runs.RECIPE).read_text().replace('preset = "tiny-qwen3-moe"', f'path = "{model}"')
    )
    num_ranks, sizes = LAYOUTS[layout]
    is_sparse = "num_experts_per_tok" in settings_of(name)
    done = runs.command(
        "train",
        str(recipe),
        f"runs_dir={tmp_path}",
        "name=run",
        f"num_steps={LAST + 1}",
        f"checkpoint.interval={LAST}",
        f"trainer.num_ranks={num_ranks}",
        "trainer.expert_parallel_size=1",
        *(f"trainer.{key}={size}" for key, size in sizes.items()),
        *(R3 if is_sparse else ()),
        *engines,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    trained = tmp_path / "trained"
    converted = runs.command(
        "convert",
        "to-hf",
        str(run / f"checkpoints/step_{LAST:06}"),
        "--to",
        str(trained),
        "--no-probe",
    )
    assert converted.returncode == 0, converted.stdout + converted.stderr
    errors = differences(trained, run / f"store/step_{LAST:06}")
    print(
        f"{name} {layout} config.json: {config_of}, median {np.median(errors):.2g},",
        f"{(errors > 1e-3).mean():.2%} of {len(errors)} tokens beyond 1e-3",
    )
    assert np.median(errors) < 1e-5
    assert (errors > 1e-3).mean() <= 0.01
    if is_sparse:
        for record in runs.metrics(run):
            assert record["routing/rollout_slot_flip_rate"] <= 0.01
