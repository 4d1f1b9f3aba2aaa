"""`mismatch` holds its gap against the one that the step had in training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from grpo_megatron.config.history import record_settings
from grpo_megatron.config.loader import write_resolved
from grpo_megatron.errors import DataError
from grpo_megatron.launch import mismatch
from grpo_megatron.plan.resolve import resolve
from grpo_megatron.rundir import RunDir

COLUMNS = {
    "live": np.array([-1.0, -2.0]),
    "rollout": np.array([-1.0, -2.05]),
    "through_3": np.array([-1.0, -2.01]),
    "trained": np.ones(2),
}


def problem_with(root: Path, recorded: float | None, *flags: str, now: tuple[str, ...] = ()) -> str:
    """What is told of step 1, trained with `flags`, by a trainer with `now` on top."""
    run_dir = RunDir(root)
    resolved = resolve("demo/gspo-moe-cpu", flags)
    write_resolved(run_dir.config, resolved)
    record_settings(run_dir, 0)
    write_resolved(run_dir.config, resolve("demo/gspo-moe-cpu", ["routing.replay=none"]))
    record_settings(run_dir, 2)
    records = [{"step": 0, "mismatch/abs_max": 9.0}, {"step": 1, "mismatch/abs_max": recorded}]
    if recorded is None:
        records.pop()
    text = "".join(json.dumps(record) + "\n" for record in records)
    run_dir.metrics.write_text(text)
    config = resolve("demo/gspo-moe-cpu", [*flags, *now]).config
    return mismatch._unlike_recorded(run_dir, 1, config, COLUMNS)


R2 = "routing.replay=r2"
R3 = "routing.replay=r3"


@pytest.mark.parametrize(
    ("recorded", "flags", "now", "is_told"),
    [
        (0.05, (R2,), (), False),
        (0.0501, (R2,), (), True),
        (0.04, (R3,), (), False),  # by the routes that were replayed when it was trained
        (0.05, (R3,), (), True),
        (0.06, (R2,), ("trainer.precision=bfloat16",), False),
        (0.06, (R2, "trainer.precision=bfloat16"), ("trainer.precision=float32",), False),
        (0.08, (R2, "trainer.precision=bfloat16"), (), True),
        (None, (R2,), (), False),  # its training was not recorded
        (0.9, (R2, "objective.proximal=interpolated"), (), False),
    ],
)
def test_the_recorded_gap(tmp_path, recorded, flags, now, is_told):
    assert bool(problem_with(tmp_path, recorded, *flags, now=now)) == is_told


@pytest.mark.parametrize(
    ("recipe", "kind"),
    [
        ("stages/tiny-sft", "sft"),
        ("stages/tiny-preferences", "preferences"),
        ("stages/tiny-reward-model", "reward_model"),
    ],
)
def test_a_step_that_no_engine_has_sampled(tmp_path, monkeypatch, recipe, kind):
    run_dir = RunDir(tmp_path)
    write_resolved(run_dir.config, resolve(recipe))
    record_settings(run_dir, 0)
    monkeypatch.setattr(mismatch, "choose_step", lambda run_dir, step: 0)
    with pytest.raises(DataError, match=f"a run of kind {kind} trains answers of its data set"):
        list(mismatch.report_mismatch(tmp_path, None, (), None, by_layer=False))


@pytest.mark.parametrize(
    ("flags", "may"),
    [
        ((R2,), False),
        ((R2, "trainer.precision=bfloat16"), True),
        ((R3, "trainer.precision=bfloat16"), False),
    ],
)
def test_where_rounding_may_choose_other_experts(flags, may):
    config = resolve("demo/gspo-moe-cpu", flags).config
    assert mismatch._may_route_otherwise(config) == may
    dense = resolve("dense/qwen3-8b").config
    assert dense.trainer.precision == "bfloat16" and not mismatch._may_route_otherwise(dense)
