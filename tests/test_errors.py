"""What is said of errors that are not ours, and to other processes."""

from __future__ import annotations

import errno

import pytest

from grpo_megatron.errors import (
    EngineError,
    GrpoMegatronError,
    SetupError,
    TrainerError,
    as_own_error,
    describe_error,
    raise_described,
)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_one_whoever_meets_it(number):
    error = OSError(number, "No space left on device", "runs/a/metrics.jsonl")
    found = as_own_error(error, EngineError)
    assert type(found) is SetupError and found.exit_code == 3
    assert found.where == "runs/a/metrics.jsonl" and "No space left on device" in str(found)
    with pytest.raises(SetupError, match="No space left on device"):
        raise_described(describe_error(error, TrainerError), TrainerError)


def test_other_errors_keep_their_kind():
    own = TrainerError("the loss is nan")
    assert as_own_error(own, EngineError) is own
    found = as_own_error(OSError(errno.EACCES, "Permission denied"), EngineError)
    assert type(found) is EngineError and "Permission denied" in str(found)
    assert as_own_error(ValueError("x"), GrpoMegatronError).exit_code == 1


def test_further_lines_of_a_remedy_stand_under_its_first():
    error = GrpoMegatronError("too large", where="a\nb", remedy="use less\nfits: x=1\nfits: x=2")
    assert str(error).splitlines() == [
        "too large",
        "  where:  a",
        "          b",
        "  remedy: use less",
        "          fits: x=1",
        "          fits: x=2",
    ]
