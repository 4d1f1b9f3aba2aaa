"""What the supervisor's command does around the run."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_megatron.errors import EngineError
from grpo_megatron.launch import local
from grpo_megatron.rundir import RunDir
from grpo_megatron.telemetry.events import read_events


@pytest.mark.parametrize(
    ("error", "exit_code", "reason"),
    [
        (EngineError("rollout-0 died", where="somewhere"), 5, "rollout-0 died"),
        (AssertionError("of a library"), 1, "AssertionError: of a library"),
        (OSError(28, "No space left on device"), 3, "cannot write: No space left on device"),
    ],
)
def test_every_failure_is_an_event(tmp_path, error, exit_code, reason):
    """Also one without a name of its own."""

    def fail() -> int:
        raise error

    run_dir = RunDir(tmp_path)
    with pytest.raises(type(error)) as raised:
        local._supervised(SimpleNamespace(run=fail, run_dir=run_dir))
    assert raised.value is error
    (event,) = read_events(run_dir.events)
    assert (event["kind"], event["exit_code"], event["reason"]) == ("failed", exit_code, reason)
