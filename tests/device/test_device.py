"""The pretended device refuses what a GPU refuses, and knows what its host waits for."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_megatron import pretended_cuda
from grpo_megatron.errors import SetupError

pytestmark = pytest.mark.device

CASES = "tests.device.device_cases:"
ROOT = Path(__file__).parents[2]


def test_the_trainer_sees_a_gpu(pretended1):
    assert pretended1.run(CASES + "where_it_is") == {
        "has_cuda": True,
        "backend": "nccl",
        "device": "cuda:0",
        "type": "torch.cuda.FloatTensor",
        "is_cuda": True,
        "cpu_platform": False,
    }


def test_refusals(pretended1):
    answers = pretended1.run(CASES + "refusals")
    taken = [answers.pop(name) for name in ("host number", "host index", "device tensor to NCCL")]
    assert taken == ["", "", ""]
    same_device = "Expected all tensors to be on the same device"
    expected = {
        "two places": same_device,
        "host index of a gather": same_device,
        "device index of the host": same_device,
        "numpy": "can't convert cuda:0 device type tensor to numpy",
        "two devices": same_device,
        "host tensor to NCCL": "No backend type associated with device type cpu",
        "pinning a device tensor": "cannot pin",
        "data of another place": "incompatible tensor type",
    }
    assert answers.keys() == expected.keys()
    for name, beginning in expected.items():
        assert answers[name].startswith(beginning), (name, answers[name])


def test_waits(pretended1):
    found = pretended1.run(CASES + "waits")
    read, shape = ["tests: number read"], ["tests: shape depends on values"]
    to_host = ["tests: copy to the host"]
    from_host = ["tests: copy from memory that is not pinned"]
    assert found == {
        "item": read,
        "condition": read,
        "tolist": to_host,
        "nonzero": shape,
        "mask": shape,
        "bincount": shape,
        "repeat": shape,
        "cpu": to_host,
        "to device": from_host,
        "unpinned, not blocking": from_host,
        "pinned, converted": from_host,
        "new tensor": from_host,
        "synchronize": ["tests: explicit wait"],
        "arithmetic": [],
        "where": [],
        "masked fill": [],
        "repeat of known size": [],
        "zeros": [],
        "pinned": [],
        "our copy to the device": [],
        "our copy to the host": [],
    }


def test_a_copy_is_there_after_the_wait_and_not_before(pretended1):
    found = pretended1.run(CASES + "copies")
    assert all(math.isnan(value) for value in found["early"])
    assert found["late"] == [1.0, 2.0]
    assert found["back"] == [11.0, 12.0]


def test_a_module_keeps_its_parameters_on_the_way_to_the_device(pretended1):
    assert pretended1.run(CASES + "moved_module") == {
        "same object": True,
        "is a parameter": True,
        "attribute": False,
        "device": "cuda:0",
        "values": True,
        "gradient": [[1.0] * 3] * 2,
    }


# --- processes


def run_module(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


def test_a_module_can_be_run_on_it():
    done = run_module("-m", "grpo_megatron.pretended_cuda", "-m", "tests.device.says_where")
    assert done.stdout == "cuda:0 True\n", done.stderr
    assert "PRETENDED CUDA" in done.stderr  # loudly


def test_without_a_compiler_it_says_what_to_install(tmp_path):
    done = run_module(
        *("-m", "grpo_megatron.pretended_cuda", "-m", "tests.device.says_where"),
        PATH=str(tmp_path),
        CXX="",
        XDG_CACHE_HOME=str(tmp_path),
    )
    assert done.returncode == SetupError.exit_code
    assert "no C++ compiler" in done.stderr and "apt-get install g++" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_that_is_asked_too_late_is_refused():
    script = ROOT / "tests" / "device" / "too_late.py"
    done = run_module(str(script), PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    assert "megatron was imported before" in done.stdout


def test_only_a_variable_that_is_set_asks_for_it(monkeypatch):
    for value, is_wanted in {"1": True, "0": False, "": False}.items():
        monkeypatch.setenv(pretended_cuda.VARIABLE, value)
        assert pretended_cuda.is_wanted() is is_wanted
    monkeypatch.delenv(pretended_cuda.VARIABLE)
    assert not pretended_cuda.is_wanted()
    assert pretended_cuda.environment() == {pretended_cuda.VARIABLE: "1"}
