"""Staleness that a real run predicts from its durations is the one that its tokens have: settings
in which training, sampling, or a publish is what a step waits for. Minutes a run."""

from __future__ import annotations

import statistics

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.learning, pytest.mark.timeout(1300)]
DEMO = "demo/gspo-moe-cpu"
NUM_STEPS = 24
WINDOW = 10
"""`alarms.window`: over how many steps the prediction is a mean."""
SHORT = (
    "cold_start=null",
    f"num_steps={NUM_STEPS}",
    "batch.num_prompts=16",
    "data.num_validation=16",
    "data.num_heldout=16",
    "checkpoint.interval=0",
    "trainer.num_ranks=1",
    "trainer.expert_parallel_size=1",
)
LONG_ANSWERS = ("rollout.max_new_tokens=48", "rollout.max_model_len=128")


@pytest.mark.parametrize(
    ("ahead", "pause", "settings", "tolerance"),
    [
        (1, "keep", (), 0.15),
        (2, "keep", (), 0.15),
        (4, "keep", LONG_ANSWERS, 0.3),
        (2, "wait", LONG_ANSWERS, 0.15),
    ],
)
def test_predicted_is_seen(tmp_path, ahead, pause, settings, tolerance):
    """Within this share of the seen mean of a window, or a tenth of a version. With four steps
    ahead and long answers neither trainer nor engines are clearly slower, so that the chain fills
    and empties by chance."""
    given = [f"batch.max_staleness={ahead}", f"publish.pause={pause}", *SHORT, *settings]
    done = runs.command("train", DEMO, *given, "name=run", f"runs_dir={tmp_path}", timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = runs.metrics(tmp_path / "run")
    whole = steps[: len(steps) - ahead]  # the last ones have none behind them in the engines
    seen = statistics.fmean(step["staleness/seen_mean"] for step in whole[-WINDOW:])
    predicted = whole[-1]["staleness/predicted_mean"]
    print(f"seen {seen:.3f}, predicted {predicted:.3f}")
    assert max(step["staleness/seen_max"] for step in steps) <= ahead
    assert predicted == pytest.approx(seen, rel=tolerance, abs=0.1)
