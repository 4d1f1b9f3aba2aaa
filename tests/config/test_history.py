"""Which settings trained which step, over resumes and crashes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_megatron.config.history import (
    record_first_settings,
    record_settings,
    settings_of_step,
)
from grpo_megatron.config.loader import load_recipe, read_resolved, write_resolved
from grpo_megatron.errors import ConfigError
from grpo_megatron.rundir import RunDir

ATTEMPTS = st.lists(st.tuples(st.integers(0, 8), st.integers(1, 4), st.sampled_from("abc")))
"""Steps back to the checkpoint with which an attempt goes on, steps that it takes, its settings."""


def text_of(run_dir: RunDir, step: int) -> str:
    return settings_of_step(run_dir, step).read_text()


@given(attempts=ATTEMPTS)
def test_a_step_has_the_settings_of_the_last_attempt_that_trained_it(tmp_path_factory, attempts):
    run_dir = RunDir(tmp_path_factory.mktemp("run"))
    trained_with: list[str] = []
    for num_lost, num_steps, settings in attempts:
        first = max(len(trained_with) - num_lost, 0)
        run_dir.config.write_text(settings)
        record_settings(run_dir, first)
        trained_with = trained_with[:first] + [settings] * num_steps
        assert [text_of(run_dir, step) for step in range(len(trained_with))] == trained_with


def test_equal_settings_are_recorded_once(tmp_path):
    run_dir = RunDir(tmp_path)
    for step, settings in enumerate("aaba"):
        run_dir.config.write_text(settings)
        record_settings(run_dir, 10 * step)
    names = sorted(path.name for path in run_dir.config_history.iterdir())
    assert names == ["step_000000.json", "step_000020.json", "step_000030.json"]


def test_a_run_of_an_earlier_release_has_its_newest_settings(tmp_path):
    """Until it is resumed, when these are recorded as those of all steps so far."""
    run_dir = RunDir(tmp_path)
    run_dir.config.write_text("old")
    assert settings_of_step(run_dir, 7) == run_dir.config
    record_first_settings(run_dir)
    run_dir.config.write_text("new")
    record_first_settings(run_dir)
    record_settings(run_dir, 5)
    assert [text_of(run_dir, step) for step in (0, 4, 5, 9)] == ["old", "old", "new", "new"]


def test_a_damaged_record_hinders_no_resume_and_is_named_where_it_is_needed(tmp_path):
    run_dir = RunDir(tmp_path)
    write_resolved(run_dir.config, load_recipe("demo/gspo-moe-cpu"))
    record_settings(run_dir, 0)
    damaged = run_dir.step_settings(0)
    damaged.write_bytes(b"\xff" + damaged.read_bytes())
    record_first_settings(run_dir)
    record_settings(run_dir, 3)
    assert settings_of_step(run_dir, 3) == run_dir.step_settings(3)
    assert run_dir.step_settings(3).read_bytes() == run_dir.config.read_bytes()
    with pytest.raises(ConfigError, match="cannot read the run's configuration") as caught:
        read_resolved(settings_of_step(run_dir, 2))
    assert caught.value.where == str(damaged)
