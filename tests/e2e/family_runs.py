"""A whole run of a tiny random model of any family, and its weights at the last recorded step."""

from __future__ import annotations

from pathlib import Path

from tests.e2e import runs
from tests.e2e.family_models import write_random_model

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


def train_and_convert(
    folder: Path,
    hf: dict,
    layout: str,
    *overrides: str,
    last: int,
    config_of_transformers: bool = False,
) -> tuple[Path, Path]:
    """Train a random model of config.json `hf` at one of `LAYOUTS`, with R3 where it is sparse.

    Returns Hugging Face weights of step `last`, which were trained in all steps before it, and the
    recorded samples of that step. The run is `folder / "run"`."""
    model, run, trained = folder / "model", folder / "run", folder / "trained"
    write_random_model(model, hf, config_of_transformers=config_of_transformers)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        Path(runs.RECIPE).read_text().replace('preset = "tiny-qwen3-moe"', f'path = "{model}"')
    )
    num_ranks, sizes = LAYOUTS[layout]
    if "num_experts_per_tok" in hf:
        overrides += R3
    done = runs.command(
        "train",
        str(recipe),
        f"runs_dir={folder}",
        "name=run",
        f"num_steps={last + 1}",
        f"checkpoint.interval={last}",
        f"trainer.num_ranks={num_ranks}",
        "trainer.expert_parallel_size=1",
        *(f"trainer.{key}={size}" for key, size in sizes.items()),
        *overrides,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    checkpoint = str(run / f"checkpoints/step_{last:06}")
    converted = runs.command("convert", "to-hf", checkpoint, "--to", str(trained), "--no-probe")
    assert converted.returncode == 0, converted.stdout + converted.stderr
    return trained, run / f"store/step_{last:06}"
