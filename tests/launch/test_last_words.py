"""Which lines of a log are shown of a process that ended."""

from __future__ import annotations

import pytest

from grpo_megatron.launch.last_words import error_of, telling_lines
from grpo_megatron.launch.processes import End

PASSING = [
    "(APIServer pid=5) WARNING 11-27 17:39:58 [system_utils.py:255] OSError: too many open files",
    "(EngineCore pid=6) INFO 11-27 17:40:55 [core.py:402] init engine",
]
SERVER = [
    "Traceback (most recent call last):",
    *(f'  File "vllm/{number}.py", line {number}, in start' for number in range(30)),
    "RuntimeError: Engine core initialization failed. See root cause above.",
]
CORE = [
    "(EngineCore pid=6) ERROR 12:05:48 [core.py:1510] Traceback (most recent call last):",
    "(EngineCore pid=6) ERROR 11-27 12:05:48 [core.py:1510] ValueError: no room for the cache",
    "Traceback (most recent call last):",
    '  File "vllm/core.py", line 7, in run',
    "ValueError: no room for the cache",
]


@pytest.mark.parametrize(
    ("core", "cause"),
    [
        (CORE, "ValueError: no room for the cache"),
        (
            ["CUDA error (flash_fwd_launch_template.h:200): device kernel image is invalid"],
            "CUDA error (flash_fwd_launch_template.h:200): device kernel image is invalid",
        ),
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB."], None),
    ],
    ids=["a traceback", "no Python", "one line"],
)
def test_an_engines_cause_stands_before_its_servers_last_lines(core, cause):
    lines = [*PASSING, *core, PASSING[1], *SERVER]
    assert telling_lines("\n".join(lines)) == [cause or core[0], "…", *SERVER[-15:]]
    assert error_of("\n".join(lines)) == (cause or core[0])


def test_other_logs_are_their_last_lines():
    assert telling_lines("\n".join(CORE)) == CORE
    assert telling_lines("\n".join([*PASSING, *CORE * 9])) == (CORE * 9)[-15:]
    assert telling_lines("") == []


def test_no_cause_is_made_up():
    lines = [*PASSING, *SERVER]
    assert telling_lines("\n".join(lines)) == SERVER[-15:]
    assert error_of("\n".join(lines)) == SERVER[-1]
    assert error_of("\n".join([*CORE, PASSING[1]])) == ""  # killed afterwards
    assert error_of("") == ""


def test_an_end_is_told_with_its_cause(tmp_path):
    log = tmp_path / "rollout-0.log"
    log.write_text("\n".join([*PASSING, *CORE, *SERVER]), "utf-8")
    told = str(End("rollout-0", 1, log)).splitlines()
    assert told[:2] == [
        "rollout-0 ended with exit code 1",
        "    rollout-0| ValueError: no room for the cache",
    ]
    assert str(End("rollout-0", 1, tmp_path / "none.log")) == "rollout-0 ended with exit code 1"
