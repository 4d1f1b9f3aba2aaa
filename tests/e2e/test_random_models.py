"""Models that nobody chose: what is recorded at each step is what transformers computes.

Other seeds, here 40 to 49:
`RANDOM_MODELS=40:10 python -m pytest -m families tests/e2e/test_random_models.py`."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from tests.e2e import runs
from tests.e2e.family_models import differences, write_random_model
from tests.e2e.random_models import random_case

pytestmark = [pytest.mark.engine, pytest.mark.families]

STEPS = 3
R3 = ("routing.replay=r3", "routing.on_missing=fail")


def seeds() -> range:
    first, count = os.environ.get("RANDOM_MODELS", "0:10").split(":")
    return range(int(first), int(first) + int(count))


@pytest.mark.parametrize("seed", seeds())
def test_each_recorded_step_is_what_transformers_computes(tmp_path, seed):
    case = random_case(seed)
    print(case)
    model = tmp_path / "model"
    write_random_model(model, case.hf, config_of_transformers=seed % 2 == 0, seed=seed)
    recipe = tmp_path / "recipe.toml"
    text = Path(runs.RECIPE).read_text()
    recipe.write_text(text.replace('preset = "tiny-qwen3-moe"', f'path = "{model}"'))
    run = tmp_path / "run"
    succeed(
        "train",
        str(recipe),
        f"runs_dir={tmp_path}",
        "name=run",
        f"num_steps={STEPS}",
        f"seed={seed}",
        "checkpoint.interval=1",
        f"checkpoint.keep={STEPS}",
        *case.layout,
        *(R3 if case.is_sparse else ()),
    )
    for step in range(STEPS):
        assert_recorded(run, step, weights_of(tmp_path, run, model, step))
    if case.is_sparse:
        for record in runs.metrics(run):
            assert record["routing/rollout_slot_flip_rate"] <= 0.01
    succeed("replay", f"{run}@{STEPS - 1}", *case.other_layout)
    succeed("mismatch", f"{run}@{STEPS - 1}", *case.other_layout)


def succeed(*arguments: str) -> None:
    done = runs.command(*arguments)
    assert done.returncode == 0, done.stdout + done.stderr


def weights_of(folder: Path, run: Path, model: Path, step: int) -> Path:
    """The weights that a step was sampled from, in Hugging Face's format."""
    if step == 0:
        return model
    exported = folder / f"step-{step}"
    checkpoint = run / f"checkpoints/step_{step:06}"
    succeed("convert", "to-hf", str(checkpoint), "--to", str(exported), "--no-probe")
    return exported


def assert_recorded(run: Path, step: int, weights: Path) -> None:
    """Half of the tokens are nearly exact; a hundredth may have met a tie between experts."""
    errors = differences(weights, run / f"store/step_{step:06}")
    print(f"step {step}: median {np.median(errors):.2g} of {len(errors)}, worst {errors.max():.2g}")
    assert np.median(errors) < 1e-5
    assert (errors > 1e-3).mean() <= 0.01
