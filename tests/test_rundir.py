"""Which run a path is of."""

from __future__ import annotations

import pytest

from grpo_megatron.errors import DataError
from grpo_megatron.plan.resolve import refuse_missing, resolve
from grpo_megatron.rundir import run_that_writes


@pytest.mark.parametrize(
    ("run", "below"),
    [
        ("first", "export"),
        ("first", "export/math"),
        ("first", "adapter/math"),
        ("first", "export/export"),  # of a domain of that name
        ("export", "export"),
        ("export", "export/math"),
    ],
)
def test_what_a_run_is_yet_to_write(tmp_path, run, below):
    root = tmp_path / run
    path = root / below
    assert run_that_writes(path) is None
    root.mkdir()
    (root / "config.json").touch()
    assert run_that_writes(path) == root
    assert run_that_writes(root / "checkpoints" / "step_000001") is None


def test_a_submitted_run_may_begin_with_what_one_before_it_writes_for_a_domain(tmp_path):
    export = tmp_path / "first" / "export" / "math"
    config = resolve("demo/gspo-moe-cpu").config
    model = config.model.model_copy(update={"path": export, "preset": None})
    config = config.model_copy(update={"model": model})
    export.parent.parent.mkdir()
    with pytest.raises(DataError, match="no such file or directory"):
        refuse_missing(config, coming=True)
    (tmp_path / "first" / "config.json").touch()
    refuse_missing(config, coming=True)
    with pytest.raises(DataError, match="no such file or directory"):
        refuse_missing(config)
